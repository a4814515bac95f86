"""What the commands about tuning print for scripts."""

import json
from pathlib import Path

import pytest

from services.cli.__main__ import main


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    """Run a command and return the one JSON object on its stdout."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == 0
    return json.loads(capsys.readouterr().out)


def test_bench_tuner_reports_the_sweep(capsys: pytest.CaptureFixture[str]):
    """Seconds, how many α, how many calls of the window."""
    found = printed(capsys, "bench", "tuner", "--rate", "0.05", "--json")
    assert set(found) == {"sweep_s", "alphas", "calls"}
    assert found["alphas"] == 21
    assert found["calls"] > 100
    assert found["sweep_s"] > 0.0


@pytest.mark.slow
def test_bench_stationary_reports_every_workload(capsys: pytest.CaptureFixture[str]):
    """Two workloads in processes of their own: both P95, the interval, and α window by window."""
    options = ("--workloads", "2", "--queries", "400", "--window", "200", "--processes", "2")
    found = printed(capsys, "bench", "stationary", *options, "--json")
    assert len(found["workloads"]) == 2
    for one in found["workloads"]:
        assert one["num_queries"] == 400
        assert one["alphas"][0] == one["initial_alpha"]
        assert one["ratio_low"] <= one["ratio_high"]
        assert not one["is_worse"]
    assert found["num_worse"] == 0


@pytest.mark.slow
def test_adapt_tells_every_decision(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """A short run in virtual time: phases, decisions with reasons, a plot, the events."""
    found = printed(capsys, "adapt", "--length", "0.025", "--out", str(tmp_path), "--json")
    assert [phase["num_judged"] for phase in found["phases"]] == [30] * 6
    assert all(one["reason"] for one in found["decisions"])
    assert Path(found["plot"]).read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "adaptation-events.jsonl").stat().st_size > 1_000
