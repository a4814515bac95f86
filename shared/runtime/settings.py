"""Settings shared by all services, read from the environment.

Mesh-wide variables start with `HEXFLOW_`, a service's own with its name (`DISPATCHER_`, ...);
groups are separated by `__`, e.g. `HEXFLOW_KAFKA__BOOTSTRAP_SERVERS`. A variable that starts with
one of these prefixes but names no setting is refused with the nearest valid name: a misspelt
variable must not be silently ignored.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from shared.contracts.topics import DAY_S, MAX_MESSAGE_BYTES, Topics
from shared.domain.near_names import nearest
from shared.errors import ConfigError

MESH_PREFIX = "HEXFLOW_"
MAX_ATTEMPTS = 5
NOT_SETTINGS = frozenset(  # read by tools around the mesh, not by services
    {
        "HEXFLOW_CACHE_DIR",
        "HEXFLOW_KAFKA_HOME",
        "HEXFLOW_REQUIRE_SERVERS",
        "HEXFLOW_REQUIRE_VLLM",
        "HEXFLOW_TEST_KAFKA",
        "HEXFLOW_TEST_POSTGRES",
        "HEXFLOW_TEST_REDIS",
    }
)
Port = Annotated[int, Field(ge=1, le=65_535)]


class Group(BaseModel):
    """Base of nested groups: immutable, no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class KafkaSettings(Group):
    """How to reach Kafka."""

    bootstrap_servers: str = "127.0.0.1:9092"
    """Kafka's addresses, `host:port`, several separated by commas."""
    client_id: str = ""
    """Name under which the brokers' logs and quotas know a service; empty: its own."""
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    """How connections are secured."""
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "PLAIN"
    """How a SASL client proves who it is."""
    sasl_username: str = ""
    """SASL user."""
    sasl_password: SecretStr = SecretStr("")
    """SASL password; never printed or logged."""
    ssl_cafile: str = ""
    """File with the authorities to trust; empty: the system's."""
    ssl_certfile: str = ""
    """File with this client's certificate."""
    ssl_keyfile: str = ""
    """File with the certificate's key."""
    replication_factor: int = Field(default=0, ge=0, le=100)
    """Replicas of created topics; 0: three, or as many as there are brokers."""
    connect_timeout_s: float = Field(default=10.0, gt=0, le=300)
    """Longest wait for the cluster's first answer, wall seconds."""
    request_timeout_s: float = Field(default=10.0, gt=0, le=300)
    """Longest wait for the answer to one request, wall seconds."""
    session_timeout_s: float = Field(default=6.0, ge=1, le=1_800)
    """Silence after which Kafka gives a dead dispatcher's partitions to another, wall seconds.

    Below 6 only where the brokers' `group.min.session.timeout.ms` (6,000 by default) allows it.
    """


class RedisSettings(Group):
    """How to reach Redis."""

    url: str = "redis://127.0.0.1:6379/0"
    """Redis' address, `redis://HOST:PORT/DB`; `rediss://` for TLS."""
    username: str = ""
    """ACL user; empty: the default user."""
    password: SecretStr = SecretStr("")
    """Password; never printed or logged."""
    ssl_cafile: str = ""
    """File with the authorities to trust; empty: the system's."""
    ssl_certfile: str = ""
    """File with this client's certificate."""
    ssl_keyfile: str = ""
    """File with the certificate's key."""
    key_prefix: str = "hexflow:"
    """Put before every key, and before the topics' prefix there."""
    max_connections: int = Field(default=16, ge=1, le=1_000)
    """Most connections of one service."""
    timeout_s: float = Field(default=2.0, gt=0, le=60)
    """Longest wait for a connection or an answer, wall seconds."""


class TopicSettings(Group):
    """Names and sizes of the topics; must be equal in every service."""

    prefix: str = Field(default="hexflow.", pattern=r"^[A-Za-z0-9._-]*$", max_length=100)
    """Put before every topic's name: several meshes can share a cluster."""
    request_partitions: int = Field(default=12, ge=1, le=10_000)
    """Partitions of `stage-requests` and `queries`: at least the dispatchers."""
    result_partitions: int = Field(default=12, ge=1, le=10_000)
    """Partitions of the results: at least the producers that wait for some."""
    state_partitions: int = Field(default=4, ge=1, le=1_000)
    """Partitions of `instance-states`: bounds the dispatchers that recover; never changed later."""
    retention_s: int = Field(default=DAY_S, ge=60)
    """Age after which topics with text are deleted, seconds; above SLO plus outage."""
    max_message_bytes: int = Field(default=MAX_MESSAGE_BYTES, ge=1_024, le=512 * 1024 * 1024)
    """Largest record, bytes; larger calls are rejected."""

    def topics(self) -> Topics:
        """Return the topics these settings describe."""
        return Topics(**self.model_dump())


class LogSettings(Group):
    """How logs are written."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least level that is logged."""
    format: Literal["json", "console"] = "json"
    """`json`: one object per line; `console`: for people."""


class ProbeSettings(Group):
    """Where `/live`, `/ready` and `/metrics` are served."""

    host: str = "127.0.0.1"
    """Address to serve on; `0.0.0.0` for all."""
    port: Port | None = None
    """Port to serve on; unset: no probes and no metrics."""


class TraceSettings(Group):
    """Where OpenTelemetry traces go."""

    endpoint: str = ""
    """Collector that takes OTLP over HTTP, e.g. `http://127.0.0.1:4318`; empty: no traces."""
    sample_share: float = Field(default=1.0, ge=0, le=1)
    """Share of the traces that begin at a service and are kept."""


