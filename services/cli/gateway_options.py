"""The gateway of a mesh that the command line starts: options, its port, what is said of it."""

import socket
from collections.abc import Iterable
from typing import Annotated

import typer

from shared.adapters.local_process import LOOPBACK, free_port
from shared.errors import ConfigError

DEFAULT_PORT = 8080
OF_PROCESSES = ("DISPATCHER_", "WORKER_", "TUNER_", "TEXT2SQL_")

GatewayOption = Annotated[
    bool,
    typer.Option(
        "--gateway/--no-gateway",
        help="Serve the OpenAI API and the dashboard on this machine's loopback address.",
    ),
]
PortOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=65_535,
        help=f"The gateway's port; default: {DEFAULT_PORT}, or a free one where that is taken.",
    ),
]


def port_of(*, wanted: bool, port: int | None) -> int | None:
    """Return the port to serve on; None: no gateway.

    Raises:
        ConfigError: The port is taken, or was named although no gateway is wanted.
    """
    if not wanted:
        if port is not None:
            raise ConfigError("--port is the gateway's: leave --no-gateway or --port out")
        return None
    if port is None:
        return DEFAULT_PORT if _is_free(DEFAULT_PORT) else free_port()
    if not _is_free(port):
        raise ConfigError(f"port {port} is taken: name another one with --port")
    return port


def gateway_text(port: int, keys_file: str | None = None) -> str:
    """Return what a person can do with the gateway.

    Args:
        port: Where it listens.
        keys_file: The keys it lets in; None: all.
    """
    url = f"http://{LOOPBACK}:{port}"
    keys = "any API key" if not keys_file else f"API keys of {keys_file}"
    return f"Dashboard: [bold]{url}[/bold]   OpenAI API: base URL {url}/v1, {keys}"


def unused_text(environ: Iterable[str]) -> str:
    """Return which variables a mesh in one process does not read; empty: none is set."""
    unused = sorted(name for name in environ if name.upper().startswith(OF_PROCESSES))
    if not unused:
        return ""
    return (
        f"[yellow]Not used by a mesh in one process: {', '.join(unused)}.[/yellow] They are for "
        "services of their own: --kafka HOST:PORT --redis URL."
    )


def _is_free(port: int) -> bool:
    try:
        socket.create_server((LOOPBACK, port)).close()
    except OSError:
        return False
    return True
