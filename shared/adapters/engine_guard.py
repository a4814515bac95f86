"""Ends every process of an engine when its worker has ended, however that happened.

vLLM's engine is a process of its own; a worker killed with SIGKILL leaves it alive, generating and
holding memory. The guard holds the read end of a pipe that only the worker writes to: it closes
when the worker ends. Until then it keeps looking at which processes descend from the worker, since
nothing tells that afterwards (their parent is gone, and vLLM overwrites their names and
environments). A process is known by pid and start time, so a pid that was given away again is safe.

Standard library only, so that the guard starts at once. Needs `/proc`, as vLLM needs Linux.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

GOODBYE = b"q"
LOOK_NOW = b"l"
LOOK_S = 0.2
GIVE_UP_S = 10.0
POLL_S = 0.05


class Seen(NamedTuple):
    """A process as `/proc` shows it.

    Attributes:
        pid: Its id.
        parent: Its parent's.
        started: When it began, clock ticks since boot.
    """

    pid: int
    parent: int
    started: int


def processes() -> dict[int, Seen]:
    """Return all processes that are no zombies."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields and fields[0] != "Z":
            pid = int(folder.name)
            found[pid] = Seen(pid, int(fields[1]), int(fields[19]))
    return found


def descendants(roots: Iterable[int]) -> set[Seen]:
    """Return all processes below others; the roots themselves are not among them."""
    table = processes()
    children: dict[int, list[Seen]] = {}
    for one in table.values():
        children.setdefault(one.parent, []).append(one)
    found: set[Seen] = set()
    waiting = list(roots)
    while waiting:
        for child in children.get(waiting.pop(), []):
            if child not in found:
                found.add(child)
                waiting.append(child.pid)
    return found


def still_there(known: Iterable[Seen]) -> set[Seen]:
    """Return those that have not ended, whatever their parent is by now."""
    table = processes()
    return {one for one in known if one.pid in table and table[one.pid].started == one.started}


def end_all(known: Iterable[Seen], grace_s: float = 0.0) -> bool:
    """Kill processes and all below them, and wait for their end.

    Args:
        known: Which.
        grace_s: How long they get to end by themselves first, seconds.

    Returns:
        Whether all have ended.
    """
    left = still_there(known)
    kill_at_s = time.monotonic() + grace_s
    give_up_at_s = kill_at_s + GIVE_UP_S
    while left:
        now_s = time.monotonic()
        if now_s > give_up_at_s:
            return False
        if now_s >= kill_at_s:
            left |= {one for one in descendants(one.pid for one in left) if one.pid != os.getpid()}
            for one in left:
                _kill(one.pid)
        time.sleep(POLL_S)
        left = still_there(left)
    return True


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return


class Guard:
    """A process that outlives this one, to end what it leaves."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - this file
            [sys.executable, "-S", __file__, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def look(self) -> None:
        """Return when it knows everything that this process has started so far; blocks."""
        told, heard = self._process.stdin, self._process.stdout
        if told is None or heard is None:
            return
        told.write(LOOK_NOW)
        told.flush()
        heard.read(1)

    def dismiss(self) -> None:
        """End the guard; it ends nothing else."""
        told, heard = self._process.stdin, self._process.stdout
        if told is not None and heard is not None:
            try:
                told.write(GOODBYE)
                told.close()
            except OSError:
                self._process.kill()
            heard.close()
        self._process.wait()


def main(worker: int) -> None:
    """Watch a worker's descendants, and end them when its pipe closes."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    known: set[Seen] = set()
    while True:
        ready, _, _ = select.select([sys.stdin.fileno()], [], [], LOOK_S)
        word = os.read(sys.stdin.fileno(), 1) if ready else LOOK_NOW
        if word == GOODBYE:
            return
        if not word:
            break
        known |= descendants([worker])
        if ready:
            os.write(sys.stdout.fileno(), LOOK_NOW)
    end_all(one for one in known if one.pid != os.getpid())


if __name__ == "__main__":
    main(int(sys.argv[1]))