class MeshSettings(BaseSettings):
    """What all services of one mesh agree on (prefix `HEXFLOW_`)."""

    model_config = SettingsConfigDict(
        env_prefix=MESH_PREFIX,
        env_nested_delimiter="__",
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
    )

    kafka: KafkaSettings = KafkaSettings()
    redis: RedisSettings = RedisSettings()
    topics: TopicSettings = TopicSettings()
    log: LogSettings = LogSettings()
    probes: ProbeSettings = ProbeSettings()
    traces: TraceSettings = TraceSettings()
    time_scale: float = Field(default=1.0, gt=0, le=1_000)
    """Mesh seconds per wall second; above 1 only with simulated engines."""
    clock_shift_s: float = Field(default=0.0, ge=-1e9, le=1e9)
    """Added to this host's wall clock, wall seconds; for chaos runs only."""
    max_attempts: int = Field(default=MAX_ATTEMPTS, ge=1, le=100)
    """Attempts of a call that may fail, or lose their instance, until it ends failed."""
    drain_s: float = Field(default=30.0, gt=0, le=3_600)
    """Time from the stop signal until a service is cut off, wall seconds."""


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


class SettingRow(NamedTuple):
    """One setting, for people.

    Attributes:
        variable: The environment variable.
        kind: What its value is.
        default: Value when it is not set; `required` without one, `computed` when it depends.
        bounds: Limits of the value; empty without any.
        description: What it does, with its unit.
    """

    variable: str
    kind: str
    default: str
    bounds: str
    description: str


def describe(cls: type[BaseModel], prefix: str) -> list[SettingRow]:
    """Return a row for every variable that a settings class reads, in its order.

    Args:
        cls: A settings class; its attributes' docstrings are the descriptions.
        prefix: Put before every variable, in upper case.
    """
    rows: list[SettingRow] = []
    for field, info in cls.model_fields.items():
        name = prefix + field.upper()
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            rows += describe(kind, name + "__")
            continue
        limits = [*info.metadata, *_inner_metadata(kind)]
        description = " ".join((info.description or "").split())
        rows.append(
            SettingRow(name, _kind_name(kind), _default_text(info), _bounds(limits), description)
        )
    return rows


def _inner_metadata(kind: Any) -> Iterator[Any]:
    """Yield what `Annotated` says inside a union such as `Port | None`."""
    for part in get_args(kind) if get_origin(kind) in (Union, UnionType) else ():
        if get_origin(part) is Annotated:
            for extra in get_args(part)[1:]:
                yield from extra.metadata if isinstance(extra, FieldInfo) else [extra]


def _kind_name(kind: Any) -> str:
    origin = get_origin(kind)
    if origin is Annotated:
        return _kind_name(get_args(kind)[0])
    if origin in (Union, UnionType):
        return " or ".join(_kind_name(part) for part in get_args(kind))
    if origin is Literal:
        return " or ".join(f"`{choice}`" for choice in get_args(kind))
    return _KIND_NAMES.get(origin or kind, "text")


_KIND_NAMES: Mapping[Any, str] = {
    bool: "`true` or `false`",
    int: "integer",
    float: "number",
    type(None): "unset",
    Path: "file",
    SecretStr: "secret text",
    dict: "JSON object",
    list: "JSON list",
    tuple: "JSON list",
}


def _default_text(info: FieldInfo) -> str:
    if info.default_factory is not None:
        return "computed"
    if info.is_required():
        return "required"
    value = info.default
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if value is None or value == "":
        return "unset" if value is None else "empty"
    if isinstance(value, bool | dict | list | tuple):
        return f"`{json.dumps(value)}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _bounds(limits: Iterable[Any]) -> str:
    texts = []
    for limit in limits:
        for attribute, text in _LIMITS.items():
            value = getattr(limit, attribute, None)
            if value is not None:
                shown = f"{value:,}" if isinstance(value, int) else str(value).removesuffix(".0")
                texts.append(text.format(shown))
    return ", ".join(texts)


_LIMITS: Mapping[str, str] = {
    "gt": "> {}",
    "ge": "≥ {}",
    "lt": "< {}",
    "le": "≤ {}",
    "min_length": "length ≥ {}",
    "max_length": "length ≤ {}",
    "pattern": "matches `{}`",
}


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
            raise ConfigError(_unknown(name, prefix, known))
    try:
        return cls()
    except SettingsError as exc:  # a list or map that is no JSON; the cause may quote a secret
        raise ConfigError(f"{prefix}*: {exc}; lists and maps are written as JSON") from exc
    except ValidationError as exc:
        faults = exc.errors(include_input=False, include_url=False)
        raise ConfigError("; ".join(_fault(cls, prefix, one) for one in faults)) from exc


def _unknown(name: str, prefix: str, known: Iterable[str]) -> str:
    """Return what is said of a variable that names no setting."""
    # The prefix is right in all of them, and would make every name look near.
    near = nearest(name[len(prefix) :], (one.removeprefix(prefix) for one in known))
    hint = f"; did you mean {prefix}{near}?" if near else ";"
    return f"{name} is no setting of hexflow{hint} docs/settings.md lists all"


def _fault(cls: type[BaseModel], prefix: str, error: ErrorDetails) -> str:
    """Return what is wrong with one setting, and what it is for where it is missing."""
    name = prefix + ("__".join(str(part).upper() for part in error["loc"]) or "*")
    if error["type"] != "missing":
        return f"{name}: " + error["msg"].removeprefix("Value error, ")
    meanings = {row.variable: row.description for row in describe(cls, prefix)}
    meaning = meanings.get(name, "").removesuffix(".")
    return f"{name} is not set; it is required" + (f": {meaning}" if meaning else "")
