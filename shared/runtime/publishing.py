"""Publish typed messages: encode, add headers, learn the broker's clock, retry until taken."""

import asyncio
from collections.abc import Callable

import msgspec
import structlog

from shared.contracts.codec import encode, headers_for
from shared.contracts.messages import MAX_DETAIL, DeadLetter, Message, RecoveryProbe
from shared.contracts.topics import DEAD_LETTERS, INSTANCE_STATES, Topics
from shared.errors import BrokerUnavailable, ContractError, MeshError, TooLarge
from shared.ports import Ack, Broker, Clock, Record
from shared.runtime.metrics import Metrics
from shared.runtime.tracing import NO_TRACES, Traces, traceparent_here

CLOCK_KEY = "clock/"  # no instance is called so
MAX_NAME = 128
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0
log = structlog.get_logger(__name__)


class Publisher:
    """Publishes messages for one service.

    Args:
        broker: Where to.
        topics: Names.
        clock: Learns its offset from acknowledgements.
        traces: Where its service's spans go.
    """

    def __init__(
        self, broker: Broker, topics: Topics, clock: Clock, traces: Traces = NO_TRACES
    ) -> None:
        self._broker = broker
        self._topics = topics
        self._clock = clock
        self.traces = traces

    async def once(
        self,
        topic: str,
        message: Message | None,
        *,
        key: str | None = None,
        partition: int | None = None,
        traceparent: str | None = None,
    ) -> Ack:
        """Publish a message, or a tombstone for `key`; one try.

        Args:
            topic: Topic name without prefix.
            message: The message; None writes a tombstone.
            key: Record key.
            partition: Partition; None lets the key choose.
            traceparent: W3C trace context; None: that of the block that runs, if it is traced.

        Raises:
            TooLarge: The message is above the largest size.
            UnknownTopic: The topic does not exist.
            BrokerUnavailable: Not acknowledged.
        """
        context = traceparent or traceparent_here()
        sent_s = self._clock.monotonic_s()
        ack = await self._broker.publish(
            self._topics.name(topic),
            None if message is None else encode(message),
            key=None if key is None else key.encode(),
            partition=partition,
            headers=() if message is None else headers_for(message, context),
        )
        self._clock.observe_append(ack.append_unix_s, sent_s, self._clock.monotonic_s())
        return ack

    async def until_taken(
        self,
        topic: str,
        message: Message | None,
        *,
        key: str | None = None,
        partition: int | None = None,
        traceparent: str | None = None,
        give_up: Callable[[], bool] = lambda: False,
    ) -> Ack:
        """Publish a message and try again while the broker is unavailable.

        Args:
            topic: Topic name without prefix.
            message: The message; None writes a tombstone.
            key: Record key.
            partition: Partition; None lets the key choose.
            traceparent: W3C trace context.
            give_up: Asked between tries; when it says yes, BrokerUnavailable is raised.

        Raises:
            TooLarge: The message is above the largest size.
            UnknownTopic: The topic does not exist.
        """
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                return await self.once(
                    topic, message, key=key, partition=partition, traceparent=traceparent
                )
            except BrokerUnavailable as exc:
                if give_up():
                    raise
                log.warning("publish_retried", topic=topic, error=str(exc), backoff_s=backoff_s)
            await asyncio.sleep(backoff_s)
            backoff_s = min(MAX_BACKOFF_S, backoff_s * 2)

    async def learn_time(self, name: str, give_up: Callable[[], bool] = lambda: False) -> None:
        """Publish and withdraw a probe, so that the clock knows the broker's time.

        To be awaited before anything reads the clock: one that was read never runs back, so on a
        host an hour ahead it would be wrong for two, and late calls would seem hopeless.

        Args:
            name: Unique name of the service.
            give_up: Asked between tries while the broker is unavailable; then BrokerUnavailable.

        Raises:
            UnknownTopic: The mesh's topics do not exist.
        """
        key = f"{CLOCK_KEY}{name}"
        probe = RecoveryProbe(owner_id=name[:MAX_NAME], seq=0)
        await self.until_taken(INSTANCE_STATES, probe, key=key, give_up=give_up)
        await self.until_taken(INSTANCE_STATES, None, key=key, give_up=give_up)


class DeadLetters:
    """Puts what nobody can handle on `dead-letters`, once, counted and logged.

    Args:
        publisher: How to publish.
        topics: Names.
        clock: For the time of death.
        metrics: Counts by reason.
        service: Who gives up.
        give_up: Asked between tries while the broker is unavailable; then BrokerUnavailable.
    """

    def __init__(
        self,
        publisher: Publisher,
        topics: Topics,
        clock: Clock,
        metrics: Metrics,
        service: str,
        give_up: Callable[[], bool] = lambda: False,
    ) -> None:
        self._publisher = publisher
        self._topics = topics
        self._clock = clock
        self._metrics = metrics
        self._service = service
        self._give_up = give_up

    async def bury(self, record: Record, error: MeshError) -> None:
        """Publish the record with what was wrong with it; returns when it is acknowledged.

        A record so large that it does not fit into a dead letter is buried without its bytes.
        """
        letter = DeadLetter(
            value=record.value or b"",
            key=record.key,
            headers=record.headers,
            topic=self._topics.short(record.tp.topic),
            partition=record.tp.partition,
            offset=record.offset,
            error=error.reason,
            detail=str(error)[:MAX_DETAIL],
            service=self._service,
            at_s=max(0.0, self._clock.now_s()),
        )
        self._metrics.dead_letters.add(reason=error.reason)
        log.warning(
            "message_buried",
            topic=letter.topic,
            partition=letter.partition,
            offset=letter.offset,
            reason=letter.error,
            detail=letter.detail,
            request_id=error.request_id if isinstance(error, ContractError) else None,
        )
        try:
            await self._publisher.until_taken(DEAD_LETTERS, letter, give_up=self._give_up)
        except TooLarge:
            note = f"{letter.detail} (its {len(letter.value)} bytes are left out: too large)"
            small = msgspec.structs.replace(letter, value=b"", key=None, headers=(), detail=note)
            await self._publisher.until_taken(DEAD_LETTERS, small, give_up=self._give_up)
