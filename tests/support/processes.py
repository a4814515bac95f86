"""Whether other processes live."""

import subprocess
import time


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    done = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip()[:1] not in ("", "Z")


def dies_within(pid: int, limit_s: float) -> bool:
    """Wait for a process to end, and return whether it did before the limit."""
    give_up_s = time.monotonic() + limit_s
    while time.monotonic() < give_up_s:
        if not is_alive(pid):
            return True
        time.sleep(0.05)
    return False
