"""What the lab runs, as plain values that travel to worker processes."""

from collections.abc import Mapping
from typing import Literal

import msgspec

from services.cli.lab.steady import Measured, Window
from shared.domain.instance import InstanceSpec
from shared.domain.trace import TraceQuery

SloBase = Literal["own", "mean"]


class MeshModel(msgspec.Struct, frozen=True, kw_only=True):
    """How the simulated mesh behaves around the policy.

    Attributes:
        oracle: Let policies know true output lengths and what really follows.
        dispatchers: Dispatchers; queries are spread over them.
        state_delay_s: Age of an instance's state when a dispatcher sees it, seconds.
        hop_s: Time of one message between services, seconds.
        admission: Most calls an engine is given at a time; None: its `max_num_seqs`.
    """

    oracle: bool = False
    dispatchers: int = 1
    state_delay_s: float = 0.0
    hop_s: float = 0.0
    admission: int | None = None


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What all runs of a comparison have in common.

    Attributes:
        traces: Name -> queries to draw from.
        fleets: Name -> instances.
        num_queries: Queries of one run; None: the trace as it is, once.
        slo_scales: SLOs as multiples of a query's isolated time; empty: what the trace records,
            the default set where it records nothing.
        slo_base: Whose isolated time: each query's own, or the mean over the trace's queries.
        window: What is measured of a run.
        mesh: How the mesh behaves.
    """

    traces: Mapping[str, tuple[TraceQuery, ...]]
    fleets: Mapping[str, tuple[InstanceSpec, ...]]
    num_queries: int | None = None
    slo_scales: tuple[float, ...] = ()
    slo_base: SloBase = "own"
    window: Window = Window()
    mesh: MeshModel = MeshModel()


class Setting(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """Where policies are compared: a workload on a fleet.

    Attributes:
        trace: Name of the trace.
        fleet: Name of the fleet.
        arrivals: `poisson`, `bursty`, `step`, or a text that `parse_arrivals` knows.
    """

    trace: str
    fleet: str
    arrivals: str = "poisson"


class Cell(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """A setting under one load.

    Attributes:
        setting: Workload and fleet.
        rate_qps: Mean arrivals, queries per second; with recorded arrivals they are sped up to it.
    """

    setting: Setting
    rate_qps: float


class Variant(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """A policy with its parameters.

    Attributes:
        policy: Registry name.
        alpha: α; policies without one ignore it.
        token_budget: Token budget of every instance's iteration; 0: as the fleet declares.
    """

    policy: str
    alpha: float = 0.0
    token_budget: int = 0


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Work for one worker: one workload under several variants.

    Attributes:
        cell: Workload, fleet and load.
        seed: Of everything that is drawn.
        variants: What to run on it.
        slo_scale: One SLO scale for all queries; None: as the setup says.
    """

    cell: Cell
    seed: int
    variants: tuple[Variant, ...]
    slo_scale: float | None = None


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One run and what it came to.

    Attributes:
        cell: Workload, fleet and load.
        seed: Its seed.
        variant: Policy and parameters.
        slo_scale: See `Job`.
        measured: Its steady part.
    """

    cell: Cell
    seed: int
    variant: Variant
    slo_scale: float | None
    measured: Measured
