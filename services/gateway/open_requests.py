"""The requests under way, so that a gateway that has to go can end them in order.

Without it the HTTP server would cut them: a client would see a broken connection, or a 500, and the
log a traceback for each.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class OpenRequests:
    """Requests under way."""

    def __init__(self) -> None:
        self._open: dict[asyncio.Task[None], int] = {}
        self._is_over = False

    @contextmanager
    def holding(self, task: "asyncio.Task[None]") -> Iterator[None]:
        """Know a request while the block runs.

        Args:
            task: What answers it.
        """
        self._open[task] = task.cancelling()
        try:
            yield
        finally:
            del self._open[task]

    def end(self) -> None:
        """Interrupt every request; each says so to its client, see `is_cut_off`."""
        self._is_over = True
        for task in self._open:
            task.cancel()

    def is_cut_off(self, task: "asyncio.Task[None]") -> bool:
        """Return whether `end` interrupted a request, and nobody else did; that is over then."""
        return self._is_over and task.uncancel() <= self._open[task]
