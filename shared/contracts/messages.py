"""The messages of the mesh, one class per `type`.

Rules of evolution: a new field has a default and never raises `version`; unknown fields are
ignored; a field never changes its type; a breaking change raises `version` and is readable one
release before anything writes it. Golden bytes in `tests/unit/contracts` hold every version.

Instants (`*_at_s`, `arrival_s`) are seconds on the *mesh clock*: the broker's append time as Unix
seconds, multiplied by the mesh's time scale (1 in production). Durations are seconds on the same
scale. Token counts are tokens, sizes are bytes.
"""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from shared.domain.instance import InstanceSpec
from shared.domain.profile import WorkflowShape
from shared.domain.trace import PrefixPart

Id = Annotated[str, Meta(min_length=1, max_length=128)]
Name = Annotated[str, Meta(min_length=1, max_length=128)]
InstanceId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Count = Annotated[int, Meta(ge=0, le=2**53)]
MAX_TOKENS = 10_000_000
Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Seconds = Annotated[float, Meta(ge=0, le=1e15)]  # finite: NaN and infinity are refused
Finite = Annotated[float, Meta(ge=-1e15, le=1e15)]

MAX_DETAIL = 500
"""Longest `detail` that is written, characters: it may quote what a producer sent."""

OutcomeKind = Literal["completed", "failed", "rejected", "evicted", "cancelled"]
QueryKind = Literal["completed", "unanswered", "failed", "rejected", "evicted", "cancelled"]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of every message: a MessagePack map with `type` and `version`.

    Attributes:
        version: Version of the class that wrote it.
    """

    CURRENT_VERSION: ClassVar[int] = 1

    version: Annotated[int, Meta(ge=1)] = 1


class ReplyTo(msgspec.Struct, frozen=True, kw_only=True):
    """Where outcomes go: one partition, constant for all calls of a query.

    Attributes:
        topic: Topic name without the mesh's prefix.
        partition: Partition of that topic.
    """

    topic: Name = "stage-results"
    partition: Annotated[int, Meta(ge=0, le=100_000)] = 0


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance must offer to be eligible.

    Attributes:
        context_tokens: Prompt plus output that must fit, tokens; 0 means derive it.
        features: Optional abilities, e.g. `tools`, `structured_output`.
    """

    context_tokens: Tokens = 0
    features: tuple[Name, ...] = ()


class SimulatedLengths(msgspec.Struct, frozen=True, kw_only=True):
    """True lengths of a replayed call. Only the simulated engine reads them, never a policy.

    Attributes:
        input_tokens: Prompt length, tokens.
        output_tokens: Generated length, tokens.
    """

    input_tokens: Annotated[int, Meta(ge=1, le=10_000_000)]
    output_tokens: Annotated[int, Meta(ge=1, le=10_000_000)]


