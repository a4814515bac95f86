"""`python -m services.worker`."""

import sys

from services.worker.app import run
from services.worker.settings import WorkerSettings
from shared.runtime.process import main

if __name__ == "__main__":
    sys.exit(main(run, WorkerSettings))
