"""An event loop whose time jumps to the next timer: a live mesh as fast as the processor allows.

All services run as they are; only waiting costs nothing, and computing takes no time: while another
process computes for the loop (a replay), time stands still, so nothing overtakes its answer. What
comes out does not depend on how busy the machine is. While servers start, time passes as it does
on the wall.
"""

import asyncio
import selectors
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LONGEST_WAIT_S = 0.05


class _JumpingSelector(selectors.DefaultSelector):
    loop: "VirtualTimeLoop"

    def select(self, timeout: float | None = None) -> Any:
        """Wait for files; where nothing outside is waited for, jump instead of waiting."""
        loop = self.loop
        if loop.num_held == 0 and loop.num_computing == 0 and timeout is not None:
            ready = super().select(0)
            if not ready:
                loop.jump(timeout)
            return ready
        started_s = time.monotonic()
        ready = super().select(LONGEST_WAIT_S if timeout is None else min(timeout, LONGEST_WAIT_S))
        if loop.num_held > 0:
            loop.jump(time.monotonic() - started_s)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """See the module's text.

    Attributes:
        num_held: Blocks in which time passes as on the wall.
        num_computing: Functions that run elsewhere; time stands still until they are done.
    """

    def __init__(self) -> None:
        selector = _JumpingSelector()
        selector.loop = self
        self.num_held = self.num_computing = 0
        self._virtual_s = time.monotonic()
        super().__init__(selector)

    def time(self) -> float:
        """Return the loop's time, seconds."""
        return self._virtual_s

    def jump(self, seconds: float) -> None:
        """Move time on."""
        self._virtual_s += max(0.0, seconds)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let time pass as on the wall while the block runs."""
        self.num_held += 1
        try:
            yield
        finally:
            self.num_held -= 1

    def run_in_executor(  # type: ignore[override]  # any function, any arguments
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> Any:
        """Run a function elsewhere; time stands still until it is done."""
        self.num_computing += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._release)
        return future

    def _release(self, _: object) -> None:
        self.num_computing -= 1
