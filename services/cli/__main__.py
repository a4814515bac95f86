"""Entry point of the `hexflow` command."""

import sys
from collections.abc import Sequence
from typing import NoReturn

from services.cli.app import app
from services.cli.console import exit_code_for
from shared.runtime.streams import open_standard_streams


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit; a user's error is one message, never a traceback.

    Args:
        arguments: Words after the program's name; None: the process's own.
    """
    open_standard_streams()
    try:
        app(arguments, prog_name="hexflow")
    except (Exception, KeyboardInterrupt) as exc:
        code = exit_code_for(exc)
        if code is None:
            raise
        sys.exit(code)
    sys.exit(0)


if __name__ == "__main__":
    main()
