"""Learns what to expect of a workflow: lengths per stage, and what remains after each.

*Remaining* work is conditional: given that `revise/4` runs, how many later revisions, tests, ...
are expected. It is counted along the path that takes longest, so that a stage beside the critical
path of a DAG does not take budget away from it; in a chain every later stage counts.

Few samples are drawn towards a prior: an estimate is the mean of what was seen and
`prior_weight` imaginary samples of the prior. The prior of `stage/iteration` is the given shape's,
else the estimate of the iteration before.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, product

from shared.domain import text2sql
from shared.domain.profile import StageEstimate, WorkflowShape
from shared.domain.trace import TraceQuery, TraceStage

DEFAULT_PRIOR_WEIGHT = 2.0
MAX_ITERATIONS = 64
# One output token costs about as much time as this many prompt tokens (A100: 0.035 s · 5,000/s);
# only the choice of a DAG's longest path depends on it.
INPUTS_PER_OUTPUT = 175.0

# (stage, iteration) of an occurrence, and how often each stage follows it.
Occurrence = tuple[str, int]
Tail = Counter[str]


def shape_key(stage: str, iteration: int) -> str:
    """Return the key of an occurrence in `WorkflowShape.remaining`."""
    return f"{stage}/{iteration}"


def shape_from_trace(
    queries: Iterable[TraceQuery],
    *,
    priors: Mapping[str, WorkflowShape] | None = None,
    prior_weight: float = DEFAULT_PRIOR_WEIGHT,
) -> dict[str, WorkflowShape]:
    """Return the shape of every workflow in a trace.

    Args:
        queries: Finished queries; their output lengths are history here.
        priors: Workflow name -> what was expected before.
        prior_weight: How many samples a prior counts for, >= 0; 0 gives plain means.

    Returns:
        Workflow name -> shape.
    """
    by_workflow: dict[str, list[TraceQuery]] = defaultdict(list)
    for query in queries:
        by_workflow[query.workflow].append(query)
    known = priors or {}
    return {
        workflow: _learn(workflow, group, known.get(workflow), prior_weight)
        for workflow, group in by_workflow.items()
    }


def default_shapes() -> dict[str, WorkflowShape]:
    """Return the built-in priors: `text2sql`, from published statistics.

    The frequencies of stages are those of `shared.domain.text2sql` (natural revisions).
    """
    remaining = _RemainingCounts()
    for stages, weight in _text2sql_paths():
        remaining.add(_occurrences(stages), _chain_tails(stages), weight)
    shape = WorkflowShape(
        workflow=text2sql.WORKFLOW,
        stages={stage: _published_estimate(stage) for stage in text2sql.STAGES},
        remaining=remaining.estimates(None, 0.0),
    )
    return {text2sql.WORKFLOW: shape}


def expected_longest(lengths: text2sql.Lengths, siblings: float) -> float:
    """Return the expected maximum of independent draws from published percentiles, tokens.

    The distribution is taken as linear between its 5th, 50th and 95th percentile and constant
    outside them.

    Args:
        lengths: The percentiles.
        siblings: Number of draws, >= 1; a mean number is fine.
    """
    knots = (
        (0.0, lengths.p5),
        (0.05, lengths.p5),
        (0.5, lengths.p50),
        (0.95, lengths.p95),
        (1.0, lengths.p95),
    )
    total = 0.0
    for (low_p, low), (high_p, high) in pairwise(knots):
        slope = (high - low) / (high_p - low_p)
        start = low - slope * low_p
        total += start * (high_p**siblings - low_p**siblings)
        powers = high_p ** (siblings + 1.0) - low_p ** (siblings + 1.0)
        total += slope * siblings / (siblings + 1.0) * powers
    return total


class _RemainingCounts:
    """Weighted sums of what followed each occurrence."""

    def __init__(self) -> None:
        self._weight: defaultdict[str, dict[int, float]] = defaultdict(dict)
        self._sums: defaultdict[Occurrence, defaultdict[str, float]] = defaultdict(
            lambda: defaultdict(float)
        )

    def add(
        self, occurrences: Sequence[Occurrence], tails: Sequence[Tail], weight: float = 1.0
    ) -> None:
        """Count one query: what followed each of its occurrences."""
        for (stage, iteration), tail in zip(occurrences, tails, strict=True):
            if iteration >= MAX_ITERATIONS:
                continue
            weights = self._weight[stage]
            weights[iteration] = weights.get(iteration, 0.0) + weight
            for later, count in tail.items():
                self._sums[stage, iteration][later] += weight * count

    def estimates(
        self, prior: WorkflowShape | None, prior_weight: float
    ) -> dict[str, dict[str, float]]:
        """Return key -> stage -> expected later occurrences, keeping what only the prior knows."""
        remaining = dict(prior.remaining) if prior else {}
        for stage, weights in self._weight.items():
            before: Mapping[str, float] | None = None
            for iteration in sorted(weights):
                expected = _prior_remaining(prior, stage, iteration)
                base = expected if expected is not None else before
                estimate = self._estimate((stage, iteration), base, prior_weight)
                remaining[shape_key(stage, iteration)] = estimate
                before = estimate
        return remaining

    def _estimate(
        self, occurrence: Occurrence, base: Mapping[str, float] | None, prior_weight: float
    ) -> dict[str, float]:
        stage, iteration = occurrence
        seen = self._weight[stage][iteration]
        extra = prior_weight if base is not None else 0.0
        sums = self._sums[occurrence]
        prior = base or {}
        means = {
            later: (sums.get(later, 0.0) + extra * prior.get(later, 0.0)) / (seen + extra)
            for later in sorted({*sums, *prior})
        }
        return {later: mean for later, mean in means.items() if mean > 0.0}


def remaining_after(shape: WorkflowShape, stage: str, iteration: int) -> Mapping[str, float] | None:
    """Return what is expected after an occurrence, or None where the stage is unknown.

    Iterations above the last known one use the last; gaps use the nearest one below.
    """
    found = shape.remaining.get(shape_key(stage, iteration))
    if found is not None:
        return found
    for lower in range(min(iteration, MAX_ITERATIONS) - 1, -1, -1):
        found = shape.remaining.get(shape_key(stage, lower))
        if found is not None:
            return found
    return None


def _prior_remaining(
    prior: WorkflowShape | None, stage: str, iteration: int
) -> Mapping[str, float] | None:
    return remaining_after(prior, stage, iteration) if prior else None


def _learn(
    workflow: str,
    queries: Sequence[TraceQuery],
    prior: WorkflowShape | None,
    prior_weight: float,
) -> WorkflowShape:
    remaining = _RemainingCounts()
    by_stage: dict[str, list[TraceStage]] = defaultdict(list)
    for query in queries:
        seen_at = [(stage.stage, stage.iteration) for stage in query.stages]
        remaining.add(seen_at, _tails(query.stages))
        for stage in query.stages:
            by_stage[stage.stage].append(stage)
    shared = _shared_prefixes(queries)
    stages = dict(prior.stages) if prior else {}
    for name, seen in by_stage.items():
        stages[name] = _estimate_stage(seen, shared, stages.get(name), prior_weight)
    return WorkflowShape(
        workflow=workflow, stages=stages, remaining=remaining.estimates(prior, prior_weight)
    )


def _estimate_stage(
    stages: Sequence[TraceStage],
    shared_prefixes: frozenset[str],
    prior: StageEstimate | None,
    prior_weight: float,
) -> StageEstimate:
    calls = [call for stage in stages for call in stage.calls]
    cached = [
        sum(part.tokens for part in call.prefix if part.prefix_id in shared_prefixes)
        for call in calls
    ]
    longest = [max(call.output_tokens for call in stage.calls) for stage in stages]
    seen = StageEstimate(
        input_tokens=sum(call.input_tokens for call in calls) / len(calls),
        output_tokens=sum(call.output_tokens for call in calls) / len(calls),
        max_output_tokens=sum(longest) / len(longest),
        cached_tokens=sum(cached) / len(cached),
        siblings=len(calls) / len(stages),
        num_seen=len(calls),
    )
    return _blend(seen, prior, prior_weight) if prior else seen


def _blend(seen: StageEstimate, prior: StageEstimate, prior_weight: float) -> StageEstimate:
    share = seen.num_seen / (seen.num_seen + prior_weight)

    def mix(new: float, old: float) -> float:
        return share * new + (1.0 - share) * old

    return StageEstimate(
        input_tokens=mix(seen.input_tokens, prior.input_tokens),
        output_tokens=mix(seen.output_tokens, prior.output_tokens),
        max_output_tokens=mix(
            seen.max_output_tokens, prior.max_output_tokens or prior.output_tokens
        ),
        cached_tokens=mix(seen.cached_tokens, prior.cached_tokens),
        siblings=mix(seen.siblings, prior.siblings),
        num_seen=seen.num_seen + prior.num_seen,
        bytes_per_token=seen.bytes_per_token or prior.bytes_per_token,
    )


def _shared_prefixes(queries: Sequence[TraceQuery]) -> frozenset[str]:
    """Return the prefixes that more than one query uses: those a warm instance may hold."""
    users: Counter[str] = Counter()
    for query in queries:
        calls = (call for stage in query.stages for call in stage.calls)
        users.update({part.prefix_id for call in calls for part in call.prefix})
    return frozenset(prefix_id for prefix_id, count in users.items() if count > 1)


def _occurrences(stages: Sequence[str]) -> list[Occurrence]:
    counts: Counter[str] = Counter()
    occurrences = []
    for stage in stages:
        occurrences.append((stage, counts[stage]))
        counts[stage] += 1
    return occurrences


def _chain_tails(stages: Sequence[str]) -> list[Tail]:
    tail: Tail = Counter()
    tails = []
    for stage in reversed(stages):
        tails.append(Counter(tail))
        tail[stage] += 1
    return tails[::-1]


def _tails(stages: Sequence[TraceStage]) -> list[Tail]:
    """Return, per stage, how often each stage name occurs on the longest path after it."""
    if all(stage.parents is None for stage in stages):
        return _chain_tails([stage.stage for stage in stages])
    children: list[list[int]] = [[] for _ in stages]
    for index, stage in enumerate(stages):
        for parent in _parents(stage, index):
            children[parent].append(index)
    lengths = [0.0] * len(stages)
    tails: list[Tail] = [Counter() for _ in stages]
    for index in range(len(stages) - 1, -1, -1):
        if children[index]:
            heir = max(children[index], key=lambda child: lengths[child])
            tails[index] = tails[heir] + Counter([stages[heir].stage])
            lengths[index] = lengths[heir]
        lengths[index] += _nominal_length(stages[index])
    return tails


def _parents(stage: TraceStage, index: int) -> tuple[int, ...]:
    if stage.parents is not None:
        return stage.parents
    return (index - 1,) if index else ()


def _nominal_length(stage: TraceStage) -> float:
    return max(call.input_tokens + INPUTS_PER_OUTPUT * call.output_tokens for call in stage.calls)


def _text2sql_paths() -> list[tuple[list[str], float]]:
    """Return every possible order of stages with its probability."""
    paths = []
    for keywords, revisions, unit_test in product(
        (False, True), range(text2sql.MAX_REVISE + 1), (False, True)
    ):
        weight = (
            _chance(text2sql.KEYWORDS_PROBABILITY, keywords)
            * _revise_probability(revisions)
            * _chance(text2sql.UNIT_TEST_PROBABILITY, unit_test)
        )
        stages = [
            text2sql.INFORMATION_RETRIEVER,
            *([text2sql.EXTRACT_KEYWORDS] if keywords else []),
            *[text2sql.INFORMATION_RETRIEVER] * 3,
            text2sql.GENERATE_CANDIDATE,
            *[text2sql.REVISE] * revisions,
            text2sql.UNIT_TESTER,
            *([text2sql.GENERATE_UNIT_TEST] if unit_test else []),
            text2sql.UNIT_TESTER,
            *([text2sql.EVALUATE] if unit_test else []),
            text2sql.UNIT_TESTER,
        ]
        paths.append((stages, weight))
    return paths


def _chance(probability: float, happens: bool) -> float:
    return probability if happens else 1.0 - probability


def _revise_probability(revisions: int) -> float:
    needed, again = text2sql.NATURAL_REVISE_PROBABILITY, text2sql.NATURAL_REVISE_AGAIN_PROBABILITY
    if revisions == 0:
        return 1.0 - needed
    stops = 1.0 if revisions == text2sql.MAX_REVISE else 1.0 - again
    return needed * again ** (revisions - 1) * stops


def _published_estimate(stage: str) -> StageEstimate:
    statistics = text2sql.STATISTICS[stage]
    siblings = _published_siblings(stage)
    return StageEstimate(
        input_tokens=statistics.input.mean,
        output_tokens=statistics.output.mean,
        max_output_tokens=(
            expected_longest(statistics.output, siblings)
            if siblings > 1
            else statistics.output.mean
        ),
        cached_tokens=_template_tokens(stage),
        siblings=siblings,
    )


def _published_siblings(stage: str) -> float:
    if stage == text2sql.GENERATE_CANDIDATE:
        return len(text2sql.CANDIDATE_TEMPLATE_TOKENS)
    if stage == text2sql.EVALUATE:
        return sum(count * chance for count, chance in text2sql.EVALUATE_SIBLINGS.items())
    return 1.0


def _template_tokens(stage: str) -> float:
    if stage == text2sql.GENERATE_CANDIDATE:
        templates = text2sql.CANDIDATE_TEMPLATE_TOKENS
        return sum(templates) / len(templates)
    return text2sql.TEMPLATE_TOKENS[stage]
