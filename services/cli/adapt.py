"""`hexflow adapt`: watch the tuner adapt, live, and compare with the best constant α.

An embedded mesh with simulated engines goes through phases. The tuner sees only `latency-events`;
it starts at α = 0.7 with priors that are wrong by a factor of two. After the run every phase is
simulated under all α with everything known; the best of them is the mark to reach.
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from services.cli import adaptation
from services.cli.adapt_results import (
    START_ALPHA,
    Adapted,
    Moment,
    adapted_json,
    best_constant,
    decisions_table,
    judged_against_best,
    results_table,
)
from services.cli.adaptation import Phase, queries_of, wrong_priors
from services.cli.console import print_json, stderr_console, stdout_console
from services.cli.embedded import (
    EmbeddedMesh,
    EmbeddedParams,
    open_embedded,
    open_in_virtual_time,
    tuner_params,
)
from services.cli.interrupts import run_until_stopped
from services.cli.options import JsonOption, OutOption, VerboseOption, configure_logs
from services.cli.progress import live_progress
from services.cli.session import MeshAccess, drive
from services.cli.tally import Tally
from services.cli.tuning_window import events_text, read_mesh
from services.cli.virtual_time import VirtualTimeLoop
from services.cli.workload import load_fleet
from shared.contracts.codec import decode_any
from shared.contracts.messages import AlphaUpdate, LatencyEvent, SpeedUpdate, WorkflowProfile
from shared.contracts.topics import CONTROL
from shared.domain.instance import InstanceSpec
from shared.domain.trace import TraceQuery
from shared.errors import ContractError
from shared.ports import TopicPartition
from shared.runtime.publishing import Publisher
from shared.runtime.tuning_journal import Decided
from shared.scheduling.attainment import percentile

FLEET = "hetero-1"
Ran = tuple[Phase, tuple[TraceQuery, ...], float, Tally]
WRONG_BY = 2.0
WINDOW_QUERIES, MIN_QUERIES = 600, 150
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


async def run_phases(
    plan: Sequence[Phase],
    fleet: tuple[InstanceSpec, ...],
    time_scale: float,
    seed: int,
    stop: asyncio.Event,
) -> tuple[list[Ran], list[LatencyEvent], list[Moment], list[Decided]]:
    """Run the phases live; return each as it ran, all events, what was said and decided."""
    decided: list[Decided] = []
    params = EmbeddedParams(
        fleet=fleet,
        alpha=START_ALPHA,
        time_scale=time_scale,
        tuner=tuner_params(
            initial_alpha=START_ALPHA,
            window_queries=WINDOW_QUERIES,
            min_queries=MIN_QUERIES,
            period_s=300.0,
            quiet_s=60.0,
            check_wall_s=5.0 / time_scale,
        ),
        journal=decided.append,
        drain_s=2.0,
    )
    done = []
    is_virtual = isinstance(asyncio.get_running_loop(), VirtualTimeLoop)
    async with (open_in_virtual_time if is_virtual else open_embedded)(params) as mesh:
        publisher = Publisher(mesh.broker, mesh.topics, mesh.clock)
        prior = WorkflowProfile(shape=wrong_priors(WRONG_BY), revision=1, tuner_id="prior")
        await publisher.until_taken(CONTROL, prior, key=f"profile/{adaptation.WORKFLOW}")
        began_s = mesh.clock.now_s()
        for index, phase in enumerate(plan):
            if stop.is_set():
                break
            _set_engines(mesh, phase)
            queries = queries_of(phase, fleet, seed + index, f"p{index}")
            tally = Tally()
            starts_s = mesh.clock.now_s() - began_s
            async with live_progress(stderr_console(), phase.name, len(queries), tally):
                await drive(mesh, queries, tally, stop, f"adapt{seed}")
            done.append((phase, queries, starts_s, tally))
        moments = await _moments(mesh, began_s)
        events = await read_mesh(mesh)
    return (
        done,
        [_since(event, began_s) for event in events],
        moments,
        [msgspec.structs.replace(one, at_s=one.at_s - began_s) for one in decided],
    )


def _since(event: LatencyEvent, began_s: float) -> LatencyEvent:
    times = {
        name: None if value is None else value - began_s
        for name, value in msgspec.structs.asdict(event.times).items()
    }
    return msgspec.structs.replace(
        event,
        arrival_s=event.arrival_s - began_s,
        times=msgspec.structs.replace(event.times, **times),
    )


def _set_engines(mesh: EmbeddedMesh, phase: Phase) -> None:
    for instance_id, engine in mesh.engines.items():
        engine.slow_down(phase.slow.get(instance_id, 1.0))
        engine.lose_cache(is_lost=not phase.caches)


async def _moments(access: MeshAccess, began_s: float) -> list[Moment]:
    """Return what is on `control`, in order."""
    found = []
    tp = TopicPartition(access.topics.name(CONTROL), 0)
    async with access.broker.partition_consumer([tp], start="beginning") as consumer:
        while records := await consumer.fetch(timeout_s=0.5):
            for record in records:
                try:
                    update = decode_any(
                        record.value or b"", AlphaUpdate, SpeedUpdate, WorkflowProfile
                    )
                except ContractError:
                    continue
                found.append(_moment(update, began_s))
    return found


def _moment(update: object, began_s: float) -> Moment:
    if isinstance(update, AlphaUpdate):
        return Moment(
            at_s=update.at_s - began_s,
            what="alpha",
            key=update.pool,
            value=update.alpha,
            reason=update.reason,
        )
    if isinstance(update, SpeedUpdate):
        return Moment(
            at_s=update.at_s - began_s,
            what="speed",
            key=update.instance_id,
            value=update.factor,
            reason=f"hits {update.hit_factor:.2f}",
        )
    if isinstance(update, WorkflowProfile):
        return Moment(
            at_s=max(0.0, update.at_s - began_s), what="profile", key=update.shape.workflow
        )
    raise TypeError(type(update).__name__)


@app.command()
def command(
    time_scale: Annotated[
        float,
        typer.Option(
            min=0,
            max=100,
            help="Workload seconds per wall second; 0: virtual time, as fast as the processor.",
        ),
    ] = 0.0,
    length: Annotated[
        float, typer.Option(min=0.01, max=10, help="Multiplies the number of queries per phase.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals and lengths.")] = 0,
    out: OutOption = Path("out"),
    json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Run the adaptation experiment: a few minutes in virtual time.

    All services run as they are, on an event loop whose time jumps whenever everything waits;
    `--time-scale 10` runs on the wall clock instead (eight minutes,
    on a machine with time to spare).

    Writes the plot (adaptation.png), what it shows (adaptation.json) and the latency events
    (adaptation-events.jsonl, which `hexflow tune` reads).
    """
    configure_logs(verbose=verbose)
    fleet = load_fleet(FLEET)
    plan = adaptation.phases(length)
    started_s = time.monotonic()
    if time_scale > 0:
        done, events, moments, decided = run_until_stopped(
            lambda stop: run_phases(plan, fleet, time_scale, seed, stop)
        )
    else:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            done, events, moments, decided = runner.run(
                run_phases(plan, fleet, 1.0, seed, asyncio.Event())
            )
    adapted = _judged(done, events, moments, decided, fleet, time_scale)
    out.mkdir(parents=True, exist_ok=True)
    (out / "adaptation-events.jsonl").write_bytes(events_text(events))
    (out / "adaptation.json").write_bytes(msgspec.json.encode(adapted))
    from services.cli.adaptation_plot import adaptation_figure  # noqa: PLC0415 - matplotlib is slow
    from services.cli.plots import save  # noqa: PLC0415

    path = save(adaptation_figure(adapted), out, "adaptation.png")
    if json:
        wall_s = round(time.monotonic() - started_s, 1)
        print_json({**adapted_json(adapted), "plot": str(path), "wall_s": wall_s})
        return
    console = stdout_console()
    console.print(results_table(adapted))
    alpha, worst = best_constant(adapted.phases)
    console.print(
        f"The best constant α, {alpha:g}, is {worst - 1:.0%} above the best in its worst phase."
    )
    for moment in adapted.moments:
        value = "" if moment.value is None else f" {moment.value:.4g}"
        console.print(f"{moment.at_s:8.0f} s  {moment.what} {moment.key}{value}  {moment.reason}")
    console.print(decisions_table(adapted))
    console.print(f"Plot: {path}", soft_wrap=True)


def _judged(
    done: Sequence[Ran],
    events: Sequence[LatencyEvent],
    moments: Sequence[Moment],
    decided: Sequence[Decided],
    fleet: tuple[InstanceSpec, ...],
    time_scale: float,
) -> Adapted:
    hops = [
        event.times.queued_at_s - event.times.dispatched_at_s
        for event in events
        if event.times.queued_at_s is not None and event.times.dispatched_at_s is not None
    ]
    hop_s = max(0.0, percentile(hops, 50)) if hops else 0.0
    latencies = []
    for _, queries, starts_s, tally in done:
        ends = [end for end in tally.ends if end.completed]
        base_s = min((end.arrival_s for end in ends), default=0.0) - (queries[0].arrival_s or 0.0)
        latencies += [(starts_s + end.arrival_s - base_s, end.latency_s) for end in ends]
    return Adapted(
        phases=judged_against_best(done, fleet, moments, hop_s),
        moments=tuple(moments),
        decisions=tuple(decided),
        latencies=tuple(sorted(latencies)),
        time_scale=time_scale,
        hop_s=hop_s,
    )
