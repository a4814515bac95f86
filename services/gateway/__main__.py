"""`python -m services.gateway`."""

import sys

from services.gateway.app import run
from services.gateway.settings import GatewaySettings
from shared.runtime.process import main

if __name__ == "__main__":
    sys.exit(main(run, GatewaySettings))
