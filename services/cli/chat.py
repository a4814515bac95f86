"""`hexflow chat`: one question to a real model through the whole mesh."""

import sys
import time
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from services.cli.console import print_json, stderr_console
from services.cli.embedded import EmbeddedMesh, EmbeddedParams, open_embedded
from services.cli.engine_options import (
    NOTHING_TO_SAY,
    ModelOption,
    OpenAIOption,
    RealEngineOption,
    real_choice_of,
)
from services.cli.interrupts import run_until_stopped
from services.cli.options import JsonOption, VerboseOption, configure_logs
from services.cli.real_engines import EngineChoice, open_real
from shared.adapters.redis_store import RedisParams, RedisStore
from shared.contracts.messages import CallOutcome
from shared.errors import ConfigError, GenerationFailed
from shared.sdk import Call, Workflow, open_producer

SLO_S = 120.0

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class ChatPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to ask, and whom.

    Attributes:
        question: In plain words.
        engines: Real engines.
        max_tokens: Longest answer, tokens.
        is_quiet: Whether the answer is not written as it comes.
    """

    question: str
    engines: EngineChoice
    max_tokens: int
    is_quiet: bool


async def chat(plan: ChatPlan, console: Console) -> CallOutcome:
    """Ask a question on a mesh of its own; the answer is written to stdout as it comes.

    Raises:
        ConfigError: A model, package or server is missing.
        GenerationFailed: The call did not complete.
    """
    async with open_real(plan.engines, console) as engines:
        params = EmbeddedParams(
            fleet=engines.specs, tunes=False, drain_s=1.0, open_engine=engines.open_engine
        )
        async with open_embedded(params) as mesh:
            return await _ask(mesh, plan, engines.specs[0].model)


async def _ask(mesh: EmbeddedMesh, plan: ChatPlan, model: str) -> CallOutcome:
    call = Call(
        messages=({"role": "user", "content": plan.question},),
        max_tokens=plan.max_tokens,
        sampling={"temperature": 0.0},
        stream=True,
    )
    async with (
        RedisStore.open(RedisParams(url=mesh.state_url)) as store,
        open_producer(mesh.broker, mesh.topics, mesh.clock, partition=0, store=store) as producer,
        Workflow(producer, "chat", query_id="chat", slo_s=SLO_S, model=model) as flow,
    ):
        emitted = await flow.emit("answer", call)
        async for piece in emitted.text():
            if not plan.is_quiet:
                sys.stdout.write(piece)
                sys.stdout.flush()
        outcome = await emitted.outcome()
    if outcome.kind != "completed":
        raise GenerationFailed(f"{outcome.kind}: {outcome.reason}: {outcome.detail}")
    return outcome


def facts(outcome: CallOutcome) -> dict[str, Any]:
    """Return what is worth knowing of an answer: where it ran, how long it took, tokens."""
    times = outcome.times
    ready_s, started_s = times.ready_at_s or 0.0, times.started_at_s or 0.0
    first_s, last_s = times.first_token_at_s or started_s, times.finished_at_s or started_s
    return {
        "instance": outcome.instance_id,
        "to_engine_s": round(started_s - ready_s, 4),
        "ttft_s": round(first_s - started_s, 4),
        "decode_s": round(last_s - first_s, 4),
        "input_tokens": outcome.usage.input_tokens,
        "cached_tokens": outcome.usage.cached_tokens,
        "output_tokens": outcome.usage.output_tokens,
        "finish_reason": outcome.finish_reason,
    }


@app.command()
def command(
    question: Annotated[str, typer.Argument(help="What to ask, in quotes.")],
    engine: RealEngineOption = None,
    openai: OpenAIOption = None,
    model: ModelOption = "",
    max_tokens: Annotated[
        int, typer.Option(min=1, max=100_000, help="Longest answer, tokens.")
    ] = 128,
    json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Ask a real model one question, through dispatcher, queue and worker.

    By default llama.cpp runs SmolLM2-135M-Instruct on this machine's CPU; both are fetched when
    they are missing. It is a very small model: it proves the path, not the answers. With --openai
    URL a server that runs already answers.
    """
    configure_logs(verbose=verbose)
    engines = real_choice_of(engine, openai, NOTHING_TO_SAY, model=model)
    if not question.strip():
        raise ConfigError("there is no question")
    plan = ChatPlan(question=question, engines=engines, max_tokens=max_tokens, is_quiet=json)
    began_s = time.monotonic()
    outcome = run_until_stopped(lambda _: chat(plan, stderr_console()), is_graceful=False)
    if json:
        wall_s = round(time.monotonic() - began_s, 3)
        print_json({"answer": outcome.text, **facts(outcome), "wall_s": wall_s})
        return
    print()
    stderr_console().print(_summary(outcome), style="dim")


def _summary(outcome: CallOutcome) -> str:
    found = facts(outcome)
    return (
        f"{outcome.instance_id}: {1e3 * found['to_engine_s']:.0f} ms through the mesh to the "
        f"engine, first token {1e3 * found['ttft_s']:.0f} ms later, then {found['output_tokens']} "
        f"tokens in {found['decode_s']:.1f} s"
    )
