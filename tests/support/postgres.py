"""Finds or starts the real PostgreSQL that tests use, as `tests.support.servers` does for others.

`HEXFLOW_TEST_POSTGRES` (`postgresql://USER:PASSWORD@HOST:PORT/DATABASE`) names one; its user must
be allowed to create databases and roles. Otherwise a cluster is made in a temporary folder with the
`initdb` and `postgres` that are found, on loopback.
"""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import create_engine
from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError

from shared.adapters.local_process import LOOPBACK, LocalProcess, free_port
from shared.errors import ConfigError
from tests.support.servers import MissingServerError

POSTGRES_VARIABLE = "HEXFLOW_TEST_POSTGRES"
START_WITHIN_S = 60.0
_ACCOUNTS = ("postgres", "nobody")


@contextmanager
def postgres_for_tests(environ: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Yield the address of a database server whose user may do everything.

    Raises:
        MissingServerError: There is none, and none can be started.
    """
    if named := environ.get(POSTGRES_VARIABLE):
        yield named
        return
    programs = _programs()
    with tempfile.TemporaryDirectory(prefix="hexflow-postgres-") as name:
        folder = Path(name)
        prefix = _as_ordinary_user(folder)
        try:
            with _running(programs, prefix, folder) as url:
                yield url
        except (ConfigError, OSError, subprocess.CalledProcessError) as exc:
            raise MissingServerError(_no_postgres(exc)) from exc


@contextmanager
def _running(programs: Path, prefix: list[str], folder: Path) -> Iterator[str]:
    data, port = folder / "data", free_port()
    options = ["-U", "tests", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync"]
    command = [*prefix, str(programs / "initdb"), "-D", str(data), *options]
    subprocess.run(command, check=True, capture_output=True)
    settings = {
        "listen_addresses": LOOPBACK,
        "port": str(port),
        "unix_socket_directories": "",
        "fsync": "off",
        "shared_buffers": "32MB",
        "max_connections": "40",
    }
    words = [word for key, value in settings.items() for word in ("-c", f"{key}={value}")]
    command = [*prefix, str(programs / "postgres"), "-D", str(data), *words]
    server = LocalProcess("PostgreSQL", command, folder / "postgres.log")
    url = f"postgresql://tests@{LOOPBACK}:{port}/postgres"
    server.start()
    try:
        server.wait_until(lambda: _answers(url), START_WITHIN_S)
        yield url
    finally:
        server.stop()


def _answers(url: str) -> bool:
    engine = create_engine(make_url(url).set(drivername="postgresql+psycopg"))
    try:
        with engine.connect():
            return True
    except OperationalError as exc:
        raise ConnectionError(str(exc)) from exc
    finally:
        engine.dispose()


def _programs() -> Path:
    on_path = shutil.which("initdb")
    found = [Path(on_path).parent] if on_path else []
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    for folder in found:
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    raise MissingServerError(_no_postgres("initdb and postgres were not found"))


def _as_ordinary_user(folder: Path) -> list[str]:
    """Return what to put before a command: PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return []
    tool = shutil.which("setpriv")
    for name in _ACCOUNTS:
        try:
            account = pwd.getpwnam(name)
        except KeyError:
            continue
        if tool is None:
            break
        os.chown(folder, account.pw_uid, account.pw_gid)
        ids = [f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups"]
        return [tool, *ids]
    raise MissingServerError(_no_postgres("it does not run as root, and setpriv was not found"))


def _no_postgres(cause: object) -> str:
    detail = getattr(cause, "stderr", b"") or b""
    return (
        f"no real PostgreSQL: {cause} {detail.decode(errors='replace')[-300:]}\n"
        f"To get it: install PostgreSQL (Debian: apt-get install postgresql), or set "
        f"{POSTGRES_VARIABLE}=postgresql://USER:PASSWORD@HOST:PORT/DATABASE"
    )
