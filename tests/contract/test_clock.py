"""The clock's contract on the system's clock and on the one that tests move."""

import pytest

from shared.adapters.clock import ManualClock, SystemClock
from tests.contract.clock_contract import ClockContract


class TestSystemClock(ClockContract):
    """On the clock of running services."""

    @pytest.fixture
    def clock(self) -> SystemClock:
        """Return a clock at scale 1."""
        return SystemClock()

    @pytest.fixture
    def fast(self) -> SystemClock:
        """Return a clock at scale 20."""
        return SystemClock(20.0)


class TestManualClock(ClockContract):
    """On the clock that tests move."""

    @pytest.fixture
    def clock(self) -> ManualClock:
        """Return a clock at scale 1."""
        return ManualClock()

    @pytest.fixture
    def fast(self) -> ManualClock:
        """Return a clock at scale 20."""
        return ManualClock(20.0)
