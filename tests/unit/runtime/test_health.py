"""Probes: fail when a loop makes no progress, not merely when the process dies."""

import socket

import httpx
import pytest

from shared.adapters.clock import ManualClock
from shared.errors import ConfigError
from shared.runtime.health import Health, _app, probes
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


async def test_a_port_in_use_is_a_wrong_setting(clock: ManualClock):
    """The service ends with the address it could not listen on, and no traceback."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1 port {port}: Address already in use"):
            async with probes(Health(clock), Metrics("tuner"), host="127.0.0.1", port=port):
                pytest.fail("served on a port in use")


async def test_probes_answer_while_they_are_open(clock: ManualClock):
    """They are served on the address that was asked for, and gone afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        async with probes(Health(clock), Metrics("tuner"), host="127.0.0.1", port=port):
            assert (await client.get("/live")).status_code == 200
        with pytest.raises(httpx.ConnectError):
            await client.get("/live")


async def test_metrics_expose_counters_with_their_labels(clock: ManualClock):
    """What a service counted is what it exposes."""
    metrics = Metrics("worker", "a100-0")
    metrics.outcomes.add(kind="completed", reason="")
    metrics.outcomes.add(2, kind="failed", reason="generation_failed")
    _, text = await _status(Health(clock), metrics, "/metrics")
    assert 'kind="failed",reason="generation_failed",service="worker"} 2.0' in text
    assert metrics.totals()["hexflow_call_outcomes_total{kind=completed,reason=}"] == 1.0
