"""`hexflow bench gateway`: what the gateway and the mesh behind it add to a call over HTTP.

The same request goes to the gateway and, in the same run and at the same rate, to a bare HTTP
server that hands it to an equal engine directly. The engines take next to no time, so the
difference is the way through gateway, broker, dispatcher, queue and results, and back.
"""

import asyncio
import secrets
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
import uvicorn
from rich.table import Table
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.cli.bench_mesh import delete_topics, fast_fleet
from services.cli.console import EXIT_INTERRUPTED, print_json, stderr_console, stdout_console
from services.cli.embedded import EmbeddedParams, gateway_params, open_embedded
from services.cli.http_load import HttpLoad, HttpTimes, send_http_load
from services.cli.interrupts import run_until_stopped, with_end
from services.cli.load import milliseconds
from services.cli.options import JsonOption, VerboseOption, configure_logs, mesh_settings
from services.cli.processes import ProcessesParams, open_processes
from shared.adapters.clock import SystemClock
from shared.adapters.local_process import LOOPBACK, free_port
from shared.adapters.simulated_engine import SimulatedEngine
from shared.contracts.messages import BoundCall, ScoreTerms, StageRequest
from shared.errors import ConfigError
from shared.ports import Finished
from shared.runtime.settings import MeshSettings

DEFAULT_RATES = "50,200,500"
PROMPT_WORDS = 300
READY_WITHIN_S = 10.0


class GatewayBenchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure.

    Attributes:
        settings: Kafka and Redis to start service processes on; None: the embedded mesh.
        rates: Calls per second, one after the other.
        seconds: How long at each rate, wall seconds.
    """

    settings: MeshSettings | None
    rates: tuple[float, ...]
    seconds: float


async def bench_gateway(plan: GatewayBenchPlan, stop: asyncio.Event) -> dict[str, Any]:
    """Measure at each rate, directly and through the gateway.

    Raises:
        MeshError: The servers cannot be reached, or a service did not start.
    """
    rates: dict[str, Any] = {}
    opened = _on_embedded() if plan.settings is None else _on_processes(plan.settings)
    async with opened as gateway_port, _direct_server() as direct_port:
        for rate in plan.rates:
            if stop.is_set():
                break
            direct = await send_http_load(_load(direct_port, "/direct", rate, plan.seconds))
            path = "/v1/chat/completions"
            through = await send_http_load(_load(gateway_port, path, rate, plan.seconds))
            rates[f"{rate:g}"] = comparison(direct, through)
    return {
        "broker": "embedded" if plan.settings is None else "kafka",
        "seconds": plan.seconds,
        "rates": rates,
    }


def comparison(direct: HttpTimes, through: HttpTimes) -> dict[str, Any]:
    """Return what the report says of one rate; times in milliseconds."""
    direct_ms, gateway_ms = milliseconds(direct.took_s), milliseconds(through.took_s)
    added: dict[str, float | None] = {}
    for name, value in gateway_ms.items():
        base = direct_ms[name]
        added[name] = None if value is None or base is None else round(value - base, 3)
    return {
        "direct_ms": direct_ms,
        "gateway_ms": gateway_ms,
        "added_ms": added,
        "http_to_engine_ms": milliseconds(through.to_engine_s),
        "engine_to_http_ms": milliseconds(through.from_engine_s),
        "calls_per_s": round(through.sent / through.elapsed_s, 2) if through.elapsed_s else 0.0,
        "calls": {
            "sent": through.sent,
            "failed": through.failed,
            "direct_sent": direct.sent,
            "direct_failed": direct.failed,
        },
    }


def _load(port: int, path: str, rate: float, seconds: float) -> HttpLoad:
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": "word " * PROMPT_WORDS}],
        "max_tokens": 1,
        "hexflow": {"workflow": "bench", "stage": "bench", "slo_s": 60.0},
    }
    return HttpLoad(
        host=LOOPBACK,
        port=port,
        path=path,
        body=msgspec.json.encode(body),
        rate=rate,
        duration_s=seconds,
        warmup_s=min(1.0, seconds / 4),
    )


@asynccontextmanager
async def _on_embedded() -> AsyncIterator[int]:
    port = free_port()
    params = EmbeddedParams(
        fleet=fast_fleet(),
        tunes=False,
        gateway=gateway_params(),
        gateway_address=(LOOPBACK, port),
    )
    async with open_embedded(params):
        yield port


@asynccontextmanager
async def _on_processes(settings: MeshSettings) -> AsyncIterator[int]:
    # A prefix of its own keeps the benchmark apart from a mesh that runs on the same servers.
    prefix = f"hexflow-bench-{secrets.token_hex(4)}."
    topics = settings.topics.model_copy(update={"prefix": prefix})
    own = settings.model_copy(update={"topics": topics})
    port = free_port()
    params = ProcessesParams(
        fleet=fast_fleet(), dispatchers=1, tunes=False, log_level="WARNING", gateway_ports=(port,)
    )
    with tempfile.TemporaryDirectory(prefix="hexflow-bench-") as folder:
        async with open_processes(own, params, Path(folder)) as mesh:
            try:
                yield port
            finally:
                await delete_topics(mesh, prefix)


@asynccontextmanager
async def _direct_server() -> AsyncIterator[int]:
    """Serve an engine over HTTP with nothing in between."""
    port = free_port()
    async with SimulatedEngine.open(fast_fleet()[0], SystemClock()) as engine:
        app = Starlette(routes=[Route("/direct", _Direct(engine).answer, methods=["POST"])])
        config = uvicorn.Config(
            app, host=LOOPBACK, port=port, log_config=None, access_log=False, lifespan="off"
        )
        server = uvicorn.Server(config)
        server.capture_signals = nullcontext  # type: ignore[method-assign,assignment]  # ours
        async with asyncio.TaskGroup() as group:
            group.create_task(server.serve(), name="direct")
            try:
                async with asyncio.timeout(READY_WITHIN_S):
                    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
                        await asyncio.sleep(0.01)
                yield port
            finally:
                server.should_exit = True


class _Direct:
    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine = engine

    async def answer(self, request: Request) -> Response:
        """Run the engine on a request and answer with its text."""
        body = msgspec.json.decode(await request.body())
        call_id = secrets.token_hex(16)
        call = BoundCall(
            request=StageRequest(
                request_id=call_id,
                model=body["model"],
                messages=tuple(body["messages"]),
                max_tokens=body["max_tokens"],
            ),
            queue_score=0.0,
            t_comp_s=0.001,
            deadline_s=0.0,
            predicted_input_tokens=500,
            predicted_output_tokens=1.0,
            terms=ScoreTerms(policy="none", score=0.0, t_queue_s=0.0, t_comp_s=0.0),
            dispatched_at_s=0.0,
            dispatcher_id="none",
        )
        text = ""
        async for event in self._engine.generate(call, f"{call_id}:0"):
            if isinstance(event, Finished):
                text = event.text
        message = {"role": "assistant", "content": text}
        return Response(
            msgspec.json.encode({"choices": [{"index": 0, "message": message}]}),
            media_type="application/json",
        )


def as_table(report: dict[str, Any]) -> Table:
    """Return the report for people."""
    table = Table(title=f"the gateway on {report['broker']}, ms", title_justify="left")
    for name in ("calls/s", "", "p50", "p95", "p99"):
        table.add_column(name, justify="left" if not name else "right")
    for rate, found in report["rates"].items():
        for label, key in (
            ("directly", "direct_ms"),
            ("through the gateway", "gateway_ms"),
            ("added", "added_ms"),
            ("HTTP → engine", "http_to_engine_ms"),
            ("engine → HTTP", "engine_to_http_ms"),
        ):
            numbers = [found[key][name] for name in ("p50", "p95", "p99")]
            shown = ["–" if number is None else f"{number:.2f}" for number in numbers]
            table.add_row(rate if key == "direct_ms" else "", label, *shown)
        table.add_section()
    return table


def command(
    kafka: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Measure services that run as processes on this Kafka; goes with --redis.",
        ),
    ] = None,
    redis: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Their Redis, redis://HOST:PORT/DB; goes with --kafka."),
    ] = None,
    rates: Annotated[
        str, typer.Option(metavar="R,R,...", help="Calls per second, one after the other.")
    ] = DEFAULT_RATES,
    seconds: Annotated[float, typer.Option(min=1.0, help="How long at each rate.")] = 10.0,
    json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Measure what gateway and mesh add to a call, against the same engine called directly.

    Engines take next to no time here. With --kafka and --redis the services run as processes on
    those servers, under a topic prefix of their own that is removed afterwards.
    """
    if (kafka is None) != (redis is None):
        raise ConfigError("--kafka and --redis go together: the services need both")
    configure_logs(verbose=verbose)
    plan = GatewayBenchPlan(
        settings=mesh_settings(kafka=kafka, redis=redis, time_scale=1.0) if kafka else None,
        rates=parse_rates(rates),
        seconds=seconds,
    )
    if not json:
        total_s = 2 * seconds * len(plan.rates)
        stderr_console().print(f"sending for {total_s:g} s ...", style="dim")
    report, was_stopped = run_until_stopped(lambda stop: with_end(bench_gateway(plan, stop), stop))
    if json:
        print_json(report)
    else:
        stdout_console().print(as_table(report))
    if was_stopped:
        raise typer.Exit(EXIT_INTERRUPTED)


def parse_rates(text: str) -> tuple[float, ...]:
    """Return the rates of `50,200`.

    Raises:
        ConfigError: One is no positive number.
    """
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError as exc:
        raise ConfigError(f"--rates {text!r}: numbers separated by commas are needed") from exc
    if not all(0 < rate <= 100_000 for rate in rates):
        raise ConfigError(f"--rates {text!r}: every rate must be above 0")
    return rates
