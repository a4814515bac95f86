"""Handing calls on: to an instance's topic, or to their end by an outcome of our own.

A call's places on `stage-requests` are finished only when the record that hands it on is
acknowledged. While the dispatcher stops, or when the chosen instance has died meanwhile, a publish
that the broker does not take is given up: the call waits again, uncommitted.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress

import structlog

from services.dispatcher.answers import Answers, Verdict
from services.dispatcher.call_book import CallBook, OpenCall, Origin
from services.dispatcher.control import Cancellations
from services.dispatcher.fleet_state import FleetState
from services.dispatcher.intake import Refusal
from services.dispatcher.params import DispatcherParams
from services.dispatcher.planner import Binding, Decisions
from shared.contracts.messages import BoundCall, ScoreTerms
from shared.contracts.topics import INSTANCE_PREFIX
from shared.errors import BrokerUnavailable, TooLarge, UnknownTopic
from shared.ports import Ack, Clock, Record
from shared.runtime.metrics import Metrics
from shared.runtime.publishing import Publisher
from shared.runtime.tracing import Value, traceparent_of

MAX_ON_WIRE = 1e15
log = structlog.get_logger(__name__)


class Handoff:
    """Publishes what was decided, each call in a task of its own.

    Args:
        publisher: How to publish.
        answers: Publishes outcomes.
        book: The open calls.
        fleet: Told when an instance turns out to have no topic.
        cancellations: Asked about calls that wait again.
        clock: Time of the decision.
        params: Who decides.
        metrics: Counts.
        wake: Called when a call waits again.
    """

    def __init__(
        self,
        *,
        publisher: Publisher,
        answers: Answers,
        book: CallBook,
        fleet: FleetState,
        cancellations: Cancellations,
        clock: Clock,
        params: DispatcherParams,
        metrics: Metrics,
        wake: Callable[[], None],
    ) -> None:
        self._publisher = publisher
        self._answers = answers
        self._book = book
        self._fleet = fleet
        self._cancellations = cancellations
        self._clock = clock
        self._params = params
        self._metrics = metrics
        self._wake = wake
        self._num_refusing = 0
        self._settled = asyncio.Event()
        self.is_stopping = False

    @property
    def num_in_flight(self) -> int:
        """Records being published for calls that are not handed on yet."""
        return self._book.num_publishing + self._num_refusing

    async def settled(self, timeout_s: float) -> None:
        """Return when a record was acknowledged or given up, or after a time-out."""
        self._settled.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._settled.wait()

    def start(self, decisions: Decisions, group: asyncio.TaskGroup) -> None:
        """Publish decisions; the order of calls to one instance is kept."""
        for binding in decisions.bindings:
            self._run(self._bind(binding), "bind", group)
        for call, verdict in decisions.verdicts:
            self._run(self._end(call, verdict), "end", group)

    def start_refusal(
        self,
        record: Record,
        refusal: Refusal,
        origin: Origin,
        group: asyncio.TaskGroup,
        reconsider: Callable[[], Awaitable[bool]],
    ) -> None:
        """Bury or answer a record that is no valid call, unless `reconsider` accepts it."""
        self._num_refusing += 1
        self._run(self._refuse(record, refusal, origin, reconsider), "refuse", group)

    def _run(
        self, publishing: Coroutine[None, None, None], name: str, group: asyncio.TaskGroup
    ) -> None:
        task = group.create_task(publishing, name=name)
        task.add_done_callback(lambda _: self._settled.set())

    async def _refuse(
        self,
        record: Record,
        refusal: Refusal,
        origin: Origin,
        reconsider: Callable[[], Awaitable[bool]],
    ) -> None:
        try:
            if refusal.retry_topics and await reconsider():
                return
            await self._answers.refuse(record, refusal, traceparent_of(record))
            origin.finish()
        except BrokerUnavailable:
            log.info("refusal_left", offset=origin.offset)  # stopping: it is read again
        finally:
            self._num_refusing -= 1

    async def _bind(self, binding: Binding) -> None:
        call, instance_id = binding.call, binding.assignment.choice.instance_id
        bound = self._bound_call(binding)
        traces = self._publisher.traces
        span = traces.start(
            "dispatch",
            "producer",
            call.traceparent,
            at_unix_s=time.time() - (self._clock.monotonic_s() - call.since_s),
            attributes=_attributes(bound, instance_id) if traces.is_on else None,
        )
        try:
            ack = await self._publisher.until_taken(
                INSTANCE_PREFIX + instance_id,
                bound,
                key=call.request.request_id,
                traceparent=span.traceparent,
                give_up=lambda: self.is_stopping or not self._is_live(instance_id),
            )
        except UnknownTopic:
            log.warning("instance_topic_missing", instance_id=instance_id)
            self._fleet.mark_unreachable(instance_id)
            span.end(error="unknown_topic")
            self._wait_again(binding)
        except BrokerUnavailable as exc:
            span.end(error=exc.reason)
            self._wait_again(binding)
        except TooLarge as exc:
            span.end(error=exc.reason)
            binding.own.release(call.key)
            verdict = Verdict(kind="rejected", reason=exc.reason, detail=str(exc))
            await self._end(call, verdict)
        else:
            span.end()
            self._handed_on(binding, bound, ack)

    def _handed_on(self, binding: Binding, bound: BoundCall, ack: Ack) -> None:
        call, instance_id = binding.call, binding.assignment.choice.instance_id
        binding.own.acknowledge(call.key, ack.offset)
        self._book.end(call)
        self._metrics.dispatched.add(target=instance_id)
        log.debug(
            "call_dispatched",
            query_id=call.request.effective_query_id,
            request_id=call.request.request_id,
            attempt=call.request.attempt,
            instance_id=instance_id,
            offset=ack.offset,
            policy=bound.terms.policy,
            score=bound.terms.score,
            t_queue_s=bound.terms.t_queue_s,
            t_comp_s=bound.terms.t_comp_s,
            alpha=bound.terms.alpha,
            beta_s2=bound.terms.beta_s2,
            t_slo_s=call.request.t_slo_s,
        )

    def _wait_again(self, binding: Binding) -> None:
        request = binding.call.request
        binding.own.release(binding.call.key)
        if self._book.put_back(binding.call):
            self._cancellations.check(
                self._clock.now_s(), request.effective_query_id, request.request_id
            )
        self._wake()

    async def _end(self, call: OpenCall, verdict: Verdict) -> None:
        try:
            await self._answers.end_call(call, verdict)
        except BrokerUnavailable:
            self._book.put_back(call)  # stopping: it stays uncommitted and is read again
        else:
            self._book.end(call)
            log.info(
                "call_ended",
                query_id=call.request.effective_query_id,
                request_id=call.request.request_id,
                kind=verdict.kind,
                reason=verdict.reason,
            )

    def _is_live(self, instance_id: str) -> bool:
        return self._fleet.is_live(instance_id, self._clock.monotonic_s())

    def _bound_call(self, binding: Binding) -> BoundCall:
        assignment, waiting = binding.assignment, binding.prepared.call
        beta_s2 = assignment.choice.beta_s2
        return BoundCall(
            request=binding.prepared.request,
            queue_score=_bounded(assignment.queue_score),
            t_comp_s=_bounded(assignment.cost.t_comp_s),
            deadline_s=waiting.deadline_s,
            remaining_s=_bounded(waiting.remaining_s) if self._params.admission else None,
            is_hopeless=assignment.is_hopeless,
            predicted_input_tokens=waiting.input_tokens,
            predicted_output_tokens=waiting.output_tokens,
            expected_cached_tokens=assignment.cost.cached_tokens,
            terms=ScoreTerms(
                policy=binding.policy,
                score=_bounded(assignment.choice.score),
                t_queue_s=_bounded(assignment.choice.t_queue_s),
                t_comp_s=_bounded(assignment.cost.t_comp_s),
                alpha=assignment.choice.alpha,
                beta_s2=None if beta_s2 is None else _bounded(beta_s2),
                others={
                    instance_id: (_bounded(backlog_s), _bounded(t_comp_s))
                    for instance_id, (backlog_s, t_comp_s) in assignment.others.items()
                },
            ),
            dispatched_at_s=max(0.0, self._clock.now_s()),
            dispatcher_id=self._params.dispatcher_id,
        )


def _bounded(value: float) -> float:
    """Return a value as the wire takes it: one absurd instance must not spoil every call."""
    return max(-MAX_ON_WIRE, min(MAX_ON_WIRE, value))


def _attributes(bound: BoundCall, instance_id: str) -> dict[str, Value | None]:
    request, terms = bound.request, bound.terms
    return {
        "messaging.system": "kafka",
        "messaging.operation.name": "send",
        "messaging.destination.name": INSTANCE_PREFIX + instance_id,
        "hexflow.query_id": request.effective_query_id,
        "hexflow.request_id": request.request_id,
        "hexflow.workflow": request.workflow,
        "hexflow.stage": request.stage,
        "hexflow.attempt": request.attempt,
        "hexflow.instance_id": instance_id,
        "hexflow.policy": terms.policy,
        "hexflow.score": terms.score,
        "hexflow.t_queue_s": terms.t_queue_s,
        "hexflow.t_comp_s": terms.t_comp_s,
        "hexflow.t_slo_s": request.t_slo_s,
        "hexflow.alpha": terms.alpha,
    }
