"""Real processes on real Kafka and Redis are killed, and an independent audit counts.

The short form of `hexflow chaos`; docs/chaos.md tells the long one and what it measured.
"""

import asyncio
from pathlib import Path

import pytest

from services.cli.chaos.faults import SHORT, parse_kinds
from services.cli.chaos.run import ChaosPlan, ChaosResult, chaos
from tests.support.servers import MissingServerError, cache_dir, do_without, prepare_kafka

pytestmark = [pytest.mark.chaos, pytest.mark.real, pytest.mark.slow]


@pytest.fixture(autouse=True)
def _own_kafka(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make sure that a Kafka can be started here: chaos needs one that it may stop."""
    monkeypatch.setenv("HEXFLOW_CACHE_DIR", str(cache_dir()))
    try:
        prepare_kafka(lambda _: None, {})
    except MissingServerError as missing:
        do_without(missing)


async def test_every_query_ends_once_whatever_is_killed(tmp_path: Path):
    """A worker and a dispatcher die with calls in flight and Redis is wiped: nothing is lost."""
    plan = ChaosPlan(
        seed=3,
        num_queries=30,
        kinds=parse_kinds(",".join(SHORT)),
        short=True,
        fleet="hetero-1",
        time_scale=20.0,
        capacity=4,
        patience_s=120.0,
        settings=None,
        folder=tmp_path,
        quiet=True,
    )
    result: ChaosResult = await chaos(plan, lambda _: None, asyncio.Event())
    found = result.audit
    assert found.queries["submitted"] == found.queries["completed"] == 30
    assert found.holds
    assert result.unexpected == ()
    assert {effect.fault.split()[0] for effect in found.effects} == set(SHORT)
    kills = [effect for effect in found.effects if effect.fault.startswith("kill")]
    assert all(effect.counts and effect.in_flight for effect in kills)
    assert set(found.recovery_s()) == set(SHORT)