class StageRequest(Message, frozen=True, kw_only=True, tag="stage_request"):
    """One LLM call, on `stage-requests` (key: query_id).

    Producers fill the first block; the fields from `attempt` on are filled by the mesh when a
    call travels a second time (drain, retry elsewhere, recovery) and left alone by producers.

    Attributes:
        request_id: Unique per call, and the same when the producer sends the call again: derive
            it from query_id, stage, iteration and sibling.
        query_id: The question this call belongs to; empty: the call is its own query.
        workflow: Workflow name; any name is accepted and learned.
        stage: Stage name.
        iteration: 0-based count of this stage's earlier occurrences in the query.
        sibling: 0-based index among the parallel calls of the stage.
        siblings: How many parallel calls the stage has.
        parents: Request ids whose outcomes this call waited for.
        tenant: Who asks.
        model: Model or adapter that must serve the call.
        needs: Further conditions on the instance.
        messages: Chat messages, passed to the engine unchanged; or
        prompt: Plain prompt text.
        max_tokens: Longest output, tokens; None: what fits the context.
        sampling: Sampling parameters for the engine (temperature, top_p, ...).
        extra: Other engine fields, passed on unchanged.
        stream: Whether token chunks are wanted while the call runs.
        input_tokens_estimate: Prompt length as the producer believes it, tokens; never trusted.
        prefix: Prefix chain of the prompt, outermost first.
        arrival_s: When the query arrived, mesh clock; None on a query's first call, where the
            broker's append time is the arrival.
        slo_s: End-to-end deadline of the query relative to its arrival, seconds.
        think_s: Time the producer spent between the parents' outcomes and this call, seconds.
        reply_to: Where the outcome goes.
        simulated: True lengths for simulated engines.
        attempt: 0 for the producer's own message, +1 each time the mesh hands the call back.
        ready_at_s: When the call became ready, mesh clock; set on attempt 0.
        t_slo_s: The stage's budget, seconds, frozen when the stage became ready; may be negative.
        slo_defaulted: Whether `slo_s` was filled in by the mesh.
        failed_on: Instances whose engine failed an earlier attempt; others are preferred.
        failures: Attempts that failed, or under which an instance died; a call that was only handed
            back by a leaving instance did not fail.
    """

    request_id: Id
    model: Name
    query_id: Annotated[str, Meta(max_length=128)] = ""
    workflow: Name = "default"
    stage: Name = "call"
    iteration: Annotated[int, Meta(ge=0, le=10_000)] = 0
    sibling: Annotated[int, Meta(ge=0, le=10_000)] = 0
    siblings: Annotated[int, Meta(ge=1, le=10_000)] = 1
    parents: tuple[Id, ...] = ()
    tenant: Name = "default"
    needs: Needs = Needs()
    messages: tuple[dict[str, Any], ...] | None = None
    prompt: str | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=10_000_000)] | None = None
    sampling: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    stream: bool = False
    input_tokens_estimate: Tokens | None = None
    prefix: tuple[PrefixPart, ...] = ()
    arrival_s: Seconds | None = None
    slo_s: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    think_s: Seconds = 0.0
    reply_to: ReplyTo = ReplyTo()
    simulated: SimulatedLengths | None = None
    attempt: Annotated[int, Meta(ge=0, le=1_000)] = 0
    ready_at_s: Seconds | None = None
    t_slo_s: Finite | None = None
    slo_defaulted: bool = False
    failed_on: tuple[InstanceId, ...] = ()
    failures: Annotated[int, Meta(ge=0, le=1_000)] = 0

    @property
    def effective_query_id(self) -> str:
        """The query this call belongs to: itself when none is named."""
        return self.query_id or self.request_id

    @property
    def is_alone(self) -> bool:
        """Whether the call is a whole query: nothing comes after it."""
        return not self.query_id

    @property
    def prompt_bytes(self) -> int | None:
        """Size of the prompt's text, bytes; None for a replayed call's stand-in."""
        if self.simulated is not None:
            return None
        if self.prompt is not None:
            return len(self.prompt.encode())
        return sum(_content_bytes(message.get("content")) for message in self.messages or ())


def _content_bytes(content: object) -> int:
    if isinstance(content, str):
        return len(content.encode())
    if isinstance(content, list):
        return sum(_content_bytes(part.get("text")) for part in content if isinstance(part, dict))
    return 0


class ScoreTerms(msgspec.Struct, frozen=True, kw_only=True):
    """Why an instance was chosen.

    Attributes:
        policy: Policy name.
        score: The winning score (policy's own scale).
        alpha: α in force, or None where the policy has none.
        beta_s2: β in force, seconds squared, or None.
        t_queue_s: The instance's queue term, seconds.
        t_comp_s: The call's expected service time there, seconds.
        others: The instances that were not chosen, those that looked quickest: instance_id ->
            (work bound to it, the call's expected service time there), seconds.
    """

    policy: Name
    score: Finite
    t_queue_s: Finite
    t_comp_s: Finite
    alpha: Finite | None = None
    beta_s2: Finite | None = None
    others: dict[str, tuple[Finite, Finite]] = {}


