"""`hexflow chat` and `hexflow up` in front of engines that are not simulated."""

import asyncio
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import structlog
from rich.console import Console

from services.cli.__main__ import main
from services.cli.real_engines import PLACEHOLDER, EngineChoice, open_real
from shared.adapters.clock import SystemClock
from shared.adapters.engine_guard import descendants
from shared.contracts.messages import SimulatedLengths
from shared.domain.instance import InstanceSpec
from shared.errors import GenerationFailed
from shared.ports import Finished
from shared.simulation.fleets import dump_fleet
from tests.support.engines import small_model
from tests.support.openai_server import MODEL, VLLM_METRICS, FakeServer, answers_status, fake_server
from tests.support.processes import dies_within
from tests.support.worker_bench import bound_call

ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 100.0


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """Undo what a command does to this process's logging: its stderr is closed by then."""
    level = logging.getLogger("aiokafka").level
    yield
    structlog.reset_defaults()
    logging.getLogger("aiokafka").setLevel(level)


async def hexflow(*words: str) -> tuple[int, str, str]:
    """Run the command line as a process; return exit code, stdout and stderr."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        async with asyncio.timeout(WITHIN_S):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


async def test_chat_asks_a_server_that_runs_already():
    """The answer comes from the server, through the mesh, with the server's token counts."""
    async with fake_server() as server:
        code, out, err = await hexflow(
            "chat", "how many are there", "--openai", server.url, "--max-tokens", "4", "--json"
        )
        asked = [body for body in server.bodies if "messages" in body]
    assert code == 0, err
    answer = json.loads(out)
    assert answer["answer"] == "w0 w1 w2 w3"
    assert answer["instance"] == "openai-0"
    assert (answer["input_tokens"], answer["output_tokens"]) == (4, 4)
    (body,) = asked
    assert body["messages"] == [{"role": "user", "content": "how many are there"}]
    assert body["model"] == MODEL


async def test_a_server_that_only_chats_is_measured_and_gets_replays():
    """The prompts of measurings and of replays become what a user says there."""
    server = FakeServer(is_chat_only=True)
    choice = EngineChoice(engine="openai", urls=("",))
    async with fake_server(server), asyncio.timeout(WITHIN_S):
        choice = msgspec.structs.replace(choice, urls=(server.url,))
        async with open_real(choice, Console(quiet=True)) as fleet:
            (spec,) = fleet.specs
            num_measured = len(server.bodies)
            lengths = SimulatedLengths(input_tokens=7, output_tokens=3)
            async with fleet.open_engine(spec, SystemClock()) as engine:
                for name in ("a", "b"):
                    call = bound_call(name, simulated=lengths)
                    *_, last = [event async for event in engine.generate(call, name)]
                    assert isinstance(last, Finished)
                    assert (last.usage.input_tokens, last.usage.output_tokens) == (7, 3)
                given = bound_call("c", prompt="a plain prompt of a user", simulated=None)
                with pytest.raises(GenerationFailed, match="HTTP 404 at /v1/completions"):
                    await anext(engine.generate(given, "c"))
    assert num_measured > 8
    asked = [("messages" in body) for body in server.bodies[num_measured:]]
    assert asked == [False, True, True, False], "found out once, and only for made-up prompts"


