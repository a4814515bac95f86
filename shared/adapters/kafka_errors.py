"""Translation of aiokafka's errors into the mesh's, at the one boundary.

aiokafka marks errors as retriable; what is not in the table below is treated as unavailability of
the broker, since trying again later is always safe.
"""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from aiokafka import errors as kafka

from shared.errors import (
    BrokerUnavailable,
    ConfigError,
    MeshError,
    StaleAssignment,
    TooLarge,
    UnknownTopic,
)

TABLE: tuple[tuple[type[MeshError], tuple[type[Exception], ...]], ...] = (
    (TooLarge, (kafka.MessageSizeTooLargeError, kafka.RecordListTooLargeError)),
    (UnknownTopic, (kafka.UnknownTopicOrPartitionError, kafka.InvalidTopicError)),
    (
        StaleAssignment,
        (
            kafka.CommitFailedError,
            kafka.IllegalStateError,
            kafka.IllegalGenerationError,
            kafka.UnknownMemberIdError,
            kafka.RebalanceInProgressError,
        ),
    ),
    (
        ConfigError,
        (
            kafka.AuthenticationFailedError,
            kafka.AuthenticationMethodNotSupported,
            kafka.SaslAuthenticationFailed,
            kafka.UnsupportedSaslMechanismError,
            kafka.IllegalSaslStateError,
            kafka.TopicAuthorizationFailedError,
            kafka.GroupAuthorizationFailedError,
            kafka.ClusterAuthorizationFailedError,
            kafka.PolicyViolationError,
            kafka.InvalidConfigurationError,
            kafka.InvalidPartitionsError,
            kafka.InvalidReplicationFactorError,
            kafka.InvalidSessionTimeoutError,
            ssl.SSLError,
        ),
    ),
)


def translate(error: Exception, what: str, address: str) -> MeshError:
    """Return the mesh's error for one of aiokafka's.

    Args:
        error: What aiokafka raised.
        what: What was being done, for the message.
        address: The bootstrap servers, for the message.
    """
    detail = str(error) or type(error).__name__
    for mesh_error, kafka_errors in TABLE:
        if isinstance(error, kafka_errors):
            return mesh_error(f"{what} at {address}: {detail}")
    return BrokerUnavailable(
        f"{what}: the Kafka broker at {address} does not answer as it should ({detail}); check "
        "that it runs, that this is the listener of the security protocol set here, and that its "
        "advertised address can be reached from here"
    )


@contextmanager
def translated(what: str, address: str) -> Iterator[None]:
    """Translate whatever aiokafka raises, and time-outs, within the block."""
    try:
        yield
    except TimeoutError as exc:
        raise BrokerUnavailable(f"{what}: no answer from the Kafka broker at {address}") from exc
    except (kafka.KafkaError, kafka.IllegalOperation, kafka.ConsumerStoppedError) as exc:
        raise translate(exc, what, address) from exc
