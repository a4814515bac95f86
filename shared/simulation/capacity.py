"""The fluid capacity of a fleet: an upper bound of the queries per second it can sustain.

Per instance, let calls of stage type s arrive at rate x_s and let N be its iterations per second.
However a policy schedules, in every second of the batching model (`iteration.py`)

- a call is in the batch for at least `steps + chunks` iterations, and `max_num_seqs` calls fit:
  `sum x_s (steps_s + chunks_s) <= N max_num_seqs`;
- it holds KV memory in each of them, text that other calls share not counted:
  `sum x_s kv_steps_s <= N kv_tokens`;
- an iteration processes at most the token budget: `sum x_s (computed_s + steps_s) <= N budget`;
- iterations take time: `overhead + max(weights, compute) + per call + per KV token`. The maximum
  is at least either of its terms. By the first, and because an iteration in which a prompt is cut
  off is filled up to the token budget:
  `N (overhead + weights) + sum x_s (cuts_s excess + reads_s) <= 1`;
- by the second: `N overhead + sum x_s (prefill_s + reads_s) <= 1`.

The fleet's capacity is the largest rate of queries whose calls can be spread over the instances
under these constraints: a linear program over stage types × instances, solved exactly by HiGHS.
Where decoding is all there is, it is the memory-bound roofline; where prompts are all, the
compute-bound one; a mix hides one behind the other, which real engines manage in part only.

A bound holds for every policy that places calls by their stage type. One that knew each call's
length could gain what sorting calls within a type by length brings; finer types (`type_of`) cover
that. Prefix caching is taken at its best: text that is used at least twice in the workload is
always cached, other text never. `pair_s`, `trio_s`, `batched_s` and `joined_s`
are left out: which calls share an iteration, no sum says.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import highspy
import msgspec
import numpy as np

from shared.domain.instance import InstanceSpec
from shared.domain.trace import TraceCall, TraceQuery, TraceStage
from shared.errors import ConfigError
from shared.simulation.workload import check_fits

TypeOf = Callable[[TraceQuery, TraceStage, TraceCall], Hashable]

_ANY_MODEL = "default"
_CONSTRAINTS = 5


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """An upper bound of a fleet's rate, and one allocation that reaches it.

    Attributes:
        qps: Queries per second of the workload's mix.
        calls_per_s: Stage type -> instance id -> calls per second at that rate.
        iterations_per_s: Instance id -> iterations per second at that rate.
    """

    qps: float
    calls_per_s: Mapping[Any, Mapping[str, float]]
    iterations_per_s: Mapping[str, float]


class _Work(msgspec.Struct, kw_only=True):
    """Least work of calls of one type on one kind of instance, summed over calls.

    Attributes:
        num_calls: Calls.
        steps: Decode steps; the first token comes with the prompt.
        chunks: Iterations that compute a part of the prompt.
        computed_tokens: Prompt tokens not cached.
        kv_steps: KV tokens held for the call alone, times iterations.
        kv_reads: KV tokens read by decode steps.
        pairs: Pairs of a computed prompt token and one before it.
    """

    num_calls: int = 0
    steps: float = 0.0
    chunks: float = 0.0
    computed_tokens: float = 0.0
    kv_steps: float = 0.0
    kv_reads: float = 0.0
    pairs: float = 0.0


class _Type(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of one stage type that ask for one model."""

    key: Hashable
    model: str
    calls: list[tuple[TraceCall, int]]


def stage_type(query: TraceQuery, stage: TraceStage, call: TraceCall) -> Hashable:  # noqa: ARG001
    """Return a call's stage name: the default stage type."""
    return stage.stage


def fluid_capacity(
    queries: Sequence[TraceQuery],
    fleet: Sequence[InstanceSpec],
    *,
    prefix_caching: bool | None = None,
    type_of: TypeOf = stage_type,
) -> Capacity:
    """Return the fluid capacity of a fleet for a mix of queries.

    Args:
        queries: The mix, at least one; arrivals and think times do not matter.
        fleet: The instances, at least one.
        prefix_caching: Whether instances reuse cached prefixes; None: as each declares.
        type_of: What calls are told apart by when they are spread over the instances.

    Raises:
        ConfigError: The mix or the fleet is empty, or a call fits no instance.
    """
    if not queries:
        raise ConfigError("the workload has no queries")
    check_fits(queries, fleet)
    if prefix_caching is not None:
        fleet = [msgspec.structs.replace(spec, prefix_caching=prefix_caching) for spec in fleet]
    types = _types(queries, fleet, type_of)
    kinds: dict[InstanceSpec, list[str]] = {}
    for spec in fleet:
        kind = msgspec.structs.replace(spec, instance_id="any", gpu="")
        kinds.setdefault(kind, []).append(spec.instance_id)
    return _solve(types, kinds, len(queries))