async def test_chat_tells_what_the_server_said():
    """A server that refuses to work ends the command with its words, not with a traceback."""
    server = FakeServer(faults=[answers_status(500)] * 1_000)
    async with fake_server(server):
        code, out, err = await hexflow("chat", "hello", "--openai", server.url)
    assert code == 2
    assert out == ""
    assert "HTTP 500: not now" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("chat", "hello", "--engine", "gpt"), "no engine 'gpt'"),
        (("chat", "hello", "--engine", "simulated"), "nothing to say"),
        (
            (
                "chat",
                " ",
            ),
            "no question",
        ),
        (("up", "--openai", "http://127.0.0.1:9", "--engine", "llamacpp"), "use one of them"),
        (("up", "--openai", "nonsense"), "is no server's address"),
        (("up", "--openai", "http://127.0.0.1:9", "--time-scale", "2"), "real time"),
    ],
)
def test_contradicting_options_are_refused(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
):
    """What cannot be done is told at once, with exit code 2."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    captured = capsys.readouterr()
    assert (ended.value.code, captured.out) == (2, "")
    assert said in captured.err


async def test_up_drives_a_workload_through_two_servers():
    """`up --openai` twice is a fleet of two; generated queries run on both and end completed."""
    async with fake_server() as one, fake_server() as two:
        for server in (one, two):
            server.models = [{"id": "default", "max_model_len": 100_000}]
            server.metrics = VLLM_METRICS.replace('"500"', '"50000"')
            server.pace_s, server.context_tokens = 0.0, 100_000
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.cli", "up", "--rate", "5"),
            *("--openai", one.url, "--openai", two.url),
            stderr=asyncio.subprocess.PIPE,
            cwd=ROOT,
        )
        try:
            async with asyncio.timeout(WITHIN_S):
                while process.returncode is None and _fewest_calls(one, two) < 30:
                    await asyncio.sleep(0.05)
            assert process.returncode is None
            process.terminate()
            async with asyncio.timeout(WITHIN_S):
                _, err = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert process.returncode == 0, err.decode()
    assert "2 workers with real engines" in " ".join(err.decode().split())
    assert all(body["prompt"] and body["max_tokens"] for body in one.bodies)


@pytest.mark.parametrize(
    ("file_says", "said"),
    [
        ({"model": "another"}, f"serves 'another', but it serves '{MODEL}'"),
        ({"model": MODEL, "count": 2}, "has 2 instances for 1 engine"),
    ],
)
async def test_a_fleet_file_of_other_engines_is_refused(
    file_says: dict[str, object], said: str, tmp_path: Path
):
    """Speeds of another model, or of more engines than there are, would be wrong without a word."""
    count = file_says.pop("count", 1)
    specs = [
        InstanceSpec(instance_id=f"openai-{index}", gpu="G", latency=PLACEHOLDER, **file_says)
        for index in range(count)
    ]
    path = tmp_path / "fleet.toml"
    path.write_text(dump_fleet(specs))
    async with fake_server() as server:
        code, _, err = await hexflow("up", "--openai", server.url, "--fleet", str(path))
    assert code == 2, err
    assert said in " ".join(err.split())
    assert "Traceback" not in err


def _fewest_calls(*servers: FakeServer) -> int:
    return min(len(server.bodies) for server in servers)


@pytest.mark.engine
@pytest.mark.slow
async def test_a_real_model_answers_one_question():
    """One command starts llama.cpp on the small model and brings its answer."""
    small_model()
    code, out, err = await hexflow("chat", "What is 2+2?", "--json")
    assert code == 0, err
    answer = json.loads(out)
    assert "4" in answer["answer"]
    assert answer["finish_reason"] == "stop"
    assert answer["input_tokens"] > answer["cached_tokens"]


@pytest.mark.engine
@pytest.mark.slow
async def test_a_killed_mesh_leaves_no_engine_behind():
    """SIGKILL of `hexflow up` ends the llama.cpp that it started."""
    small_model()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli", "up", "--engine", "llamacpp"),
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        async with asyncio.timeout(WITHIN_S):
            while not (servers := _llamacpp_below(process.pid)):
                await asyncio.sleep(0.05)
    finally:
        process.kill()
        await process.communicate()
    assert all(dies_within(pid, WITHIN_S) for pid in servers)


def _llamacpp_below(pid: int) -> list[int]:
    found = []
    for one in descendants([pid]):
        try:
            command = Path(f"/proc/{one.pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"llamacpp_server" in command:
            found.append(one.pid)
    return found


async def test_admission_is_measured_against_none():
    """Both kinds of run are done, and what waits inside is read from the server's own metrics."""
    async with fake_server() as server:
        server.foreign_waiting = 7
        code, out, err = await hexflow(
            *("bench", "admission", "--openai", server.url),
            *("--queries", "5", "--repeats", "1", "--json"),
        )
    assert code == 0, err
    told = json.loads(out)
    assert told["throughput_ratio"] > 0
    for arm in (told["admitted"], told["unlimited"]):
        assert len(arm["tokens_per_s"]) == 1
        assert arm["waiting_inside_p99"] == 7
