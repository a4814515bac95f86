"""`hexflow bench gateway` measures both ways and says so in one JSON object."""

import asyncio
import json

from typer.testing import CliRunner

from services.cli.bench import app
from services.cli.bench_gateway import GatewayBenchPlan, bench_gateway, comparison, parse_rates
from services.cli.http_load import HttpTimes


async def test_both_ways_are_measured_in_one_run():
    """Each rate has the direct call, the gateway's, what is added, and no call is lost."""
    plan = GatewayBenchPlan(settings=None, rates=(20.0,), seconds=1.5)
    report = await bench_gateway(plan, asyncio.Event())
    assert json.loads(json.dumps(report)) == report
    found = report["rates"]["20"]
    assert found["calls"] == {"sent": 30, "failed": 0, "direct_sent": 30, "direct_failed": 0}
    for name in ("direct_ms", "gateway_ms", "http_to_engine_ms", "engine_to_http_ms"):
        assert set(found[name]) == {"p50", "p95", "p99"}
        assert found[name]["p50"] is not None
    assert found["gateway_ms"]["p50"] > found["http_to_engine_ms"]["p50"] * 0.5


def test_the_difference_is_of_like_with_like():
    """What is added is the difference of the same percentiles; nothing measured is no number."""
    report = comparison(
        HttpTimes(took_s=[0.001] * 10, sent=10, elapsed_s=1.0),
        HttpTimes(took_s=[0.004] * 10, sent=10, elapsed_s=2.0),
    )
    assert report["added_ms"] == {"p50": 3.0, "p95": 3.0, "p99": 3.0}
    assert report["calls_per_s"] == 5.0
    assert comparison(HttpTimes(), HttpTimes())["added_ms"]["p50"] is None


def test_wrong_rates_are_refused():
    """A rate that is no positive number is told before anything is started."""
    assert parse_rates("50,200") == (50.0, 200.0)
    for text in ("", "0", "a", "-1,3"):
        result = CliRunner().invoke(app, ["gateway", "--rates", text])
        assert result.exit_code != 0
