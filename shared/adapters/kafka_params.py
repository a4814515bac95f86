"""What the Kafka adapter has to be told."""

import re
import ssl
from dataclasses import dataclass, field
from typing import Any, Literal

from aiokafka.helpers import create_ssl_context

from shared.contracts.topics import MAX_MESSAGE_BYTES
from shared.errors import ConfigError

SecurityProtocol = Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]
SaslMechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]
Compression = Literal["lz4", "zstd", "snappy", "gzip"]
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^\s:/,\[\]]+)(:\d{1,5})?")


@dataclass(frozen=True, kw_only=True)
class KafkaParams:
    """How to reach and use an Apache Kafka cluster.

    Attributes:
        bootstrap_servers: `host:port`, several separated by commas.
        client_id: Name under which the broker's logs and quotas know this client.
        max_message_bytes: Largest record, bytes; a topic may allow less.
        replication_factor: Replicas of topics created here; 0 means three, or as many as there
            are brokers. From three on, two must be in sync to take a record.
        security_protocol: How connections are secured.
        sasl_mechanism: How a SASL client proves who it is.
        sasl_username: SASL user.
        sasl_password: SASL password; never part of a repr, a message or a log.
        ssl_cafile: File with the authorities to trust, else the system's.
        ssl_certfile: File with this client's certificate.
        ssl_keyfile: File with its key.
        connect_timeout_s: Longest wait for a first answer of the cluster, wall seconds.
        request_timeout_s: Longest wait for the answer to one request, wall seconds.
        publish_timeout_s: Longest a publish takes, with all its retries, wall seconds.
        session_timeout_s: Silence after which the broker takes a group member for dead, wall
            seconds; brokers allow 6 to 1,800 unless configured otherwise.
        rebalance_timeout_s: Longest that a rebalance, with `on_revoked`, takes, wall seconds.
        fetch_wait_s: Longest the broker holds a fetch that finds nothing, wall seconds.
        stall_s: Silence after which a reader checks whether it misses records, wall seconds.
        linger_ms: How long the producer waits for more records to batch, milliseconds.
        compression: Compression of record batches, or None.
    """

    bootstrap_servers: str = "127.0.0.1:9092"
    client_id: str = "hexflow"
    max_message_bytes: int = MAX_MESSAGE_BYTES
    replication_factor: int = 0
    security_protocol: SecurityProtocol = "PLAINTEXT"
    sasl_mechanism: SaslMechanism = "PLAIN"
    sasl_username: str | None = None
    sasl_password: str | None = field(default=None, repr=False)
    ssl_cafile: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    connect_timeout_s: float = 10.0
    request_timeout_s: float = 10.0
    publish_timeout_s: float = 30.0
    session_timeout_s: float = 6.0
    rebalance_timeout_s: float = 10.0
    fetch_wait_s: float = 0.2
    stall_s: float = 3.0
    linger_ms: int = 0
    compression: Compression | None = "lz4"

    def __post_init__(self) -> None:
        """Check what only makes sense together.

        Raises:
            ConfigError: SASL without credentials, or an address that is none.
        """
        for address in self.bootstrap_servers.split(","):
            if not _ADDRESS.fullmatch(address.strip()):
                raise ConfigError(f"{address!r} is no Kafka address; write host:port")
        if self.security_protocol.startswith("SASL") and not (
            self.sasl_username and self.sasl_password
        ):
            raise ConfigError(f"{self.security_protocol} needs sasl_username and sasl_password")

    def connection(self) -> dict[str, Any]:
        """Return the arguments that every client of aiokafka takes.

        Raises:
            ConfigError: A certificate file cannot be read.
        """
        arguments: dict[str, Any] = {
            "bootstrap_servers": self.bootstrap_servers,
            "client_id": self.client_id,
            "request_timeout_ms": _milliseconds(self.request_timeout_s),
            "metadata_max_age_ms": 60_000,
            "security_protocol": self.security_protocol,
        }
        if self.security_protocol.startswith("SASL"):
            arguments["sasl_mechanism"] = self.sasl_mechanism
            arguments["sasl_plain_username"] = self.sasl_username
            arguments["sasl_plain_password"] = self.sasl_password
        if self.security_protocol.endswith("SSL"):
            arguments["ssl_context"] = self._ssl_context()
        return arguments

    def producer(self) -> dict[str, Any]:
        """Return the arguments of a producer."""
        return {
            **self.connection(),
            "acks": "all",
            "enable_idempotence": True,
            "linger_ms": self.linger_ms,
            "compression_type": self.compression,
            "max_request_size": self.max_message_bytes,
            "max_batch_size": MAX_BATCH_BYTES,
        }

    def consumer(self) -> dict[str, Any]:
        """Return the arguments of a consumer."""
        # The broker answers a join only when the rebalance is over.
        longest_request_s = max(self.request_timeout_s, self.rebalance_timeout_s + 5)
        return {
            **self.connection(),
            "request_timeout_ms": _milliseconds(longest_request_s),
            "auto_offset_reset": "earliest",
            "enable_auto_commit": False,
            "fetch_max_wait_ms": _milliseconds(self.fetch_wait_s),
            "max_partition_fetch_bytes": self.max_message_bytes,
            "session_timeout_ms": _milliseconds(self.session_timeout_s),
            # Members learn of a rebalance from the answer to a heartbeat.
            "heartbeat_interval_ms": _milliseconds(min(self.session_timeout_s / 4, HEARTBEAT_S)),
            "rebalance_timeout_ms": _milliseconds(self.rebalance_timeout_s),
            # Whether a reader makes progress is judged by its service's health probe.
            "max_poll_interval_ms": 24 * 3_600_000,
        }

    def _ssl_context(self) -> ssl.SSLContext:
        try:
            return create_ssl_context(
                cafile=self.ssl_cafile, certfile=self.ssl_certfile, keyfile=self.ssl_keyfile
            )
        except (OSError, ssl.SSLError) as exc:
            files = f"{self.ssl_cafile}, {self.ssl_certfile}, {self.ssl_keyfile}"
            raise ConfigError(f"cannot use the certificate files {files}: {exc}") from exc


MAX_BATCH_BYTES = 64 * 1024
HEARTBEAT_S = 0.25


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)
