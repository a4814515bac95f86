"""`hexflow ask` and `hexflow eval` on the embedded mesh, with the scripted model."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from rich.console import Console

from services.cli.__main__ import main
from services.cli.text2sql.ask import AskPlan, ask
from services.cli.text2sql.mesh import AgentPlan
from services.text2sql.samples.writing import sample_file, sample_questions
from shared.contracts.messages import QueryRequest
from shared.simulation.trace_file import parse_trace


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """Undo what a command does to this process's logging: its stderr is closed by then."""
    level = logging.getLogger("aiokafka").level
    yield
    structlog.reset_defaults()
    logging.getLogger("aiokafka").setLevel(level)


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let samples be generated into a folder that goes away."""
    monkeypatch.setenv("HEXFLOW_CACHE_DIR", str(tmp_path / "cache"))


def hexflow(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Run the command line in this process; return exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


@pytest.mark.slow
def test_eval_reports_accuracy_latency_and_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """One JSON object; every question right, wrong candidates corrected; a trace to replay."""
    trace = tmp_path / "run.jsonl"
    words = ("eval", "--scripted", "--json", "--limit", "8", "--trace", str(trace))
    code, out, _ = hexflow(capsys, *words)
    assert code == 0
    found = json.loads(out)
    assert (found["questions"], found["execution_accuracy"], found["unanswered"]) == (16, 1.0, 0)
    assert found["corrected"] == found["first_candidates_wrong"] >= 4
    assert 0 < found["p50_s"] <= found["p95_s"] <= found["p99_s"]
    assert found["attainment"] == 1.0
    queries = parse_trace(trace.read_text())
    assert sum(query.num_calls for query in queries) == sum(found["stages"].values())
    assert found["calls_per_query"] == sum(found["stages"].values()) / 16
    assert {query.workflow for query in queries} == {"text2sql"}


@pytest.mark.slow
def test_a_wrong_answer_is_counted_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A schema cut too far costs answers, and the report says which; a person gets a table."""
    code, out, err = hexflow(
        capsys, "eval", "league", "--scripted", "--limit", "12", "--schema-tokens", "100"
    )
    assert code == 0
    assert "execution accuracy" in out
    assert "wrong: l" in err
    path = tmp_path / "mine.toml"
    path.write_text(
        'database = "league"\n[[questions]]\nid = "x"\nquestion = "How many teams are there?"\n'
        'sql = "SELECT 99 AS n"\n'
    )
    code, out, _ = hexflow(capsys, "eval", str(path), "--scripted", "--json")
    assert json.loads(out)["execution_accuracy"] == 1.0  # the script knows that file


async def test_ask_shows_stages_statements_and_where_the_time_went(tmp_path: Path):
    """As things happen, in their order; the result has the rows."""
    questions = sample_questions("league").questions
    (one,) = [one for one in questions if one.id == "l14"]
    plan = AskPlan(
        agent=AgentPlan(
            databases={"league": sample_file("league", tmp_path)},
            questions=(one,),
            time_scale=10.0,
        ),
        request=QueryRequest(
            query_id="asked", question=one.question, slo_s=300.0, events=True, database="league"
        ),
        is_quiet=False,
    )
    console = Console(record=True, width=200)
    result = await ask(plan, console)
    shown = console.export_text()
    assert result.kind == "completed"
    assert result.sql.split() == one.sql.split()
    assert shown.index("extract_keywords 0") < shown.index("generate_candidate 0 × 2")
    assert "empty" in shown
    assert "error" in shown
    assert one.sql in shown


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("ask", "?", "--db", "nonsense"), "sqlite:///FILE"),
        (("ask", "?", "--db", "mysql://u@h/d"), "not supported"),
        (("ask", " ", "--db", "league"), "no question"),
        (("ask", "?", "--db", "league", "--engine", "simulated"), "nothing to say"),
        (("ask", "?", "--db", "league", "--kafka", "127.0.0.1:9"), "go together"),
        (("eval", "none.toml", "--scripted"), "no such file"),
        (("eval", "league", "--scripted", "--trace", "/nope/x"), "no folder /nope"),
        (("eval", "league", "--scripted", "--model", "m"), "answers by itself"),
        (("eval", "--engine", "simulated"), "nothing to say"),
    ],
)
def test_wrong_words_are_one_clear_message(
    words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
):
    """Exit code 2 and no traceback."""
    if words[0] == "ask" and "league" not in words:
        words = (*words, "--openai", "http://127.0.0.1:9/v1")
    code, out, err = hexflow(capsys, *words)
    assert code == 2
    assert told in err
    assert "Traceback" not in err
    assert out == ""
