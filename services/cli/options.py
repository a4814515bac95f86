"""Options that several commands share, and the settings behind them."""

import logging
import math
from pathlib import Path
from typing import Annotated

import typer

from shared.errors import ConfigError
from shared.runtime import logs
from shared.runtime.settings import MeshSettings, load

NamedFleetOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help="hetero-1 (the default), hetero-2, homogeneous, or a fleet file (TOML); with real "
        "engines: the file that hexflow profile wrote of them.",
    ),
]
FleetOption = Annotated[
    str,
    typer.Option(
        metavar="NAME|FILE",
        help="hetero-1, hetero-2, homogeneous, or a fleet file (TOML).",
    ),
]
PolicyOption = Annotated[
    str | None,
    typer.Option(help="Scheduling policy: hexgen-flow (default), vllm, ...; see docs/policies.md."),
]
AlphaOption = Annotated[
    float | None, typer.Option(min=0.0, max=1.0, help="Initial α of the policy, if it has one.")
]
TimeScaleOption = Annotated[
    float, typer.Option(min=0.001, max=1_000.0, help="Workload seconds per wall second.")
]
KafkaOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Kafka bootstrap address; default: HEXFLOW_KAFKA__BOOTSTRAP_SERVERS.",
    ),
]
RedisOption = Annotated[
    str | None,
    typer.Option(metavar="URL", help="redis://HOST:PORT/DB; default: HEXFLOW_REDIS__URL."),
]
# For commands that touch servers only where they are named: the environment is no default there.
NamedKafkaOption = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Bootstrap address of a Kafka that runs already."),
]
NamedRedisOption = Annotated[
    str | None, typer.Option(metavar="URL", help="Its Redis, redis://HOST:PORT/DB.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")
]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show the services' logs on stderr.")
]
OutOption = Annotated[Path, typer.Option("--out", help="Folder for plots; created when missing.")]


def mesh_settings(
    *, kafka: str | None = None, redis: str | None = None, time_scale: float | None = None
) -> MeshSettings:
    """Return the mesh's settings from the environment, with options put over them.

    Raises:
        ConfigError: A variable is misspelt, or a value is wrong.
    """
    settings = load(MeshSettings)
    changes: dict[str, object] = {}
    if kafka is not None:
        check_address(kafka)
        changes["kafka"] = settings.kafka.model_copy(update={"bootstrap_servers": kafka})
    if redis is not None:
        changes["redis"] = settings.redis.model_copy(update={"url": redis})
    if time_scale is not None:
        changes["time_scale"] = time_scale
    return settings.model_copy(update=changes)


def parse_scales(text: str) -> tuple[float, ...]:
    """Return the numbers of `3,4,6`; empty for an empty text.

    Raises:
        ConfigError: One is no positive number.
    """
    try:
        scales = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError as exc:
        raise ConfigError(f"--slo-scales {text!r}: numbers separated by commas are needed") from exc
    if not all(0 < scale < math.inf for scale in scales):
        raise ConfigError(f"--slo-scales {text!r}: every scale must be above 0")
    return scales


def configure_logs(*, verbose: bool) -> None:
    """Send the services' logs to stderr: all of them, or warnings only."""
    logs.configure("INFO" if verbose else "WARNING", "console")
    if not verbose:
        # Our own errors say what the client library logs on every attempt.
        logging.getLogger("aiokafka").setLevel(logging.CRITICAL)


def check_address(address: str) -> None:
    """Refuse what is no list of `host:port`.

    Raises:
        ConfigError: It names no host or no port.
    """
    for one in address.split(","):
        host, _, port = one.strip().rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
            raise ConfigError(f"{one.strip()!r} is no Kafka address; give host:port")
