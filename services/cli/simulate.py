"""`hexflow simulate`: one workload on one fleet under one policy."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from services.cli.console import counted, finite, print_json, stdout_console
from services.cli.lab import options
from services.cli.lab.bench import RECORDED, Workbench, recorded_qps
from services.cli.lab.gantt import gantt_figure, stage_names
from services.cli.lab.jsonable import measured_json
from services.cli.lab.rates import parse_rates
from services.cli.lab.setting import Cell, Setting, Setup, Variant
from services.cli.lab.steady import Measured, Window, measure
from services.cli.options import FleetOption, JsonOption, parse_scales
from services.cli.plots import save
from services.cli.report import seconds
from shared.errors import ConfigError
from shared.scheduling.policies import DEFAULT_ALPHA, DEFAULT_POLICY
from shared.simulation.capacity import fluid_capacity
from shared.simulation.results import RunResult
from shared.simulation.scenario import Scenario

DEFAULT_RATE = "60%"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    """One run for people and scripts.

    Attributes:
        cell: Workload, fleet and load.
        variant: Policy and parameters.
        seed: Seed.
        capacity_qps: The fleet's fluid capacity.
        window: What was measured.
        measured: What it came to.
        num_queries: Queries of the whole run.
        num_calls: Calls of the whole run.
    """

    cell: Cell
    variant: Variant
    seed: int
    capacity_qps: float
    window: Window
    measured: Measured
    num_queries: int
    num_calls: int


@app.command()
def command(
    trace: Annotated[Path | None, typer.Argument(metavar="[TRACE]", help="Trace file.")] = None,
    generate: options.GenerateOption = None,
    fleet: FleetOption = "hetero-1",
    policy: Annotated[str, typer.Option(help="Scheduling policy.")] = DEFAULT_POLICY,
    alpha: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="α of the policy, if it has one.")
    ] = DEFAULT_ALPHA,
    rate: Annotated[
        str | None,
        typer.Option(
            help=f"Queries per second, or a share of the fleet's upper bound; {DEFAULT_RATE} by "
            "default, the recorded rate with --arrivals recorded."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Equal seeds give equal runs.")] = 0,
    slo_scales: options.ScalesOption = "",
    slo_base: options.SloBaseOption = "own",
    arrivals: Annotated[
        str,
        typer.Option(help="poisson, bursty, step, recorded, gamma:CV or step:RATExSECONDS,..."),
    ] = "poisson",
    queries: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10_000_000,
            help="Queries to draw from the trace; default: the trace once, as it is.",
        ),
    ] = None,
    warm_up: Annotated[
        float, typer.Option(min=0, max=0.9, help="Share of queries not measured, from the first.")
    ] = 0.0,
    cool_down: Annotated[
        float, typer.Option(min=0, max=0.9, help="Share of queries not measured, to the last.")
    ] = 0.0,
    oracle: options.OracleOption = False,
    dispatchers: options.DispatchersOption = 1,
    state_delay: options.StateDelayOption = 0.0,
    hop: options.HopOption = 0.0,
    admission: options.AdmissionOption = None,
    prefix_caching: options.PrefixCachingOption = True,
    allow_unknown_steps: options.UnknownStepsOption = False,
    gantt: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw what every instance did.")
    ] = None,
    calls: Annotated[
        bool, typer.Option("--calls", help="With --json: every call with its times, too.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Simulate one workload on a fleet under a policy; invariants are checked on every run.

    All times are simulated seconds. Everything is measured unless --warm-up or --cool-down say
    otherwise.
    """
    if calls and not json:
        raise ConfigError("--calls goes with --json")
    options.check_policies([policy])
    setup = Setup(
        traces=options.load_traces(
            [trace] if trace else [], generate, allow_unknown_steps=allow_unknown_steps
        ),
        fleets=options.load_fleets(fleet, prefix_caching=prefix_caching),
        num_queries=queries,
        slo_scales=parse_scales(slo_scales),
        slo_base=options.parse_slo_base(slo_base),
        window=Window(warm_up=warm_up, cool_down=cool_down),
        mesh=options.mesh_model(
            oracle=oracle,
            dispatchers=dispatchers,
            state_delay=state_delay,
            hop=hop,
            admission=admission,
        ),
    )
    cell, capacity_qps = _cell(setup, arrivals, rate)
    options.check_setup(setup, [arrivals])
    result, scenario, simulated = run(
        setup, cell, seed, Variant(policy=policy, alpha=alpha), capacity_qps
    )
    if gantt is not None:
        title = f"{policy} at {cell.rate_qps:.3g} queries/s: {cell.setting.trace} on {fleet}"
        save(gantt_figure(result, scenario, title), gantt.parent, gantt.name)
    if json:
        content = simulated_json(simulated)
        print_json(content | {"calls": calls_json(result, scenario)} if calls else content)
        return
    console = stdout_console()
    console.print(summary_table(simulated))
    console.print(instance_table(simulated.measured))
    if gantt is not None:
        console.print(f"picture: {gantt}")


