"""Where the records of a run are."""

from collections.abc import MutableSequence

from shared.simulation.fleet_state import (
    BeliefState,
    LineState,
    PlanState,
    QueryState,
    RunState,
    StageState,
    TimerState,
    ViewState,
)
from shared.simulation.kernel_state import CallState, EngineState, NodeState


class Tables:
    """One list (or array) of records per kind; a single instance needs only the first five.

    Attributes:
        calls: Calls.
        engines: Instances.
        nodes: Prefix parts, `num_nodes` per instance.
        residues: Residue histograms (see `kv_blocks`), `block_tokens` entries per instance.
        events: Buffer of events, pairs of (call index, kind).
        runs: The run, one entry.
        queries: Queries.
        stages: Stages, in the order of their queries.
        children: Child stages of all stages.
        plans: What the mesh decides about each call, parallel to `calls`.
        lines: Waiting lines, one per instance.
        beliefs: What policies believe of each instance's speed.
        views: Dispatchers' views, `num_instances` per dispatcher.
        timers: Timer slots.
        arrivals: Queries in order of arrival.
        line_heap: Heaps of the waiting lines.
        timer_heap: Heap of timer slots.
        pool: Calls that wait for an assignment.
        touched: Instances whose state changed at this instant.
        held: Calls looked past while an engine is fed.
        turns: Round-robin turn of each dispatcher.
        offers: Whether an instance offers a model, `num_instances` entries per model.
        wakes_s: When each instance's segment ends.
        costs_s: Expected cost of the call under consideration, per instance; negative where it
            cannot run.
        cached_tokens: Its prompt tokens expected in the cache, per instance.
        scores: Scores of the instances for it (see `baseline_rules`).
        notes: What a policy remembers, `NOTES + num_instances` numbers per dispatcher.
    """

    __slots__ = (
        "arrivals",
        "beliefs",
        "cached_tokens",
        "calls",
        "children",
        "costs_s",
        "engines",
        "events",
        "held",
        "line_heap",
        "lines",
        "nodes",
        "notes",
        "offers",
        "plans",
        "pool",
        "queries",
        "residues",
        "runs",
        "scores",
        "stages",
        "timer_heap",
        "timers",
        "touched",
        "turns",
        "views",
        "wakes_s",
    )

    calls: MutableSequence[CallState]
    engines: MutableSequence[EngineState]
    nodes: MutableSequence[NodeState]
    residues: MutableSequence[int]
    events: MutableSequence[int]
    runs: MutableSequence[RunState]
    queries: MutableSequence[QueryState]
    stages: MutableSequence[StageState]
    children: MutableSequence[int]
    plans: MutableSequence[PlanState]
    lines: MutableSequence[LineState]
    beliefs: MutableSequence[BeliefState]
    views: MutableSequence[ViewState]
    timers: MutableSequence[TimerState]
    arrivals: MutableSequence[int]
    line_heap: MutableSequence[int]
    timer_heap: MutableSequence[int]
    pool: MutableSequence[int]
    touched: MutableSequence[int]
    held: MutableSequence[int]
    turns: MutableSequence[int]
    offers: MutableSequence[int]
    wakes_s: MutableSequence[float]
    costs_s: MutableSequence[float]
    cached_tokens: MutableSequence[int]
    scores: MutableSequence[float]
    notes: MutableSequence[float]
