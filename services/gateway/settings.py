"""The gateway's own settings (prefix `GATEWAY_`); mesh-wide ones: `shared.runtime.settings`."""

import socket
from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from shared.contracts.topics import MAX_MESSAGE_BYTES
from shared.runtime.settings import Port


class GatewaySettings(BaseSettings):
    """Where the gateway listens, whom it lets in, and how long it waits."""

    model_config = SettingsConfigDict(
        env_prefix="GATEWAY_",
        env_nested_delimiter="__",
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
    )

    gateway_id: str = Field(default_factory=socket.gethostname, min_length=1, max_length=128)
    """Names this replica; the host name unless set."""
    host: str = "127.0.0.1"
    """Address to listen on; `0.0.0.0` for all."""
    port: Port = 8080
    """Port to listen on."""
    reply_partition: int | None = Field(default=None, ge=0, le=100_000)
    """Partition of the results that this replica reads, best one of its own; unset: the number
    at the end of the host name, else one that follows from the name."""
    keys_file: Path | None = None
    """File with tenants and hashed API keys; unset: anybody may call."""
    keys_check_s: float = Field(default=2.0, gt=0, le=3_600)
    """Time between looks at the keys file, wall seconds."""
    allow_anonymous: bool = False
    """Whether to listen beyond this machine without a keys file."""
    max_body_bytes: int = Field(default=MAX_MESSAGE_BYTES, ge=1_024, le=512 * 1024 * 1024)
    """Largest request body, bytes."""
    body_timeout_s: float = Field(default=30.0, gt=0, le=3_600)
    """Longest time for a request's body to arrive, wall seconds."""
    header_timeout_s: float = Field(default=10.0, gt=0, le=3_600)
    """Longest time for a request's head to arrive, wall seconds."""
    max_open: int = Field(default=2_000, ge=1, le=1_000_000)
    """Most calls open at the same time; further ones wait, fairly by tenant."""
    max_waiting: int = Field(default=200, ge=0, le=1_000_000)
    """Most calls of one tenant that wait for a place; further ones get 429."""
    retry_after_s: float = Field(default=2.0, gt=0, le=3_600)
    """What a client that finds no place is told to wait, wall seconds."""
    submit_timeout_s: float = Field(default=10.0, gt=0, le=300)
    """Longest wait for the broker to take a call, wall seconds."""
    late_s: float = Field(default=30.0, ge=0, le=1e9)
    """How long after a call's deadline its answer is still waited for, mesh seconds."""
    longest_wait_s: float = Field(default=600.0, gt=0, le=86_400)
    """Longest wait for a call whose deadline is not known, wall seconds."""
    linger_s: float = Field(default=1.0, ge=0, le=300)
    """How long after the stop signal it still takes requests, wall seconds: `/ready` fails and
    answers end their connections meanwhile. At most half of its drain."""
    max_event_clients: int = Field(default=5_000, ge=1, le=100_000)
    """Most open event streams of the dashboard."""
    event_period_s: float = Field(default=1.0, ge=0.05, le=60)
    """Time between the dashboard's events, wall seconds."""
    max_queries: int = Field(default=2_000, ge=10, le=100_000)
    """Most queries that the dashboard remembers."""
    quiet_s: float = Field(default=30.0, gt=0)
    """Silence after which the dashboard takes a query as ended, mesh seconds."""
    shows_text: bool = False
    """Whether administrators may see the text of dead letters, which may be prompts."""
    asks_unannounced: bool = False
    """Whether questions are taken for agents of your own that do not announce themselves; else a
    question that no announced agent could answer is refused at once."""
    target_s: float | None = Field(default=None, gt=0)
    """P95 that the dashboard compares with, mesh seconds; unset: none."""