def run(
    setup: Setup, cell: Cell, seed: int, variant: Variant, capacity_qps: float
) -> tuple[RunResult, Scenario, Simulated]:
    """Simulate and measure one run."""
    bench = Workbench(setup)
    result, scenario, isolated_s = bench.simulate(cell, seed, variant)
    simulated = Simulated(
        cell=cell,
        variant=variant,
        seed=seed,
        capacity_qps=capacity_qps,
        window=setup.window,
        measured=measure(
            result, isolated_s, setup.window, [query.tenant for query in scenario.queries]
        ),
        num_queries=len(result.arrival_s),
        num_calls=len(result.call_query),
    )
    return result, scenario, simulated


def simulated_json(one: Simulated) -> dict[str, Any]:
    """Return the JSON object of `hexflow simulate --json`."""
    return {
        "policy": one.variant.policy,
        "trace": one.cell.setting.trace,
        "fleet": one.cell.setting.fleet,
        "arrivals": one.cell.setting.arrivals,
        "rate_qps": one.cell.rate_qps,
        "load": one.cell.rate_qps / one.capacity_qps,
        "upper_bound_qps": one.capacity_qps,
        "seed": one.seed,
        "alpha": one.variant.alpha,
        **measured_json(one.measured),
        "run": {"queries": one.num_queries, "calls": one.num_calls},
    }


def calls_json(result: RunResult, scenario: Scenario) -> list[dict[str, Any]]:
    """Return every call with its times: the data of the Gantt picture."""
    names = [spec.instance_id for spec in result.fleet]
    stages = stage_names(result, scenario)
    return [
        {
            "query_id": scenario.queries[int(result.call_query[index])].query_id,
            "stage": stages[index],
            "stage_index": int(result.call_stage[index]),
            "instance": names[place] if (place := int(result.call_instance[index])) >= 0 else None,
            "ready_s": finite(float(result.ready_s[index])),
            "dispatched_s": finite(float(result.dispatched_s[index])),
            "started_s": finite(float(result.started_s[index])),
            "first_token_s": finite(float(result.first_token_s[index])),
            "end_s": finite(float(result.call_end_s[index])),
            "input_tokens": int(result.input_tokens[index]),
            "cached_tokens": int(result.cached_tokens[index]),
            "output_tokens": int(result.output_tokens[index]),
        }
        for index in range(len(result.call_query))
    ]


def summary_table(one: Simulated) -> Table:
    """Return the summary of a run."""
    found, cell = one.measured, one.cell
    table = Table(
        title=f"{cell.setting.trace} on {cell.setting.fleet}",
        title_justify="left",
        show_header=False,
    )
    table.add_column(style="bold")
    table.add_column()
    load = f"{cell.rate_qps / one.capacity_qps:.0%} of the fleet's upper bound"
    for name, text in (
        ("policy", f"{one.variant.policy}, α {one.variant.alpha:g} where it has one"),
        (
            "arrivals",
            f"{cell.setting.arrivals}, {cell.rate_qps:.3g} queries/s ({load})",
        ),
        ("simulated", f"{counted(one.num_queries, 'query')}, {counted(one.num_calls, 'call')}"),
        ("measured", f"{counted(found.num_queries, 'query')}, {found.completed:.1%} answered"),
        ("P50 / P95 / P99", " / ".join(map(seconds, (found.p50_s, found.p95_s, found.p99_s)))),
        ("within SLO", f"{found.attainment:.1%}"),
        ("goodput", f"{found.goodput_qps:.3g} queries/s within SLO"),
        (
            "time used",
            f"95% within {found.scale95:.2g}, 99% within {found.scale99:.2g} × isolated time",
        ),
    ):
        table.add_row(name, text)
    return table


def instance_table(found: Measured) -> Table:
    """Return how each instance was used."""
    table = Table(title="instances", title_justify="left")
    table.add_column("instance")
    names = ("gpu", "busy", "batch", "calls", "tokens out", "cached", "preempted")
    for name in names:
        table.add_column(name, justify="right")
    for name, one in found.instances.items():
        table.add_row(
            name,
            one.gpu,
            f"{one.utilisation:.1%}",
            f"{one.batch:.1f}",
            f"{one.calls:,}",
            f"{one.output_tokens:,}",
            f"{one.cached_share:.0%}",
            f"{one.preemptions:,}",
        )
    return table


def _cell(setup: Setup, arrivals: str, rate: str | None) -> tuple[Cell, float]:
    """Return what is run and the fleet's capacity for it."""
    ((trace, queries),) = setup.traces.items()
    ((name, fleet),) = setup.fleets.items()
    capacity_qps = fluid_capacity(queries, fleet).qps
    if rate is None and arrivals == RECORDED:
        rate_qps = recorded_qps(queries)
    else:
        rates = parse_rates(rate or DEFAULT_RATE, "--rate")
        if len(rates) > 1:
            raise ConfigError(f"--rate {rate!r}: one rate; `hexflow compare` takes several")
        rate_qps = rates[0].qps(capacity_qps)
    setting = Setting(trace=trace, fleet=name, arrivals=arrivals)
    return Cell(setting=setting, rate_qps=rate_qps), capacity_qps
