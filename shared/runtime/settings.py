"""Settings shared by all services, read from the environment.

Mesh-wide variables start with `HEXFLOW_`, a service's own with its name (`DISPATCHER_`, ...);
groups are separated by `__`, e.g. `HEXFLOW_KAFKA__BOOTSTRAP_SERVERS`. A variable that starts with
one of these prefixes but names no setting is refused with the nearest valid name: a misspelt
variable must not be silently ignored.
"""

import difflib
import os
from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from shared.contracts.topics import DAY_S, MAX_MESSAGE_BYTES, Topics
from shared.errors import ConfigError

MESH_PREFIX = "HEXFLOW_"
NOT_SETTINGS = frozenset(  # read by tools around the mesh, not by services
    {
        "HEXFLOW_CACHE_DIR",
        "HEXFLOW_KAFKA_HOME",
        "HEXFLOW_REQUIRE_SERVERS",
        "HEXFLOW_TEST_KAFKA",
        "HEXFLOW_TEST_REDIS",
    }
)
Port = Annotated[int, Field(ge=1, le=65_535)]


class Group(BaseModel):
    """Base of nested groups: immutable, no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class KafkaSettings(Group):
    """How to reach Kafka."""

    bootstrap_servers: str = "127.0.0.1:9092"
    client_id: str = ""
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "PLAIN"
    sasl_username: str = ""
    sasl_password: SecretStr = SecretStr("")
    ssl_cafile: str = ""
    ssl_certfile: str = ""
    ssl_keyfile: str = ""
    replication_factor: int = Field(default=0, ge=0, le=100)
    connect_timeout_s: float = Field(default=10.0, gt=0, le=300)
    request_timeout_s: float = Field(default=10.0, gt=0, le=300)


class RedisSettings(Group):
    """How to reach Redis."""

    url: str = "redis://127.0.0.1:6379/0"
    username: str = ""
    password: SecretStr = SecretStr("")
    ssl_cafile: str = ""
    ssl_certfile: str = ""
    ssl_keyfile: str = ""
    key_prefix: str = "hexflow:"
    max_connections: int = Field(default=16, ge=1, le=1_000)
    timeout_s: float = Field(default=2.0, gt=0, le=60)


class TopicSettings(Group):
    """Names and sizes of the topics; must be equal in every service."""

    prefix: str = Field(default="hexflow.", pattern=r"^[A-Za-z0-9._-]*$", max_length=100)
    request_partitions: int = Field(default=12, ge=1, le=10_000)
    result_partitions: int = Field(default=12, ge=1, le=10_000)
    state_partitions: int = Field(default=4, ge=1, le=1_000)
    retention_s: int = Field(default=DAY_S, ge=60)
    max_message_bytes: int = Field(default=MAX_MESSAGE_BYTES, ge=1_024, le=512 * 1024 * 1024)

    def topics(self) -> Topics:
        """Return the topics these settings describe."""
        return Topics(**self.model_dump())


class LogSettings(Group):
    """How logs are written."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    format: Literal["json", "console"] = "json"


class ProbeSettings(Group):
    """Where `/live`, `/ready` and `/metrics` are served."""

    host: str = "127.0.0.1"
    port: Port | None = None


class MeshSettings(BaseSettings):
    """What all services of one mesh agree on (prefix `HEXFLOW_`)."""

    model_config = SettingsConfigDict(
        env_prefix=MESH_PREFIX, env_nested_delimiter="__", frozen=True, extra="forbid"
    )

    kafka: KafkaSettings = KafkaSettings()
    redis: RedisSettings = RedisSettings()
    topics: TopicSettings = TopicSettings()
    log: LogSettings = LogSettings()
    probes: ProbeSettings = ProbeSettings()
    time_scale: float = Field(default=1.0, gt=0, le=1_000)
    drain_s: float = Field(default=30.0, gt=0, le=3_600)


S = TypeVar("S", bound=BaseSettings)


def variable_names(cls: type[BaseModel], prefix: str) -> set[str]:
    """Return every environment variable that a settings class reads, in upper case."""
    names: set[str] = set()
    for field, info in cls.model_fields.items():
        name = prefix + field.upper()
        names.add(name)
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            names |= variable_names(kind, name + "__")
    return names


def load(cls: type[S], environ: Mapping[str, str] | None = None) -> S:
    """Return settings from the environment.

    Args:
        cls: A settings class with an `env_prefix`.
        environ: The environment to check names in; the process's own by default.

    Raises:
        ConfigError: A variable is misspelt or a value is out of bounds; says which and what to do.
    """
    prefix = str(cls.model_config.get("env_prefix", ""))
    known = variable_names(cls, prefix)
    for name in environ if environ is not None else os.environ:
        upper = name.upper()
        if upper.startswith(prefix) and upper not in known and name not in NOT_SETTINGS:
            near = difflib.get_close_matches(upper, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            msg = f"{name} is no setting of {cls.__name__}{hint}"
            raise ConfigError(msg)
    try:
        return cls()
    except ValidationError as exc:
        lines = [
            f"{prefix}{'__'.join(str(part).upper() for part in error['loc'])}: {error['msg']}"
            for error in exc.errors(include_input=False, include_url=False)
        ]
        raise ConfigError("; ".join(lines)) from exc
