"""Probes: fail when a loop makes no progress, not merely when the process dies."""

import httpx
import pytest

from shared.adapters.clock import ManualClock
from shared.runtime.health import Health, _app
from shared.runtime.metrics import Metrics


@pytest.fixture
def clock() -> ManualClock:
    """Return a clock that moves only when told."""
    return ManualClock()


async def _status(health: Health, metrics: Metrics, path: str) -> tuple[int, str]:
    transport = httpx.ASGITransport(app=_app(health, metrics))
    async with httpx.AsyncClient(transport=transport, base_url="http://mesh") as client:
        response = await client.get(path)
        return response.status_code, response.text


async def test_live_fails_when_a_loop_is_overdue(clock: ManualClock):
    """A consumer that hangs makes the process unhealthy although it runs."""
    health, metrics = Health(clock), Metrics("dispatcher")
    health.beat("intake", max_silence_s=5)
    assert (await _status(health, metrics, "/live"))[0] == 200
    await clock.advance(6)
    status, text = await _status(health, metrics, "/live")
    assert status == 503
    assert "intake" in text
    health.beat("intake", max_silence_s=5)
    assert (await _status(health, metrics, "/live"))[0] == 200


async def test_ready_names_every_cause(clock: ManualClock):
    """Unready until started; each blocking cause is told."""
    health, metrics = Health(clock), Metrics("worker", "a100-0")
    assert (await _status(health, metrics, "/ready"))[0] == 503
    health.clear()
    assert (await _status(health, metrics, "/ready"))[0] == 200
    health.block("kafka", "no answer from 127.0.0.1:9092")
    status, text = await _status(health, metrics, "/ready")
    assert status == 503
    assert "127.0.0.1:9092" in text


async def test_metrics_expose_counters_with_their_labels(clock: ManualClock):
    """What a service counted is what it exposes."""
    metrics = Metrics("worker", "a100-0")
    metrics.outcomes.add(kind="completed", reason="")
    metrics.outcomes.add(2, kind="failed", reason="generation_failed")
    _, text = await _status(Health(clock), metrics, "/metrics")
    assert 'kind="failed",reason="generation_failed",service="worker"} 2.0' in text
    assert metrics.totals()["hexflow_call_outcomes_total{kind=completed,reason=}"] == 1.0
