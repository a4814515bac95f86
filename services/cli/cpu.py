"""How much processor time a process has used."""

import os
from pathlib import Path


def cpu_s(pid: int) -> float | None:
    """Return the processor time of a process and its threads so far, seconds.

    None where the system does not tell (no `/proc`) or the process is gone.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # a command name may hold blanks
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
