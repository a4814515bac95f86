"""Standard input, output and error that are there whatever started the process."""

import os
import sys


def open_standard_streams() -> None:
    """Open the null device in place of every standard stream that is closed.

    A closed one costs more than its content: its descriptor is given to the next file or socket,
    prints then go there, and uvloop ends the process when it closes a descriptor that low.
    """
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != fd:
                os.dup2(opened, fd)
                os.close(opened)
            setattr(sys, name, os.fdopen(fd, mode, encoding="utf-8", closefd=False))
