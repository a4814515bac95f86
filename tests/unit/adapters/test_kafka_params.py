"""The Kafka adapter's parameters, and the translation of errors."""

import pytest
from aiokafka import errors as kafka

from shared.adapters.kafka_errors import translate, translated
from shared.adapters.kafka_params import KafkaParams
from shared.errors import (
    AccessRefused,
    BrokerUnavailable,
    ConfigError,
    MeshError,
    StaleAssignment,
    TooLarge,
    UnknownTopic,
)

SECRET = "s3cret"  # noqa: S105 - nobody's


def test_password_is_not_shown() -> None:
    """The password is no part of the parameters' repr."""
    params = KafkaParams(
        security_protocol="SASL_PLAINTEXT", sasl_username="mesh", sasl_password=SECRET
    )
    assert "mesh" in repr(params)
    assert SECRET not in repr(params)
    assert params.connection()["sasl_plain_password"] == SECRET


@pytest.mark.parametrize(("user", "password"), [(None, "x"), ("x", None), ("", "")])
def test_sasl_needs_credentials(user: str | None, password: str | None) -> None:
    """SASL without user or password is a ConfigError."""
    with pytest.raises(ConfigError, match="sasl_password"):
        KafkaParams(security_protocol="SASL_SSL", sasl_username=user, sasl_password=password)


@pytest.mark.parametrize("servers", ["", "a:b:c", "kafka:port", "a:9092,", "kafka://a:9092", "a b"])
def test_an_address_that_is_none_is_refused(servers: str) -> None:
    """What aiokafka would fail on in its own words is told as a setting to put right."""
    with pytest.raises(ConfigError, match="host:port"):
        KafkaParams(bootstrap_servers=servers)


@pytest.mark.parametrize("servers", ["kafka", "10.0.0.1:9092, b-1.example:9093", "[::1]:9092"])
def test_names_and_numbers_are_addresses(servers: str) -> None:
    """Host names, IPv4 and bracketed IPv6, with or without a port, one or several."""
    assert KafkaParams(bootstrap_servers=servers).bootstrap_servers == servers


def test_plaintext_sends_no_credentials() -> None:
    """Without SASL or TLS neither credentials nor certificates reach the client library."""
    arguments = KafkaParams(sasl_username="a", sasl_password=SECRET).connection()
    assert not [name for name in arguments if name.startswith(("sasl", "ssl"))]


def test_durability_is_not_negotiable() -> None:
    """Producers wait for all replicas and are idempotent; consumers never commit by themselves."""
    producer = KafkaParams().producer()
    assert (producer["acks"], producer["enable_idempotence"]) == ("all", True)
    consumer = KafkaParams().consumer()
    assert consumer["enable_auto_commit"] is False
    assert consumer["auto_offset_reset"] == "earliest"


def test_requests_outlast_rebalances() -> None:
    """A consumer waits for the answer to a join longer than a rebalance takes."""
    consumer = KafkaParams(rebalance_timeout_s=30.0, request_timeout_s=5.0).consumer()
    assert consumer["request_timeout_ms"] > consumer["rebalance_timeout_ms"] == 30_000


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (kafka.MessageSizeTooLargeError(), TooLarge),
        (kafka.UnknownTopicOrPartitionError(), UnknownTopic),
        (kafka.CommitFailedError("moved"), StaleAssignment),
        (kafka.IllegalStateError("not assigned"), StaleAssignment),
        (kafka.SaslAuthenticationFailed("wrong"), AccessRefused),
        (kafka.TopicAuthorizationFailedError("t"), AccessRefused),
        (kafka.KafkaConnectionError("refused"), BrokerUnavailable),
        (kafka.OutOfOrderSequenceNumber(), BrokerUnavailable),
        (kafka.KafkaError("anything else"), BrokerUnavailable),
    ],
)
def test_errors_are_translated(error: Exception, expected: type[MeshError]) -> None:
    """Every error of the client library becomes one of the mesh's that names the place."""
    found = translate(error, "reading", "kafka:9092")
    assert type(found) is expected
    assert "reading" in str(found)
    assert "kafka:9092" in str(found)


def test_translation_keeps_the_cause() -> None:
    """Time-outs and errors raised within a block are translated and chained; others pass."""
    cause = kafka.KafkaConnectionError("refused")
    with pytest.raises(BrokerUnavailable) as raised, translated("asking", "kafka:9092"):
        raise cause
    assert raised.value.__cause__ is cause
    with pytest.raises(BrokerUnavailable, match="no answer"), translated("asking", "kafka:9092"):
        raise TimeoutError
    with pytest.raises(ZeroDivisionError), translated("asking", "kafka:9092"):
        raise ZeroDivisionError