class BoundCall(Message, frozen=True, kw_only=True, tag="bound_call"):
    """A call bound to one instance, on `instance.<id>`.

    Attributes:
        request: The call, with ready_at_s and t_slo_s filled in.
        queue_score: Position in the instance's queue, smallest first (for the paper's policy the
            latest start on the mesh clock).
        t_comp_s: Expected service time on this instance, seconds, frozen.
        deadline_s: The query's deadline, mesh clock.
        remaining_s: Expected duration of what follows its stage, seconds; None: however late it
            gets, it keeps its place in the queue.
        is_hopeless: Whether its query could no longer be in time when it was bound; its queue score
            puts it behind the others.
        predicted_input_tokens: Prompt length used in the prediction, tokens.
        predicted_output_tokens: Output length used in the prediction, tokens.
        expected_cached_tokens: Prompt tokens expected in the instance's prefix cache, tokens.
        terms: Why this instance.
        dispatched_at_s: When the dispatcher decided, mesh clock.
        dispatcher_id: Who decided.
    """

    request: StageRequest
    queue_score: Finite
    t_comp_s: Seconds
    deadline_s: Finite
    remaining_s: Seconds | None = None
    is_hopeless: bool = False
    predicted_input_tokens: Tokens
    predicted_output_tokens: Annotated[float, Meta(ge=0, le=1e15)]
    expected_cached_tokens: Tokens = 0
    terms: ScoreTerms
    dispatched_at_s: Seconds
    dispatcher_id: Name


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts as the engine reports them.

    Attributes:
        input_tokens: Prompt length, tokens.
        output_tokens: Generated length, tokens.
        cached_tokens: Prompt tokens found in the prefix cache, tokens.
    """

    input_tokens: Tokens = 0
    output_tokens: Tokens = 0
    cached_tokens: Tokens = 0


class CallTimes(msgspec.Struct, frozen=True, kw_only=True):
    """When things happened to a call, mesh clock; None where it never got there.

    Attributes:
        ready_at_s: Became ready (broker's append time of its first request).
        dispatched_at_s: Bound to an instance.
        queued_at_s: Entered the instance's queue.
        started_at_s: Handed to the engine.
        first_token_at_s: First token.
        finished_at_s: Last token, or the moment it was given up.
    """

    ready_at_s: Finite | None = None
    dispatched_at_s: Finite | None = None
    queued_at_s: Finite | None = None
    started_at_s: Finite | None = None
    first_token_at_s: Finite | None = None
    finished_at_s: Finite | None = None


class CallOutcome(Message, frozen=True, kw_only=True, tag="call_outcome"):
    """The end of a call, on its reply partition.

    At-least-once: the outcome of a call is the record with the lowest offset in the reply
    partition that carries its request_id; readers drop later ones.

    Attributes:
        request_id: The call.
        query_id: Its query.
        kind: completed, failed, rejected, evicted or cancelled.
        reason: Constant word for anything but completed (docs/producers.md has the words); empty
            otherwise.
        detail: One sentence for people; never prompt text.
        attempt: Which attempt ended.
        text: Generated text (completed only).
        message: The whole assistant message where the engine gives one (tool calls, ...).
        finish_reason: Engine's finish reason (`stop`, `length`, ...).
        usage: Token counts.
        instance_id: Where it ran; empty when it was never bound.
        times: What happened when.
        t_slo_s: The stage's budget, seconds.
        deadline_s: The query's deadline, mesh clock.
        terms: Why the instance was chosen.
        slo_defaulted: Whether the mesh chose the SLO.
    """

    request_id: Id
    query_id: Id
    kind: OutcomeKind
    reason: str = ""
    detail: str = ""
    attempt: Count = 0
    text: str | None = None
    message: dict[str, Any] | None = None
    finish_reason: str = ""
    usage: Usage = Usage()
    instance_id: str = ""
    times: CallTimes = CallTimes()
    t_slo_s: Finite | None = None
    deadline_s: Finite | None = None
    terms: ScoreTerms | None = None
    slo_defaulted: bool = False


class LatencyEvent(Message, frozen=True, kw_only=True, tag="latency_event"):
    """What the tuner learns from: one ended attempt of a call, on `latency-events`; no text.

    Attributes:
        request_id: The call.
        query_id: Its query.
        workflow: Workflow name.
        stage: Stage name.
        iteration: Occurrence of the stage.
        sibling: Index among parallel calls.
        siblings: Number of parallel calls.
        parents: Request ids waited for.
        tenant: Who asked.
        model: Model asked for.
        instance_id: Where it ran.
        kind: How it ended.
        reason: Constant word for anything but completed.
        attempt: Which attempt.
        arrival_s: Query arrival, mesh clock.
        slo_s: The query's SLO, seconds.
        think_s: Producer's think time before the call, seconds.
        times: What happened when.
        usage: Token counts from the engine.
        prefix: Prefix chain.
        t_slo_s: The stage's budget, seconds.
        t_comp_s: Expected service time used, seconds.
        predicted_output_tokens: Output length used, tokens.
        expected_cached_tokens: Cached tokens expected, tokens.
        alpha: α in force when it was dispatched.
        prompt_bytes: Size of the prompt's text, bytes; 0 for a stand-in.
        terms: Why the instance was chosen.
    """

    request_id: Id
    query_id: Id
    workflow: Name
    stage: Name
    iteration: Count = 0
    sibling: Count = 0
    siblings: Annotated[int, Meta(ge=1)] = 1
    parents: tuple[Id, ...] = ()
    tenant: Name = "default"
    model: Name
    instance_id: str = ""
    kind: OutcomeKind
    reason: str = ""
    attempt: Count = 0
    arrival_s: Finite
    slo_s: Finite
    think_s: Finite = 0.0
    times: CallTimes = CallTimes()
    usage: Usage = Usage()
    prefix: tuple[PrefixPart, ...] = ()
    t_slo_s: Finite = 0.0
    t_comp_s: Finite = 0.0
    predicted_output_tokens: Finite = 0.0
    expected_cached_tokens: Tokens = 0
    alpha: Finite | None = None
    prompt_bytes: Count = 0
    terms: ScoreTerms | None = None


InstancePhase = Literal["begin", "serving", "draining", "gone"]


class InstanceState(Message, frozen=True, kw_only=True, tag="instance_state"):
    """What an instance is doing, on `instance-states` (compacted, key: instance_id).

    An epoch is one life of a worker. A worker first publishes `phase="begin"` with `epoch` -1;
    the offset of that record is its epoch, which is therefore unique and growing. All later
    states of that life carry it. A recovery owner that takes an instance for dead publishes
    `phase="gone"` with `epoch` -1 (the fence), whose offset is an epoch too: one without a worker.
    Readers keep the last record of the highest epoch and ignore lower ones; a worker that finds
    an epoch above its own begins anew. `shared.contracts.epochs.epoch_of` tells the epoch.

    Attributes:
        instance_id: The instance.
        phase: begin, serving, draining (takes no new calls) or gone (left cleanly, or fenced).
        epoch: The life this state belongs to; -1 in the record that begins it.
        seq: Growing number of this state within its epoch.
        nonce: Random word of this life, so that a worker recognises its own records.
        spec: Static description (resolved flags).
        at_s: When it was written, mesh clock.
        accounted_offset: Last offset of `instance.<id>` contained in the numbers below; -1: none.
            Everything below the committed position a worker starts from counts as contained.
        num_waiting: Calls in the queue.
        num_running: Calls in the engine.
        backlog_s: Sum of t_comp of all calls waiting and running, seconds.
        head_score: Queue score of the call that waits at the head; None while none waits.
        backlog_tokens: Prompt plus predicted output tokens of the calls waiting, tokens.
        kv_used_tokens: KV cache in use, tokens.
        capacity: Most calls the engine is given at a time.
        queue_bound: Most calls the queue accepts.
        foreign_s: Load from outside the mesh, seconds of work.
        failures_in_a_row: Generations failed since the last that did not.
        stalled_s: Time since a running call last had a token or an end, seconds; 0 while none runs.
        reset_prefixes: Whether the prefix cache was lost with this epoch.
    """

    instance_id: InstanceId
    phase: InstancePhase
    epoch: int = -1
    seq: Count = 0
    nonce: str = ""
    spec: InstanceSpec
    at_s: Seconds = 0.0
    accounted_offset: Annotated[int, Meta(ge=-1)] = -1
    num_waiting: Count = 0
    num_running: Count = 0
    backlog_s: Seconds = 0.0
    head_score: Finite | None = None
    backlog_tokens: Count = 0
    kv_used_tokens: Count = 0
    capacity: Annotated[int, Meta(ge=1)] = 1
    queue_bound: Annotated[int, Meta(ge=1)] = 10_000
    foreign_s: Seconds = 0.0
    failures_in_a_row: Count = 0
    stalled_s: Seconds = 0.0
    reset_prefixes: bool = False


class RecoveryProbe(Message, frozen=True, kw_only=True, tag="recovery_probe"):
    """A recovery owner's own record: silence counts only while these come back.

    Attributes:
        owner_id: Who wrote it.
        seq: Growing number.
    """

    owner_id: Name
    seq: Count


class AlphaUpdate(Message, frozen=True, kw_only=True, tag="alpha_update"):
    """A new α for one pool, on `control` (compacted, key: `alpha/<pool>`).

    Attributes:
        pool: Model name of the pool.
        alpha: Weight of the compute term, in [0, 1].
        revision: Growing number; a reader keeps the highest it has seen.
        reason: Why, in one sentence for people.
        predicted_p95_s: P95 the replay predicts under it, seconds; None when not replayed.
        predicted_low_s: Lower end of the prediction's 95% interval, seconds.
        predicted_high_s: Upper end, seconds.
        previous_alpha: The value it replaces.
        at_s: When it was decided, mesh clock.
        tuner_id: Who decided.
    """

    pool: Name
    alpha: Annotated[float, Meta(ge=0, le=1)]
    revision: Count
    reason: str = ""
    predicted_p95_s: Finite | None = None
    predicted_low_s: Finite | None = None
    predicted_high_s: Finite | None = None
    previous_alpha: Finite | None = None
    at_s: Seconds = 0.0
    tuner_id: str = ""


class WorkflowProfile(Message, frozen=True, kw_only=True, tag="workflow_profile"):
    """Learned shape of a workflow, on `control` (key: `profile/<workflow>`).

    Attributes:
        shape: What is expected of it.
        revision: Growing number.
        at_s: When it was learned, mesh clock.
        tuner_id: Who learned it.
    """

    shape: WorkflowShape
    revision: Count
    at_s: Seconds = 0.0
    tuner_id: str = ""


class SpeedUpdate(Message, frozen=True, kw_only=True, tag="speed_update"):
    """Learned speed of one instance, on `control` (key: `speed/<instance>`).

    Attributes:
        instance_id: The instance.
        factor: Observed service time divided by the profiled model's, > 0.
        hit_factor: Prompt tokens found in its prefix cache divided by those expected there; what
            is expected later is multiplied by it.
        revision: Growing number.
        at_s: When it was learned, mesh clock.
    """

    instance_id: InstanceId
    factor: Annotated[float, Meta(gt=0, le=1e9)]
    hit_factor: Annotated[float, Meta(ge=0, le=1)] = 1.0
    revision: Count
    at_s: Seconds = 0.0


class CancelQuery(Message, frozen=True, kw_only=True, tag="cancel_query"):
    """A tombstone on `cancellations` (key: query_id): every call of the query is cancelled.

    Attributes:
        query_id: The query; or a call's request_id, which cancels that call alone.
        until_s: How long the tombstone matters (deadline plus grace), mesh clock.
        reason: Who or what cancelled, for people.
    """

    query_id: Id
    until_s: Seconds
    reason: str = ""


class DeadLetter(Message, frozen=True, kw_only=True, tag="dead_letter"):
    """A message nobody could handle, with the original bytes, on `dead-letters`.

    Attributes:
        value: Original value.
        key: Original key.
        headers: Original headers.
        topic: Topic it was on (without prefix).
        partition: Partition it was on.
        offset: Its offset.
        error: Constant reason.
        detail: What was wrong, for people.
        attempt: Attempt, when readable.
        service: Who gave up on it.
        at_s: When, mesh clock.
    """

    value: bytes
    key: bytes | None = None
    headers: tuple[tuple[str, bytes], ...] = ()
    topic: str
    partition: Count
    offset: Count
    error: str
    detail: str
    attempt: Count = 0
    service: str
    at_s: Seconds = 0.0


class QueryReplyTo(msgspec.Struct, frozen=True, kw_only=True):
    """Where a question's result goes.

    Attributes:
        topic: Always `query-results`.
        partition: Partition of it.
    """

    topic: Literal["query-results"] = "query-results"
    partition: Annotated[int, Meta(ge=0, le=100_000)] = 0


class QueryRequest(Message, frozen=True, kw_only=True, tag="query_request"):
    """A question for an agent, on `queries` (key: query_id).

    It arrives when the broker takes it. The agent that owns its partition drives the workflow's
    calls through the mesh and ends it with exactly one `query_result`.

    Attributes:
        query_id: Unique per question, and the same when the question is sent again: a question
            sent twice is answered once, as far as agents remember.
        workflow: Name of a workflow that the agents know.
        question: What is asked.
        database: Name of a database that the agents know; empty: their only one.
        hint: Further knowledge that belongs to the question; empty: none.
        inputs: Further named inputs of other workflows.
        tenant: Who asks.
        model: Model that answers; empty: the agents' default.
        slo_s: Deadline relative to arrival, seconds; None: the workflow's default.
        max_rows: Most rows wanted; 0: the agents' default.
        events: Whether progress is wanted while it runs (`query_event`s in the state store).
        reply_to: Where the result goes.
    """

    query_id: Id
    workflow: Name = "text2sql"
    question: Annotated[str, Meta(min_length=1, max_length=100_000)]
    database: Annotated[str, Meta(max_length=128)] = ""
    hint: Annotated[str, Meta(max_length=100_000)] = ""
    inputs: dict[str, Any] = {}
    tenant: Name = "default"
    model: Annotated[str, Meta(max_length=128)] = ""
    slo_s: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    max_rows: Count = 0
    events: bool = False
    reply_to: QueryReplyTo = QueryReplyTo()


class SqlAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """One statement that an agent considered.

    Attributes:
        candidate: Index of the candidate it belongs to.
        round: 0 for the first version, then the round of correction.
        sql: The statement; empty where none could be read from the model's answer.
        verdict: `ok`, `empty`, `error`, `refused` (not safe), `timeout` or `unreadable`.
        detail: What was wrong, for people.
        num_rows: Rows it returned.
        database_s: Time it took in the database, seconds.
    """

    candidate: Count = 0
    round: Count = 0
    sql: str = ""
    verdict: str
    detail: str = ""
    num_rows: Count = 0
    database_s: Seconds = 0.0


class QueryCall(msgspec.Struct, frozen=True, kw_only=True):
    """One LLM call of a query: what became of it, without text.

    Attributes:
        request_id: The call.
        stage: Stage name.
        iteration: Occurrence of the stage.
        sibling: Index among parallel calls.
        siblings: Number of parallel calls.
        parents: Request ids waited for.
        kind: How it ended.
        reason: Constant word for anything but completed.
        instance_id: Where it ran.
        think_s: Time the agent spent before it, seconds.
        usage: Token counts.
        times: What happened when.
        prefix: Prefix chain it was sent with.
    """

    request_id: Id
    stage: Name
    iteration: Count = 0
    sibling: Count = 0
    siblings: Annotated[int, Meta(ge=1)] = 1
    parents: tuple[Id, ...] = ()
    kind: OutcomeKind
    reason: str = ""
    instance_id: str = ""
    think_s: Seconds = 0.0
    usage: Usage = Usage()
    times: CallTimes = CallTimes()
    prefix: tuple[PrefixPart, ...] = ()


class QueryResult(Message, frozen=True, kw_only=True, tag="query_result"):
    """The end of a question, on its reply partition of `query-results`.

    At-least-once: a question's result is the record with the lowest offset in the reply partition
    that carries its query_id; readers drop later ones.

    Attributes:
        query_id: The question.
        workflow: Its workflow.
        kind: completed; unanswered (the model gave nothing usable, see `attempts`); failed,
            rejected, evicted or cancelled as for calls.
        reason: Constant word for anything but completed.
        detail: One sentence for people.
        answer: Text of the answer, where the workflow gives one.
        sql: The statement that was chosen.
        columns: Names of the result's columns.
        rows: Its rows; numbers, text, booleans and null.
        is_truncated: Whether there were more rows, or more bytes, than allowed.
        attempts: Every statement considered, in order.
        outputs: Named outputs of other workflows.
        calls: Every LLM call, in order of their stages.
        tenant: Who asked.
        model: Model that was asked.
        database: Where it was answered.
        arrival_s: When the question arrived, mesh clock.
        started_at_s: When an agent began with it, mesh clock.
        finished_at_s: When it ended, mesh clock.
        slo_s: Its deadline relative to arrival, seconds; 0 when it was never read.
        database_s: Time spent in the database, seconds.
        agent_id: Who drove it.
    """

    query_id: Id
    workflow: Name = "text2sql"
    kind: QueryKind
    reason: str = ""
    detail: str = ""
    answer: str = ""
    sql: str = ""
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[Any, ...], ...] = ()
    is_truncated: bool = False
    attempts: tuple[SqlAttempt, ...] = ()
    outputs: dict[str, Any] = {}
    calls: tuple[QueryCall, ...] = ()
    tenant: Name = "default"
    model: str = ""
    database: str = ""
    arrival_s: Finite = 0.0
    started_at_s: Finite = 0.0
    finished_at_s: Finite = 0.0
    slo_s: Seconds = 0.0
    database_s: Seconds = 0.0
    agent_id: str = ""


ControlMessage = AlphaUpdate | WorkflowProfile | SpeedUpdate
ALL_MESSAGES: tuple[type[Message], ...] = (
    StageRequest,
    BoundCall,
    CallOutcome,
    LatencyEvent,
    InstanceState,
    RecoveryProbe,
    AlphaUpdate,
    WorkflowProfile,
    SpeedUpdate,
    CancelQuery,
    DeadLetter,
    QueryRequest,
    QueryResult,
)
