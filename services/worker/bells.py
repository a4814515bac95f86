"""Wakes a life's loops when something has changed, so that none of them polls."""

import asyncio


class Bells:
    """One event per loop that waits for change."""

    def __init__(self) -> None:
        self.claim = asyncio.Event()
        self.report = asyncio.Event()
        self.room = asyncio.Event()
        self.left = asyncio.Event()

    def ring(self) -> None:
        """Tell every loop that calls came, moved or ended."""
        self.claim.set()
        self.report.set()
        self.room.set()
        self.left.set()


async def heard_within(bell: asyncio.Event, wall_seconds: float) -> bool:
    """Wait for a bell, at most for a while, and reset it; returns whether it rang."""
    try:
        async with asyncio.timeout(wall_seconds):
            await bell.wait()
    except TimeoutError:
        return False
    bell.clear()
    return True
