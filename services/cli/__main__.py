"""Entry point of the `hexflow` command."""

import sys

from services.cli.app import app
from services.cli.console import exit_code_for


def main() -> None:
    """Run the command line and exit; a user's error is one message, never a traceback."""
    try:
        app(prog_name="hexflow")
    except (Exception, KeyboardInterrupt) as exc:
        code = exit_code_for(exc)
        if code is None:
            raise
        sys.exit(code)


if __name__ == "__main__":
    main()
