"""Translation of aiokafka's errors into the mesh's, at the one boundary.

aiokafka marks errors as retriable; what is not in the table below is treated as unavailability of
the broker, since trying again later is always safe.
"""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from aiokafka import errors as kafka

from shared.errors import (
    AccessRefused,
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
        AccessRefused,
        (
            kafka.AuthenticationFailedError,
            kafka.SaslAuthenticationFailed,
            kafka.TopicAuthorizationFailedError,
            kafka.GroupAuthorizationFailedError,
            kafka.ClusterAuthorizationFailedError,
            ssl.SSLCertVerificationError,
        ),
    ),
    (
        ConfigError,
        (
            kafka.AuthenticationMethodNotSupported,
            kafka.UnsupportedSaslMechanismError,
            kafka.IllegalSaslStateError,
            kafka.PolicyViolationError,
            kafka.InvalidConfigurationError,
            kafka.InvalidPartitionsError,
            kafka.InvalidReplicationFactorError,
            kafka.InvalidSessionTimeoutError,
            ssl.SSLError,
        ),
    ),
)
REMEDIES: tuple[tuple[tuple[type[Exception], ...], str], ...] = (
    (
        (
            kafka.TopicAuthorizationFailedError,
            kafka.GroupAuthorizationFailedError,
            kafka.ClusterAuthorizationFailedError,
        ),
        "Kafka's ACLs do not let this user do that; docs/deploy.md (Rights) lists what is needed",
    ),
    (
        (kafka.AuthenticationFailedError, kafka.SaslAuthenticationFailed),
        "check HEXFLOW_KAFKA__SASL_USERNAME and HEXFLOW_KAFKA__SASL_PASSWORD",
    ),
    (
        (ssl.SSLCertVerificationError,),
        "check the broker's certificate, its host name and HEXFLOW_KAFKA__SSL_CAFILE",
    ),
)
OWN_CERTIFICATE = (
    "the broker does not accept this client's certificate: it is expired, missing, or of an "
    "authority that the broker does not trust; check HEXFLOW_KAFKA__SSL_CERTFILE"
)
ALERTS = ("CERTIFICATE", "UNKNOWN_CA", "DECRYPT_ERROR")
"""Words in the reasons of TLS alerts by which a broker refuses a client's certificate."""


def translate(error: Exception, what: str, address: str) -> MeshError:
    """Return the mesh's error for one of aiokafka's.

    Args:
        error: What aiokafka raised.
        what: What was being done, for the message.
        address: The bootstrap servers, for the message.
    """
    detail = str(error) or type(error).__name__
    alert = alert_behind(error)
    if alert is not None:
        return AccessRefused(f"{what} at {address}: {alert.reason}; {OWN_CERTIFICATE}")
    for mesh_error, kafka_errors in TABLE:
        if isinstance(error, kafka_errors):
            return mesh_error(f"{what} at {address}: {detail}{_remedy(error)}")
    return BrokerUnavailable(
        f"{what}: the Kafka broker at {address} does not answer as it should ({detail}); check "
        "that it runs, that this is the listener of the security protocol set here, and that its "
        "advertised address can be reached from here"
    )


def alert_behind(error: BaseException | None) -> ssl.SSLError | None:
    """Return the TLS alert by which the other side refused our certificate, if that is the cause.

    It comes after the handshake, with the first answer, and aiokafka only says that the connection
    was closed.
    """
    while error is not None:
        if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLCertVerificationError):
            reason = error.reason or ""
            if "ALERT" in reason and any(word in reason for word in ALERTS):
                return error
        error = error.__cause__
    return None


def _remedy(error: Exception) -> str:
    return next((f"; {text}" for kinds, text in REMEDIES if isinstance(error, kinds)), "")


@contextmanager
def translated(what: str, address: str) -> Iterator[None]:
    """Translate whatever aiokafka raises, and time-outs, within the block."""
    try:
        yield
    except TimeoutError as exc:
        raise BrokerUnavailable(f"{what}: no answer from the Kafka broker at {address}") from exc
    except (kafka.KafkaError, kafka.IllegalOperation, kafka.ConsumerStoppedError) as exc:
        raise translate(exc, what, address) from exc
