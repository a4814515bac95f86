"""The `hexflow` command as a user or a script meets it."""

import json
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog

from services.cli.__main__ import main
from services.cli.app import COMMANDS
from shared.adapters.local_process import free_port

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("completed", "failed", "rejected", "evicted", "cancelled")
FAST = ["--time-scale", "200", "--seed", "3"]


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """Undo what a command does to this process's logging: its stderr is closed by then."""
    level = logging.getLogger("aiokafka").level
    yield
    structlog.reset_defaults()
    logging.getLogger("aiokafka").setLevel(level)


def hexflow(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Run the command line in this process; return exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


@contextmanager
def started(*words: str) -> Iterator["subprocess.Popen[str]"]:
    """Run the command line as a process; it is killed when the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", "services.cli", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read_until(process: "subprocess.Popen[str]", text: str) -> str:
    """Read stderr up to a line that holds a text, then keep draining it; return what came."""
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if text in line:
            break
    else:
        pytest.fail(f"never said {text!r}:\n{''.join(seen)}")
    return "".join(seen)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_a_help_of_its_own(name: str, capsys: pytest.CaptureFixture[str]):
    """The table of commands names modules that exist and describe themselves."""
    code, out, _ = hexflow(capsys, name, "--help")
    assert code == 0
    assert f"Usage: hexflow {name}" in " ".join(out.split())


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]):
    """A newcomer sees all there is on one screen."""
    code, out, _ = hexflow(capsys, "--help")
    assert code == 0
    assert all(f" {name} " in out for name in COMMANDS)


def test_help_loads_nothing_heavy():
    """What makes a command slow to start is imported only by the command that needs it."""
    script = "import sys, services.cli.app; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True
    )
    heavy = {"numpy", "numba", "matplotlib", "aiokafka", "redis", "pydantic", "uvicorn"}
    assert not heavy & set(done.stdout.split())


def test_a_misspelt_command_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]):
    """`hexflow relpay` asks whether replay was meant."""
    code, _, err = hexflow(capsys, "relpay")
    assert code == 2
    assert "replay" in err


def test_replay_prints_one_json_object(capsys: pytest.CaptureFixture[str]):
    """Stdout is the contract's object and nothing else; every query and call is accounted for."""
    words = ["replay", "--generate", "natural", "--limit", "4", *FAST, "--embedded", "--json"]
    code, out, _ = hexflow(capsys, *words)
    report = json.loads(out)
    assert code == 0
    assert report["queries"]["submitted"] == report["queries"]["completed"] == 4
    calls = report["calls"]
    assert calls["submitted"] == sum(calls[kind] for kind in KINDS)
    assert sum(one["calls"] for one in report["per_instance"].values()) == calls["completed"]
    assert 0 < report["p50_s"] <= report["p95_s"] <= report["p99_s"]


def test_replay_of_a_trace_drives_every_call_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """What `generate` writes, `replay` runs: as many calls come back as the file holds."""
    path = tmp_path / "trace.json"
    assert hexflow(capsys, "generate", "--num", "3", "-o", str(path))[0] == 0
    num_calls = sum(len(query["Text2SQLRequest"]) for query in json.loads(path.read_text()))
    words = ["replay", str(path), "--fleet", "homogeneous", "--policy", "vllm", *FAST, "--json"]
    code, out, _ = hexflow(capsys, *words)
    assert code == 0
    assert json.loads(out)["calls"]["completed"] == num_calls


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["replay"], "--generate"),
        (["replay", "missing.json"], "missing.json"),
        (["replay", "--generate", "wild"], "natural"),
        (["replay", "--generate", "natural", "--policy", "best"], "hexgen-flow"),
        (["replay", "--generate", "natural", "--fleet", "hetero-9"], "hetero-1"),
        (["replay", "--generate", "natural", "--rate", "0"], "above 0"),
        (["replay", "--generate", "natural", "--slo-scales", "3,zero"], "3,zero"),
        (["replay", "--generate", "natural", "--kafka", "nowhere"], "host:port"),
        (["replay", "--generate", "natural", "--redis", "redis://x"], "--kafka"),
        (["replay", "--generate", "natural", "--kafka", "h:1", "--policy", "vllm"], "--policy"),
        (["replay", "--generate", "natural", "--kafka", "h:1", "--embedded"], "exclude"),
        (["up", "--kafka", "127.0.0.1:1"], "--redis"),
        (["up", "--policy", "best"], "hexgen-flow"),
        (["up", "--policy", "hexgenflow"], "did you mean hexgen-flow?"),
        (["up", "--fleet", "hetero1"], "did you mean 'hetero-1'?"),
        (["up", "--db", "leage"], "did you mean league?"),
        (["simulate", "--generate", "natural", "--policy", "vllmm"], "did you mean vllm?"),
        (["demo", "--policies", "edf,rr-pq"], "did you mean rr+pq?"),
        (["demo", "--policies", "hexgen-flow,best"], "best"),
        (["demo", "--load", "0"], "--load"),
        (["generate", "--num", "0"], "at least 1"),
        (["bench", "mesh", "--kafka", "127.0.0.1:1"], "--redis"),
    ],
)
def test_a_wrong_option_is_one_clear_message(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    """Exit code 2, the culprit named on stderr, nothing on stdout, no traceback."""
    code, out, err = hexflow(capsys, *words)
    assert code == 2
    assert said in err
    assert out == ""
    assert "Traceback" not in err


def test_a_misspelt_setting_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A variable that names no setting is told with the nearest valid name."""
    monkeypatch.setenv("HEXFLOW_KAFKA__BOOTSTRAP_SERVER", "127.0.0.1:1")
    code, _, err = hexflow(capsys, "topics")
    assert code == 2
    assert "did you mean HEXFLOW_KAFKA__BOOTSTRAP_SERVERS?" in err


@pytest.mark.parametrize("command", ["topics", "replay"])
def test_an_unreachable_broker_is_one_clear_message(
    command: str, capsys: pytest.CaptureFixture[str]
):
    """Exit code 1 and the address on stderr, no traceback."""
    address = f"127.0.0.1:{free_port()}"
    extra = ["--generate", "natural"] if command == "replay" else []
    code, out, err = hexflow(capsys, command, "--kafka", address, *extra)
    assert code == 1
    assert address in err
    assert "--kafka HOST:PORT" in err
    assert ("HEXFLOW_KAFKA__BOOTSTRAP_SERVERS" in err) == (command == "topics")
    assert out == ""
    assert "Traceback" not in err


def test_the_version_is_an_option_too(capsys: pytest.CaptureFixture[str]):
    """`--version` prints what `version` prints."""
    code, out, _ = hexflow(capsys, "--version")
    assert (code, hexflow(capsys, "version")[1]) == (0, out)
    assert out.strip()[0].isdigit()


def test_demo_compares_two_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Table, text chart, plot and what to do next."""
    words = ["demo", "--queries", "4", "--time-scale", "300", "--out", str(tmp_path)]
    code, out, _ = hexflow(capsys, *words)
    assert code == 0
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    for text in ("hexgen-flow", "vllm", "within SLO", "P95", "█", "What next", "workload seconds"):
        assert text in out


def test_demo_gives_each_policy_the_same_queries(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """With --json both policies report the same calls, and stdout is one object."""
    words = ["demo", "--queries", "3", "--time-scale", "300", "--out", str(tmp_path), "--json"]
    code, out, _ = hexflow(capsys, *words)
    policies = json.loads(out)["policies"]
    assert code == 0
    assert policies["hexgen-flow"]["calls"] == policies["vllm"]["calls"]


def test_bench_reports_what_the_mesh_adds(capsys: pytest.CaptureFixture[str]):
    """Calls per second, both latencies at three percentiles, and processor time per call."""
    words = ["bench", "mesh", "--embedded", "--rate", "100", "--seconds", "1", "--json"]
    code, out, _ = hexflow(capsys, *words)
    report = json.loads(out)
    assert code == 0
    assert report["calls"]["completed"] == report["calls"]["submitted"] == 100
    for key in ("request_to_engine_ms", "engine_to_result_ms"):
        assert 0 <= report[key]["p50"] <= report[key]["p95"] <= report[key]["p99"]
    assert report["calls_per_s"] > 0
    assert isinstance(report["cpu_ms_per_call"], dict)


def test_interrupted_replay_reports_what_there_is():
    """Ctrl-C cancels the open queries, prints the partial object, and exits with 130."""
    words = ["replay", "--generate", "natural", "--rate", "5", "--time-scale", "1", "--json", "-v"]
    with started(*words) as process:
        read_until(process, "dispatcher_serving")
        assert process.stderr is not None
        drained = threading.Thread(target=process.stderr.read, daemon=True)
        threading.Timer(2.0, process.send_signal, [signal.SIGINT]).start()
        drained.start()
        assert process.stdout is not None
        report = json.loads(process.stdout.read())
        assert process.wait(30) == 130
        drained.join()
    queries = report["queries"]
    assert report["run"]["interrupted"] is True
    assert 0 < queries["submitted"] < 100
    assert queries["submitted"] == sum(queries[kind] for kind in KINDS)
    assert queries["cancelled"] > 0


@pytest.mark.parametrize(
    "words",
    [
        ("bench", "mesh", "--seconds", "60", "--json", "-v"),
        ("demo", "--json", "-v", "--time-scale", "1"),
    ],
    ids=["bench", "demo"],
)
def test_interrupted_measurements_say_so_by_their_exit_code(words: tuple[str, ...]):
    """A script must not take half of a measurement for the whole."""
    with started(*words) as process:
        read_until(process, "dispatcher_serving")
        threading.Timer(1.0, process.send_signal, [signal.SIGINT]).start()
        assert "Traceback" not in process.communicate(timeout=60)[1]
        assert process.returncode == 130


def test_up_says_who_can_reach_it_and_ends_in_order():
    """The embedded mesh tells that Kafka clients cannot reach it; Ctrl-C drains it, exit 0."""
    with started("up", "--fleet", "homogeneous", "--rate", "1", "--time-scale", "50") as process:
        said = read_until(process, "--redis URL")
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        rest = process.stderr.read()
        assert process.wait(30) == 0
    assert "cannot reach" in said
    assert "--with-kafka" in said
    assert "draining" in rest
    assert "Traceback" not in rest


def test_output_that_cannot_be_written_is_one_clear_message():
    """A full disk is no traceback."""
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "services.cli", "generate", "-n", "2"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            check=False,
        )
    assert ended.returncode == 1
    assert ended.stderr == "hexflow: the output cannot be written: No space left on device\n"
