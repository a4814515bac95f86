"""TLS to a real Redis: trusted, untrusted, and with client certificates."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.adapters.local_process import LOOPBACK, LocalProcess, connect, free_port
from shared.adapters.redis_store import RedisParams, RedisStore
from shared.errors import AccessRefused, ConfigError, StateUnavailable
from tests.support.servers import is_required
from tests.support.urgency import entry

pytestmark = pytest.mark.real


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """Return a self-signed certificate for the loopback address, and its key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    kind = [
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    ]
    names = ["-subj", f"/CN={name}", "-addext", f"subjectAltName=IP:{LOOPBACK}"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", *kind, *names, *files], check=True, capture_output=True)
    return certificate, key


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Return the parameters of a Redis that demands client certificates."""
    for program in ("redis-server", "openssl"):
        if shutil.which(program) is None:
            give_up = pytest.fail if is_required() else pytest.skip
            give_up(f"not run: there is no {program} on PATH")
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = make_certificate(folder, "server")
    port = free_port()
    options = {
        "port": "0",
        "tls-port": str(port),
        "bind": LOOPBACK,
        "dir": str(folder),
        "save": "",
        "tls-cert-file": str(certificate),
        "tls-key-file": str(key),
        "tls-ca-cert-file": str(certificate),
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    server = LocalProcess("Redis", ["redis-server", *words], folder / "log")
    server.start()

    def listens() -> bool:
        connect(LOOPBACK, port).close()
        return True

    server.wait_until(listens, 20)
    yield {
        "url": f"rediss://{LOOPBACK}:{port}/0",
        "ssl_ca": certificate,
        "ssl_cert": certificate,
        "ssl_key": key,
        "timeout_s": 5.0,
    }
    server.kill()


async def test_trusted_both_ways(tls: dict[str, Any]) -> None:
    """With the authority and a client certificate the store works."""
    async with RedisStore.open(RedisParams.model_validate(tls)) as store:
        line = store.urgency_set("a")
        await line.add([entry("a")])
        assert await line.sizes() == (1, 0, 0)


async def test_untrusted_server(tls: dict[str, Any], tmp_path: Path) -> None:
    """A server whose certificate another authority signed is a configuration error."""
    other, _ = make_certificate(tmp_path, "other")
    with pytest.raises(ConfigError, match="is not trusted"):
        async with RedisStore.open(RedisParams.model_validate({**tls, "ssl_ca": other})):
            pass


async def test_no_client_certificate(tls: dict[str, Any]) -> None:
    """A client without the certificate that the server demands is told that it failed.

    The server's alert names the cause, unless the closed connection is noticed before it is read.
    """
    params = RedisParams.model_validate({**tls, "ssl_cert": None, "ssl_key": None})
    with pytest.raises((AccessRefused, StateUnavailable)):
        async with RedisStore.open(params):
            pass


async def test_plain_client(tls: dict[str, Any]) -> None:
    """A client that does not speak TLS to such a port is told that it failed."""
    params = RedisParams.model_validate({**tls, "url": tls["url"].replace("rediss", "redis")})
    with pytest.raises(StateUnavailable):
        async with RedisStore.open(params):
            pass
