"""Real processes on real Kafka and Redis are killed, and an independent audit counts.

The short form of `hexflow chaos`; docs/chaos.md tells the long one and what it measured.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from services.cli.chaos.faults import SHORT, parse_kinds
from services.cli.chaos.run import ChaosPlan, ChaosResult, chaos

pytestmark = [pytest.mark.chaos, pytest.mark.real, pytest.mark.slow]


def chaos_plan(folder: Path, kinds: str, *, num_queries: int = 30, **changes: Any) -> ChaosPlan:
    """Return a short run."""
    fields: dict[str, Any] = {
        "seed": 1,
        "num_queries": num_queries,
        "kinds": parse_kinds(kinds),
        "short": True,
        "fleet": "hetero-1",
        "time_scale": 20.0,
        "capacity": 4,
        "patience_s": 120.0,
        "settings": None,
        "folder": folder,
        "quiet": True,
    }
    return ChaosPlan(**fields | changes)


async def test_every_query_ends_once_whatever_is_killed(tmp_path: Path):
    """A worker and a dispatcher die with calls in flight and Redis is wiped: nothing is lost."""
    plan = chaos_plan(tmp_path, ",".join(SHORT), seed=3)
    result: ChaosResult = await chaos(plan, lambda _: None, asyncio.Event())
    found = result.audit
    assert found.queries["submitted"] == found.queries["completed"] == 30
    assert found.holds
    assert result.unexpected == ()
    assert {effect.fault.split()[0] for effect in found.effects} == set(SHORT)
    kills = [effect for effect in found.effects if effect.fault.startswith("kill")]
    assert all(effect.counts and effect.in_flight for effect in kills)
    assert set(found.recovery_s()) == set(SHORT)


async def test_a_killed_producer_goes_on_where_it_was(tmp_path: Path):
    """A producer process dies with calls under way: the next life acts on each once."""
    plan = chaos_plan(tmp_path, "kill-producer", num_queries=12)
    found = (await chaos(plan, lambda _: None, asyncio.Event())).audit
    assert found.queries["submitted"] == found.queries["completed"] == 12
    assert found.holds
    (effect,) = found.effects
    assert effect.in_flight > 0
    assert effect.recovery_s is not None


async def test_a_rolling_restart_with_admission_turns_nothing_away(tmp_path: Path):
    """Every service is restarted under load: no query fails, none is rejected."""
    roomy = {"admission": True, "time_scale": 10.0, "capacity": 16}
    plan = chaos_plan(tmp_path, "rolling-restart", num_queries=40, **roomy)
    result = await chaos(plan, lambda _: None, asyncio.Event())
    assert result.audit.queries == {"submitted": 40, "lost": 0, "completed": 40}
    assert result.audit.holds
    assert result.unexpected == ()
