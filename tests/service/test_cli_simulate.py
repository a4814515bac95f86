"""`hexflow simulate` and `hexflow compare` as a user or a script meets them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.__main__ import main
from shared.simulation.trace_file import dump_trace
from shared.simulation.traces import dump_authors_trace
from tests.support.lab import TRACE

ROOT = Path(__file__).resolve().parents[2]
KEYS = {"policy", "fleet", "rate_qps", "seed", "p50_s", "p95_s", "p99_s", "attainment"}
SMALL = ["--queries", "20", "--rates", "0.1,0.3", "--seeds", "2", "--jobs", "1"]


def hexflow(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Run the command line in this process; return exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """A trace file in the authors' form."""
    path = tmp_path / "queries.json"
    path.write_text(dump_authors_trace(TRACE))
    return str(path)


def authors_trace(tmp_path: Path, **changes: object) -> str:
    """A trace of one call with something wrong."""
    call = {"step": "revise", "input_length": 100, "output_length": 10, **changes}
    path = tmp_path / "bad.json"
    path.write_text(json.dumps([{"Text2SQLRequest": [call]}]))
    return str(path)


def test_simulate_prints_one_json_object(trace: str, capsys: pytest.CaptureFixture[str]):
    """Every query of the trace once; per-instance calls add up."""
    code, out, _ = hexflow(capsys, "simulate", trace, "--rate", "0.1", "--json")
    report = json.loads(out)
    assert code == 0
    assert set(report) >= KEYS
    assert report["run"]["queries"] == report["queries"] == len(TRACE)
    calls = sum(one["calls"] for one in report["per_instance"].values())
    assert calls == report["run"]["calls"] == sum(query.num_calls for query in TRACE)


def test_the_same_seed_prints_the_same_bytes(trace: str, capsys: pytest.CaptureFixture[str]):
    """Another seed does not."""
    words = ["simulate", trace, "--queries", "15", "--json", "--calls"]
    first = hexflow(capsys, *words, "--seed", "1")[1]
    assert hexflow(capsys, *words, "--seed", "1")[1] == first
    assert hexflow(capsys, *words, "--seed", "2")[1] != first


def test_calls_can_be_had_with_their_times(trace: str, capsys: pytest.CaptureFixture[str]):
    """No effect comes before its cause."""
    _, out, _ = hexflow(capsys, "simulate", trace, "--json", "--calls")
    calls = json.loads(out)["calls"]
    assert len(calls) == sum(query.num_calls for query in TRACE)
    for call in calls:
        assert call["ready_s"] <= call["dispatched_s"] <= call["started_s"]
        assert call["started_s"] < call["first_token_s"] <= call["end_s"]


