"""`python -m services.dispatcher`."""

import sys

from services.dispatcher.app import run
from services.dispatcher.settings import DispatcherSettings
from shared.runtime.process import main

if __name__ == "__main__":
    sys.exit(main(run, DispatcherSettings))