def _types(
    queries: Sequence[TraceQuery], fleet: Sequence[InstanceSpec], type_of: TypeOf
) -> list[_Type]:
    shared = _shared_tokens(queries)
    models = {spec.model for spec in fleet}
    types: dict[tuple[Hashable, str], _Type] = {}
    for query, stage, call in _calls(queries):
        model = call.model or query.model
        if model == _ANY_MODEL and len(models) == 1:
            (model,) = models
        key = type_of(query, stage, call)
        found = types.setdefault((key, model), _Type(key=key, model=model, calls=[]))
        found.calls.append((call, shared(call)))
    return list(types.values())


def _calls(queries: Sequence[TraceQuery]) -> Iterator[tuple[TraceQuery, TraceStage, TraceCall]]:
    for query in queries:
        for stage in query.stages:
            for call in stage.calls:
                yield query, stage, call


def _shared_tokens(queries: Sequence[TraceQuery]) -> Callable[[TraceCall], int]:
    """Return how many tokens at a call's start are used by another call too."""
    uses: Counter[tuple[str, ...]] = Counter()
    for _, _, call in _calls(queries):
        ids = tuple(part.prefix_id for part in call.prefix)
        uses.update(ids[: length + 1] for length in range(len(ids)))

    def shared(call: TraceCall) -> int:
        ids = tuple(part.prefix_id for part in call.prefix)
        parts = enumerate(call.prefix)
        return sum(part.tokens for length, part in parts if uses[ids[: length + 1]] > 1)

    return shared