def test_simulate_shows_tables_and_draws_a_gantt(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """For people: what was run, what came of it, how the instances were used."""
    picture = tmp_path / "new" / "gantt.png"
    code, out, _ = hexflow(capsys, "simulate", trace, "--gantt", str(picture))
    assert code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    for text in ("hexgen-flow", "within SLO", "upper bound", "a6000-0", str(picture.name)):
        assert text in out


@pytest.mark.parametrize(
    "words",
    [
        ["--oracle"],
        ["--dispatchers", "2", "--state-delay", "1", "--hop", "0.01"],
        ["--admission", "4"],
        ["--no-prefix-caching"],
        ["--slo-scales", "1.5"],
        ["--arrivals", "bursty"],
        ["--alpha", "0.9"],
        ["--fleet", "homogeneous"],
        ["--policy", "least-outstanding"],
    ],
)
def test_every_option_changes_the_run(
    words: list[str], trace: str, capsys: pytest.CaptureFixture[str]
):
    """None of them is read and forgotten."""
    base = ["simulate", trace, "--queries", "60", "--rate", "0.3", "--json", "--calls"]
    plain = json.loads(hexflow(capsys, *base)[1])
    code, out, _ = hexflow(capsys, *base, *words)
    changed = json.loads(out)
    assert code == 0
    assert (changed["calls"], changed["attainment"]) != (plain["calls"], plain["attainment"])


def test_recorded_arrivals_need_no_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A trace in hexflow's form is replayed at the rate it was recorded at."""
    recorded = [
        query.__class__(
            query_id=query.query_id, stages=query.stages, arrival_s=4.0 * number, slo_s=300.0
        )
        for number, query in enumerate(TRACE)
    ]
    path = tmp_path / "recorded.jsonl"
    path.write_text(dump_trace(recorded))
    words = ["simulate", str(path), "--arrivals", "recorded", "--json"]
    code, out, _ = hexflow(capsys, *words)
    assert code == 0
    assert json.loads(out)["rate_qps"] == pytest.approx(0.25)


def test_compare_prints_one_json_object_and_nothing_else(
    trace: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One run per policy, rate and seed, with the keys scripts rely on; no files unasked."""
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())
    words = ["compare", "--trace", trace, "--policies", "hexgen-flow,vllm", *SMALL, "--json"]
    code, out, _ = hexflow(capsys, *words)
    runs = json.loads(out)["runs"]
    assert code == 0
    assert set(tmp_path.iterdir()) == before
    places = {(run["policy"], run["rate_qps"], run["seed"]) for run in runs}
    assert places == {
        (policy, rate, seed)
        for policy in ("hexgen-flow", "vllm")
        for rate in (0.1, 0.3)
        for seed in (0, 1)
    }
    for run in runs:
        assert KEYS | {"goodput_qps", "utilisation"} <= set(run)
        assert 0.0 <= run["attainment"] <= 1.0
        assert 0.0 <= run["utilisation"] <= 1.0
        assert run["p50_s"] <= run["p95_s"] <= run["p99_s"]


def test_simulate_repeats_a_run_of_compare(trace: str, capsys: pytest.CaptureFixture[str]):
    """With its queries, window, seed and α it is the same run; without them it is another."""
    same = ["--rate", "0.3", "--seed", "1", "--alpha", "0.05", "--json"]
    words = ["compare", "--trace", trace, "--policies", "hexgen-flow,vllm", "--queries", "30"]
    words += ["--rates", "0.3", "--seeds", "1", "--seed", "1", "--alpha", "0.05", "--json"]
    compared = json.loads(hexflow(capsys, *words, "--jobs", "1")[1])["runs"][0]
    words = ["simulate", trace, *same]
    alone = json.loads(hexflow(capsys, *words)[1])
    words += ["--queries", "30", "--warm-up", "0.2", "--cool-down", "0.1"]
    repeated = json.loads(hexflow(capsys, *words)[1])
    measured = ("policy", "p50_s", "p95_s", "p99_s", "attainment")
    assert [repeated[name] for name in measured] == [compared[name] for name in measured]
    assert alone["p50_s"] != compared["p50_s"]


def test_compare_writes_a_report(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Every fleet is a section of one page with plots of its own."""
    out = tmp_path / "report"
    words = ["compare", "--trace", trace, "--fleet", "hetero-1,homogeneous", *SMALL]
    words += ["--policies", "vllm,least-outstanding", "--arrivals", "step"]
    code, said, _ = hexflow(capsys, *words, "--out", str(out))
    assert code == 0
    assert (out / "report.html").read_text().count("<h2 ") == 2
    assert len(list(out.glob("queries-*-step-load.png"))) == 2
    assert "least-outstanding" in said
    assert "report.html" in said


@pytest.mark.slow
def test_processes_give_what_one_process_gives(trace: str):
    """Compiled in two processes or interpreted in one: the same numbers."""
    words = ["compare", "--trace", trace, "--policies", "hexgen-flow,qlm", "--queries", "20"]
    words += ["--rates", "0.2", "--seeds", "2", "--alpha", "0.02", "--json"]
    outputs = [
        subprocess.run(
            [sys.executable, "-m", "services.cli", *words, "--jobs", jobs],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
        ).stdout
        for jobs in ("1", "2")
    ]
    one, two = (json.loads(output)["runs"] for output in outputs)
    assert len(one) == 4
    for mine, theirs in zip(one, two, strict=True):
        assert mine["p95_s"] == pytest.approx(theirs["p95_s"], rel=1e-9)
        assert mine["attainment"] == theirs["attainment"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["simulate"], "--generate"),
        (["simulate", "missing.json"], "missing.json"),
        (["simulate", "--generate", "wild"], "natural"),
        (["simulate", "--generate", "natural", "--policy", "best"], "hexgen-flow"),
        (["simulate", "--generate", "natural", "--fleet", "hetero-9"], "hetero-1"),
        (
            ["simulate", "--generate", "natural", "--rate", "0"],
            "--rate '0': a rate must be above 0",
        ),
        (["simulate", "--generate", "natural", "--rate", "1,2"], "one rate"),
        (["simulate", "--generate", "natural", "--slo-scales", "3,0"], "above 0"),
        (["simulate", "--generate", "natural", "--slo-base", "median"], "own or mean"),
        (["simulate", "--generate", "natural", "--arrivals", "tides"], "tides"),
        (["simulate", "--generate", "natural", "--arrivals", "recorded"], "no arrivals"),
        (["simulate", "--generate", "natural", "--calls"], "--json"),
        (["simulate", "--generate", "natural", "--alpha", "2"], "alpha"),
        (["compare"], "--generate"),
        (["compare", "--generate", "natural", "--policies", "vllm,best"], "'best'"),
        (["compare", "--generate", "natural", "--policies", "vllm,vllm"], "twice"),
        (["compare", "--generate", "natural", "--policies", ","], "--policies"),
        (["compare", "--generate", "natural", "--rates", "0"], "above 0"),
        (["compare", "--generate", "natural", "--rates", "half"], "'half'"),
        (["compare", "--generate", "natural", "--fleet", "hetero-1,hetero-1"], "twice"),
        (["compare", "--generate", "natural", "--alpha", "1.5"], "--alpha"),
        (["compare", "--generate", "natural", "--alpha", "best"], "auto"),
        (["compare", "--generate", "natural", "--token-budgets", "32"], "32"),
        (["compare", "--generate", "natural", "--token-budgets", "many"], "whole numbers"),
        (["compare", "--generate", "natural", "--arrivals", "step:1x2"], "step:1x2"),
        (["compare", "--generate", "natural", "--warm-up", "0.8", "--cool-down", "0.2"], "tenth"),
        (["compare", "--generate", "natural", "--out", "/dev/null/x"], "/dev/null/x"),
    ],
)
def test_a_wrong_option_is_one_clear_message(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    """Exit code 2, the culprit named on stderr, nothing on stdout, no traceback."""
    code, out, err = hexflow(capsys, *words)
    assert code == 2
    assert said in " ".join(err.split())
    assert out == ""
    assert "Traceback" not in err


@pytest.mark.parametrize("command", ["simulate", "compare"])
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"step": "dance"}, "query 0, call 0: unknown step 'dance'"),
        ({"input_length": -5}, "query 0, call 0: 'input_length'"),
        ({"output_length": 10**12}, "query 0, call 0: 'output_length'"),
        ({"input_length": 500_000}, "q00000"),
    ],
)
def test_a_bad_trace_is_refused_with_the_place_named(
    command: str,
    changes: dict[str, object],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    """Unknown step, negative or absurd tokens, a prompt that fits no instance's memory."""
    path = authors_trace(tmp_path, **changes)
    words = ["simulate", path] if command == "simulate" else ["compare", "--trace", path]
    code, out, err = hexflow(capsys, *words)
    assert code == 2
    assert said in " ".join(err.split())
    assert out == ""


def test_an_empty_query_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The message says which one."""
    path = tmp_path / "empty.json"
    path.write_text('[{"Text2SQLRequest": []}]')
    code, _, err = hexflow(capsys, "simulate", str(path))
    assert code == 2
    assert "query 0" in err


def test_a_fleet_that_cannot_hold_the_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """No memory for the prompt, or another model altogether: which query, and what there is."""
    small = tmp_path / "small.toml"
    small.write_text('[[instance]]\ngpu = "A6000"\nkv_tokens = 64\n')
    code, _, err = hexflow(capsys, "simulate", "--generate", "natural", "--fleet", str(small))
    assert code == 2
    assert "q0" in err
    assert "64" in err
    two = tmp_path / "two.toml"
    two.write_text(
        '[[instance]]\ngpu = "A100"\nmodel = "a"\n\n[[instance]]\ngpu = "A100"\nmodel = "b"\n'
    )
    code, _, err = hexflow(
        capsys, "compare", "--generate", "natural", "--fleet", str(two), "--rates", "0.1"
    )
    assert code == 2
    assert "a, b" in err


def test_unknown_steps_can_be_allowed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """They become serial stages of their own."""
    path = authors_trace(tmp_path, step="dance")
    code, out, _ = hexflow(capsys, "simulate", path, "--allow-unknown-steps", "--json")
    assert code == 0
    assert json.loads(out)["run"]["calls"] == 1


@pytest.mark.slow
def test_bench_simulator_prints_its_figures(capsys: pytest.CaptureFixture[str]):
    """One object: speed of a run, of its event loop and of a replay over α, and time to start."""
    code, out, _ = hexflow(capsys, "bench", "simulator", "--queries", "100", "--json")
    report = json.loads(out)
    assert code == 0
    assert report["event_loop_calls_per_s"] > report["calls_per_s"] > 0
    assert report["sweep_alphas"] == 12
    assert report["sweep_queries"] == 600
    assert report["sweep_s"] > 0
    assert report["cpu_calls_per_s"] > 0
    assert report["cpu_sweep_s"] > 0
    assert report["fresh_process_s"] > 0
