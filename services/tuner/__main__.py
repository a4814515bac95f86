"""`python -m services.tuner`."""

import sys

from services.tuner.app import run
from services.tuner.settings import TunerSettings
from shared.runtime.process import main

if __name__ == "__main__":
    sys.exit(main(run, TunerSettings))
