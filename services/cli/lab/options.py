"""Options that the lab's commands share, and what they stand for."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from services.cli.lab.bench import Workbench
from services.cli.lab.setting import MeshModel, Setup, SloBase
from services.cli.workload import generated, load_fleet, read_file
from shared.domain.instance import InstanceSpec
from shared.domain.trace import TraceQuery
from shared.errors import ConfigError
from shared.scheduling.policies import REGISTRY, unknown_policy
from shared.simulation.trace_file import parse_trace

GENERATED_QUERIES = 200
GENERATED_SEED = 0

GenerateOption = Annotated[
    str | None,
    typer.Option(metavar="natural|stress", help="Draw from generated queries instead of a trace."),
]
ScalesOption = Annotated[
    str,
    typer.Option(
        help="SLOs as multiples of a query's isolated time, equally often; default: what the "
        "trace records, else 3,4,6,8,10."
    ),
]
SloBaseOption = Annotated[
    str,
    typer.Option(
        metavar="own|mean",
        help="Whose isolated time SLOs are multiples of: each query's own, or the trace's mean.",
    ),
]
OracleOption = Annotated[
    bool, typer.Option("--oracle", help="Let policies know output lengths and what follows.")
]
DispatchersOption = Annotated[
    int, typer.Option(min=1, max=1_024, help="Dispatchers; queries are spread over them.")
]
StateDelayOption = Annotated[
    float,
    typer.Option(min=0.0, help="Age of an instance's state when a dispatcher sees it, seconds."),
]
HopOption = Annotated[
    float, typer.Option(min=0.0, help="Time of one message between services, seconds.")
]
AdmissionOption = Annotated[
    int | None,
    typer.Option(min=1, help="Most calls an engine is given at a time; default: its batch."),
]
PrefixCachingOption = Annotated[
    bool,
    typer.Option(
        "--prefix-caching/--no-prefix-caching", help="Whether engines reuse cached prefixes."
    ),
]
UnknownStepsOption = Annotated[
    bool,
    typer.Option("--allow-unknown-steps", help="Take unknown steps of a trace as serial stages."),
]


def load_traces(
    files: Sequence[Path], generate: str | None, *, allow_unknown_steps: bool = False
) -> dict[str, tuple[TraceQuery, ...]]:
    """Return name -> queries of the traces a command names.

    Raises:
        ConfigError: None is named, or one cannot be read; names the place.
    """
    if generate is not None:
        if files:
            raise ConfigError("a trace file and a generated workload exclude each other")
        return {generate: generated(GENERATED_QUERIES, generate, GENERATED_SEED)}
    if not files:
        raise ConfigError("name a trace file, or --generate natural or stress")
    traces: dict[str, tuple[TraceQuery, ...]] = {}
    for path in files:
        if path.stem in traces:
            raise ConfigError(f"two traces are called {path.stem!r}")
        traces[path.stem] = parse_trace(
            read_file(path), str(path), allow_unknown_steps=allow_unknown_steps
        )
    return traces


def load_fleets(names: str, *, prefix_caching: bool = True) -> dict[str, tuple[InstanceSpec, ...]]:
    """Return name -> instances of a list of fleets.

    Raises:
        ConfigError: There is no such fleet or file, or the file is wrong.
    """
    fleets: dict[str, tuple[InstanceSpec, ...]] = {}
    for name in split(names, "--fleet"):
        fleet = load_fleet(name)
        if not prefix_caching:
            fleet = tuple(msgspec.structs.replace(spec, prefix_caching=False) for spec in fleet)
        title = Path(name).stem if "/" in name or name.endswith(".toml") else name
        if title in fleets:
            raise ConfigError(f"two fleets are called {title!r}")
        fleets[title] = fleet
    return fleets


def split(text: str, option: str) -> list[str]:
    """Return the names of a list `a,b`.

    Raises:
        ConfigError: It is empty, or a name is there twice.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"{option}: at least one name is needed")
    if len(set(names)) < len(names):
        raise ConfigError(f"{option} {text!r}: a name is there twice")
    return names


def check_policies(names: Sequence[str]) -> None:
    """Refuse unknown policies.

    Raises:
        ConfigError: Names the policy and the known ones.
    """
    for name in names:
        if name not in REGISTRY:
            raise ConfigError(unknown_policy(name))


def parse_slo_base(text: str) -> SloBase:
    """Return whose isolated time SLOs are multiples of.

    Raises:
        ConfigError: It is neither `own` nor `mean`.
    """
    match text:
        case "own" | "mean":
            return text
    raise ConfigError(f"--slo-base {text!r}: own or mean")


def check_budgets(
    budgets: Sequence[int], fleets: Mapping[str, Sequence[InstanceSpec]]
) -> tuple[int, ...]:
    """Refuse token budgets that are smaller than an instance's batch.

    Raises:
        ConfigError: Names the budget and the instance.
    """
    for budget in budgets:
        for name, fleet in fleets.items():
            for spec in fleet:
                if budget < spec.max_num_seqs:
                    raise ConfigError(
                        f"--token-budgets: {budget} is less than the {spec.max_num_seqs} calls "
                        f"that instance {spec.instance_id} of {name} batches"
                    )
    return tuple(sorted(set(budgets)))


def check_setup(setup: Setup, arrivals: Sequence[str]) -> None:
    """Refuse what makes no run, before anything is run.

    Raises:
        ConfigError: Names the trace, the query, the call or the setting.
    """
    setup.window.check()
    bench = Workbench(setup)
    for trace in setup.traces:
        for fleet in setup.fleets:
            try:
                bench.check(trace, fleet, arrivals)
            except ConfigError as exc:
                raise ConfigError(f"{trace} on {fleet}: {exc}") from exc


def mesh_model(
    *,
    oracle: bool,
    dispatchers: int,
    state_delay: float,
    hop: float,
    admission: int | None,
) -> MeshModel:
    """Return how the mesh behaves, as the options say."""
    return MeshModel(
        oracle=oracle,
        dispatchers=dispatchers,
        state_delay_s=state_delay,
        hop_s=hop,
        admission=admission,
    )
