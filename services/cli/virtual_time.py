"""An event loop whose time jumps to the next timer: a live mesh as fast as the processor allows.

All services run as they are; only waiting costs nothing, and computing takes no time. While
something outside the loop is waited for (a reply of the state store, a replay in another process)
time passes as it does on the wall, so that nothing overtakes a reply. What comes out does not
depend on how busy the machine is.
"""

import asyncio
import functools
import inspect
import selectors
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shared.ports import StateStore

LONGEST_WAIT_S = 0.05


class _JumpingSelector(selectors.DefaultSelector):
    loop: "VirtualTimeLoop"

    def select(self, timeout: float | None = None) -> Any:
        """Wait for files; where nothing outside is waited for, jump instead of waiting."""
        if self.loop.num_held == 0 and timeout is not None:
            ready = super().select(0)
            if not ready:
                self.loop.jump(timeout)
            return ready
        started_s = time.monotonic()
        ready = super().select(LONGEST_WAIT_S if timeout is None else min(timeout, LONGEST_WAIT_S))
        self.loop.jump(time.monotonic() - started_s)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """See the module's text.

    Attributes:
        num_held: Things outside that are waited for.
    """

    def __init__(self) -> None:
        selector = _JumpingSelector()
        selector.loop = self
        self.num_held = 0
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
        """Run a function elsewhere; time is held until it is done."""
        self.num_held += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._release)
        return future

    def _release(self, _: object) -> None:
        self.num_held -= 1


class _Held:
    """Everything asked of an object holds the loop's time until it is answered."""

    def __init__(self, inner: object, loop: VirtualTimeLoop) -> None:
        self._inner = inner
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if inspect.iscoroutinefunction(found):
            return self._asking(found)
        if name == "urgency_set":
            return lambda *args: _Held(found(*args), self._loop)
        return found

    def _asking(self, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        @functools.wraps(method)
        async def ask(*args: Any, **named: Any) -> Any:
            with self._loop.held():
                return await method(*args, **named)

        return ask


def holding(store: StateStore, loop: VirtualTimeLoop) -> StateStore:
    """Return the store, asking of which holds the loop's time."""
    found: Any = _Held(store, loop)
    return found  # type: ignore[no-any-return]