def _work(one: _Type, spec: InstanceSpec) -> _Work:
    total = _Work()
    for call, used_twice in one.calls:
        shared = used_twice if spec.prefix_caching else 0
        cached = min(shared, call.input_tokens - 1)
        computed = call.input_tokens - (cached - cached % spec.block_tokens)
        chunks = -(-computed // spec.max_batched_tokens)
        steps = call.output_tokens - 1
        reads = steps * call.input_tokens + steps * (steps + 1) / 2
        total.num_calls += 1
        total.steps += steps
        total.chunks += chunks
        total.computed_tokens += computed
        total.kv_steps += chunks * (call.input_tokens - shared) + reads - steps * shared
        total.kv_reads += reads
        total.pairs += computed * (call.input_tokens - computed / 2)
    return total


def _coefficients(work: _Work, spec: InstanceSpec) -> list[float]:
    """Return what one call adds to each of the instance's constraints."""
    speed = spec.latency
    reads_s = work.steps * speed.seq_s + work.kv_reads * speed.kv_s_per_token
    reads_s += work.pairs * speed.attention_s_per_pair
    computed = work.computed_tokens + work.chunks * speed.chunk_waste_tokens
    full_tokens = spec.max_batched_tokens - spec.max_num_seqs + 1 + speed.chunk_waste_tokens
    excess_s = max(0.0, full_tokens * speed.prefill_s_per_token - speed.weights_s)
    sums = [
        work.steps + work.chunks,
        work.kv_steps,
        work.computed_tokens + work.steps,
        (work.chunks - work.num_calls) * excess_s + reads_s,
        computed * speed.prefill_s_per_token + reads_s,
    ]
    return [value / work.num_calls for value in sums]


def _per_iteration(spec: InstanceSpec) -> list[float]:
    """Return what one iteration adds to each of the instance's constraints."""
    speed = spec.latency
    kv_tokens = spec.kv_tokens - spec.kv_tokens % spec.block_tokens
    return [
        -float(spec.max_num_seqs),
        -float(kv_tokens),
        -float(spec.max_batched_tokens),
        speed.overhead_s + speed.weights_s,
        speed.overhead_s,
    ]


def _solve(
    types: Sequence[_Type], kinds: Mapping[InstanceSpec, list[str]], num_queries: int
) -> Capacity:
    """Maximise the rate; variables are the rate, iterations per kind, calls per type and kind."""
    program = _Program(1 + len(kinds))
    pairs: list[tuple[int, int]] = []
    for row, (spec, members) in enumerate(kinds.items()):
        for number, value in enumerate(_per_iteration(spec)):
            bound = float(len(members)) if number >= _CONSTRAINTS - 2 else 0.0
            program.limit(bound, (1 + row, value))
        for column, one in enumerate(types):
            if one.model in (spec.model, *spec.adapters):
                pairs.append((column, row))
                variable = program.new_variable()
                for number, value in enumerate(_coefficients(_work(one, spec), spec)):
                    program.add(row * _CONSTRAINTS + number, variable, value)
    for column, one in enumerate(types):
        program.balance(
            (0, -len(one.calls) / num_queries),
            *(
                (1 + len(kinds) + number, 1.0)
                for number, pair in enumerate(pairs)
                if pair[0] == column
            ),
        )
    return _capacity(program.maximise_first(), types, list(kinds.values()), pairs)


class _SilentSolver(highspy.Highs):
    """HiGHS without a word on stdout; enabling callbacks is the first thing that prints."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def enableCallbacks(self) -> None:  # noqa: N802 - the library's name
        """Switch output off first."""
        self.silent()
        super().enableCallbacks()  # type: ignore[no-untyped-call]


class _Program:
    """A linear program in sparse form; every variable is at least 0."""

    def __init__(self, num_variables: int) -> None:
        self._num_variables = num_variables
        self._limits: list[float] = []
        self._entries: list[tuple[int, int, float]] = []
        self._balances: list[tuple[int, int, float]] = []
        self._num_balances = 0

    def new_variable(self) -> int:
        """Add a variable and return its position."""
        self._num_variables += 1
        return self._num_variables - 1

    def limit(self, bound: float, *terms: tuple[int, float]) -> None:
        """Require that terms (variable, coefficient) sum up to at most a bound."""
        for variable, value in terms:
            self.add(len(self._limits), variable, value)
        self._limits.append(bound)

    def add(self, row: int, variable: int, value: float) -> None:
        """Add a term to a limit."""
        self._entries.append((row, variable, value))

    def balance(self, *terms: tuple[int, float]) -> None:
        """Require that terms sum up to 0."""
        self._balances += [(self._num_balances, variable, value) for variable, value in terms]
        self._num_balances += 1

    def maximise_first(self) -> list[float]:
        """Return the variables at the largest value of the first.

        Raises:
            ConfigError: The solver finds none; the numbers span too many orders of magnitude.
        """
        num_limits = len(self._limits)
        program = highspy.HighsLp()
        program.sense_ = highspy.ObjSense.kMaximize
        program.num_col_ = self._num_variables
        program.num_row_ = num_limits + self._num_balances
        program.col_cost_ = np.eye(1, self._num_variables).ravel()
        program.col_lower_ = np.zeros(self._num_variables)
        program.col_upper_ = np.full(self._num_variables, np.inf)
        program.row_lower_ = np.array([-np.inf] * num_limits + [0.0] * self._num_balances)
        program.row_upper_ = np.array(self._limits + [0.0] * self._num_balances)
        moved = [(num_limits + row, variable, value) for row, variable, value in self._balances]
        self._fill(program.a_matrix_, self._entries + moved, program.num_row_)
        solver = _SilentSolver()
        solver.passModel(program)
        solver.run()
        if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            status = solver.modelStatusToString(solver.getModelStatus())
            raise ConfigError(f"the fleet's capacity cannot be computed: {status}")
        return [float(value) for value in solver.getSolution().col_value]

    @staticmethod
    def _fill(
        matrix: highspy.HighsSparseMatrix, entries: list[tuple[int, int, float]], num_rows: int
    ) -> None:
        ordered = sorted(entries)
        rows = [row for row, _, _ in ordered]
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.start_ = np.searchsorted(rows, range(num_rows + 1)).astype(np.int32)
        matrix.index_ = np.array([variable for _, variable, _ in ordered], dtype=np.int32)
        matrix.value_ = np.array([value for _, _, value in ordered])


def _capacity(
    solution: Sequence[float],
    types: Sequence[_Type],
    members: Sequence[list[str]],
    pairs: Sequence[tuple[int, int]],
) -> Capacity:
    calls_per_s: dict[Any, dict[str, float]] = {}
    for (column, row), rate in zip(pairs, solution[1 + len(members) :], strict=True):
        per_instance = calls_per_s.setdefault(types[column].key, {})
        for instance_id in members[row]:
            shares = per_instance.get(instance_id, 0.0)
            per_instance[instance_id] = shares + rate / len(members[row])
    iterations_per_s = {
        instance_id: solution[1 + row] / len(ids)
        for row, ids in enumerate(members)
        for instance_id in ids
    }
    return Capacity(qps=solution[0], calls_per_s=calls_per_s, iterations_per_s=iterations_per_s)
