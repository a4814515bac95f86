"""`python -m services.text2sql`."""

import sys

from services.text2sql.app import run
from services.text2sql.settings import AgentSettings
from shared.runtime.process import main

if __name__ == "__main__":
    sys.exit(main(run, AgentSettings))
