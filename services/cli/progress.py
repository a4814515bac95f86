"""Live progress of a run on stderr: a bar with the counts so far; plain lines off a terminal."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from services.cli.tally import KINDS, Tally

REFRESH_S = 0.5
LINE_EVERY_S = 10.0


def status_text(tally: Tally) -> str:
    """Return the counts of a run so far in one line."""
    parts = [
        f"submitted {tally.queries['submitted']}",
        f"active {tally.num_active}",
        f"completed {tally.queries['completed']}",
    ]
    lost = tally.num_ended - tally.queries["completed"]
    if lost:
        parts.append(f"not completed {lost}")
    p95_s = tally.p95_s()
    if math.isfinite(p95_s):
        parts.append(f"P95 {p95_s:.1f} s")
        parts.append(f"within SLO {tally.attainment():.0%}")
    return " · ".join(parts)


class _Status(ProgressColumn):
    def __init__(self, tally: Tally) -> None:
        super().__init__()
        self._tally = tally

    def render(self, task: Task) -> Text:  # noqa: ARG002 - the tally knows
        return Text(status_text(self._tally))


@asynccontextmanager
async def live_progress(
    console: Console, label: str, num_queries: int, tally: Tally, *, quiet: bool = False
) -> AsyncIterator[None]:
    """Show progress while the block runs.

    Args:
        console: Where to.
        label: Name of the run.
        num_queries: How many queries will be injected.
        tally: What to show.
        quiet: Show nothing.
    """
    if quiet:
        yield
        return
    async with asyncio.TaskGroup() as group:
        if console.is_terminal:
            task = group.create_task(_bar(console, label, num_queries, tally), name="progress")
        else:
            task = group.create_task(_lines(console, label, tally), name="progress")
        try:
            yield
        finally:
            task.cancel()


async def _bar(console: Console, label: str, num_queries: int, tally: Tally) -> None:
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        _Status(tally),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        bar = progress.add_task(label, total=num_queries)
        try:
            while True:
                progress.update(bar, completed=tally.num_ended, refresh=True)
                await asyncio.sleep(REFRESH_S)
        finally:
            progress.update(bar, completed=tally.num_ended, refresh=True)


async def _lines(console: Console, label: str, tally: Tally) -> None:
    while True:
        await asyncio.sleep(LINE_EVERY_S)
        console.print(f"{label}: {status_text(tally)}", soft_wrap=True)


async def warn_when_stalled(console: Console, tally: Tally, quiet_s: float) -> None:
    """Say so, again and again, when calls are open and no outcome comes.

    Args:
        console: Where to.
        tally: What comes back.
        quiet_s: Silence that is worth a word, wall seconds.
    """
    seen = -1
    while True:
        num = sum(tally.calls[kind] for kind in KINDS)
        num_open = tally.calls["submitted"] - num
        if num == seen and num_open > 0:
            console.print(
                f"no outcome for {quiet_s:g} s while calls are open ({num_open}): is a dispatcher "
                "running on this Kafka, and a worker?",
                style="yellow",
            )
        seen = num
        await asyncio.sleep(quiet_s)


class JobProgress:
    """Shows how far many jobs are: a bar on a terminal, else a line now and then.

    Args:
        console: Where to.
        quiet: Show nothing.
    """

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self._console = console
        self._quiet = quiet

    @contextmanager
    def stage(self, label: str, total: int) -> Iterator[Callable[[], None]]:
        """Show one stage; the block calls what it is given after every job."""
        if self._quiet or total == 0:
            yield lambda: None
        elif self._console.is_terminal:
            with self._bar() as bar:
                task = bar.add_task(label, total=total)
                yield lambda: bar.advance(task)
        else:
            yield _Lines(self._console, label, total).advance

    def _bar(self) -> Progress:
        return Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(compact=True),
            console=self._console,
        )


class _Lines:
    """Plain lines, at most one every few seconds."""

    def __init__(self, console: Console, label: str, total: int) -> None:
        self._console = console
        self._label = label
        self._total = total
        self._done = 0
        self._started_s = self._said_s = time.monotonic()

    def advance(self) -> None:
        """Count one job."""
        self._done += 1
        now_s = time.monotonic()
        if self._done == self._total or now_s - self._said_s >= LINE_EVERY_S:
            self._said_s = now_s
            spent_s = now_s - self._started_s
            self._console.print(f"{self._label}: {self._done}/{self._total} in {spent_s:.0f} s")
