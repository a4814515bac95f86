"""Prometheus' promtool, from the PATH or unpacked from Debian's package (once, then cached)."""

import shutil
import subprocess
from pathlib import Path

from tests.support.servers import MissingServerError, cache_dir


def promtool_program() -> Path:
    """Return the program; fetches Debian's package where there is none. Nothing is installed.

    Raises:
        MissingServerError: It is not there and cannot be fetched; says how to get it.
    """
    if found := shutil.which("promtool"):
        return Path(found)
    folder = cache_dir().resolve() / "promtool"
    program = folder / "usr" / "bin" / "promtool"
    if program.exists():
        return program
    if shutil.which("apt-get") is None:
        raise MissingServerError("promtool: install Prometheus")
    folder.mkdir(parents=True, exist_ok=True)
    for step in (["apt-get", "download", "prometheus"], ["sh", "-c", "dpkg-deb -x *.deb ."]):
        done = subprocess.run(step, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise MissingServerError(f"promtool: {' '.join(step)} failed: {done.stderr[-500:]}")
    return program
