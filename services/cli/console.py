"""How commands talk to people and end: stderr for words, stdout for data, exit codes."""

import errno
import json
import math
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from shared.errors import ConfigError, MeshError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
UNUSABLE = frozenset(
    {errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG}
)
UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS})


def stderr_console() -> Console:
    """Return a console for progress, notes and tables of commands whose stdout is data."""
    return Console(stderr=True, highlight=False)


def stdout_console() -> Console:
    """Return a console for tables that are the command's result."""
    return Console(highlight=False)


def counted(count: int, noun: str) -> str:
    """Return `1 query`, `2,000 queries`."""
    if count == 1:
        return f"1 {noun}"
    ends_in_y = noun.endswith("y") and noun[-2] not in "aeiou"
    return f"{count:,} {noun[:-1] + 'ies' if ends_in_y else noun + 's'}"


def shown_path(path: Path) -> str:
    """Return a path as a person types it here: relative where it lies below this folder."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def check_output(path: Path | None) -> None:
    """Refuse a file that could not be written later, before the work for it is done.

    Raises:
        ConfigError: Its folder is missing or may not be written in, or it is a folder itself.
    """
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file")
    if not _is_ours_to_write(path):
        why = "may not be written" if path.parent.is_dir() else f"there is no folder {path.parent}"
        raise ConfigError(f"{path} cannot be written: {why}")


def check_writable(path: Path) -> None:
    """Make a file's folder, or refuse a place where no file can be written; see `check_output`.

    What lies there stays as it is.

    Raises:
        ConfigError: Says why.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"{path} cannot be written: {exc.strerror or exc}") from exc
    if path.is_dir() or not _is_ours_to_write(path):
        raise ConfigError(f"{path} cannot be written: it is a folder, or not yours to write")


def _is_ours_to_write(path: Path) -> bool:
    return os.access(path if path.exists() else path.parent, os.W_OK)


def how_to_activate() -> str:
    """Return the command that puts `hexflow` on this shell's path; empty where it is there.

    `./dev` puts this environment on the path of what it starts, and says what the shell's was.
    """
    script = Path(sys.prefix) / "bin" / "activate"
    shell_path = os.environ.get("DEV_SHELL_PATH")
    if shutil.which("hexflow", path=shell_path) or not script.exists():
        return ""
    return f"source {shown_path(script)}"


def finite(value: float) -> float | None:
    """Return the value, or None where JSON has no number for it."""
    return value if math.isfinite(value) else None


def print_json(value: dict[str, Any]) -> None:
    """Write the command's one JSON object to stdout."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def mesh_error_in(exc: BaseException) -> MeshError | None:
    """Return the first error meant for people inside an exception or group, if there is one.

    A group that also holds an unexpected error is a fault of the program: None, so that its
    traceback is shown.
    """
    if isinstance(exc, MeshError):
        return exc
    if not isinstance(exc, BaseExceptionGroup):
        return None
    found = [mesh_error_in(inner) for inner in exc.exceptions]
    return found[0] if all(found) else None


def exit_code_for(exc: BaseException) -> int | None:
    """Print what a person must know about a failure; return the exit code, None for a bug."""
    if _is_interrupt(exc):
        return EXIT_INTERRUPTED
    if isinstance(exc, BrokenPipeError):
        return EXIT_FAILED
    if isinstance(exc, OSError) and exc.errno in UNWRITABLE:
        print(f"hexflow: the output cannot be written: {exc.strerror}", file=sys.stderr)
        return EXIT_FAILED
    if isinstance(exc, OSError) and exc.errno in UNUSABLE and exc.filename is not None:
        print(f"hexflow: {exc.filename}: {exc.strerror}", file=sys.stderr)
        return EXIT_USAGE
    error = mesh_error_in(exc)
    if error is None:
        return None
    print(f"hexflow: {error}", file=sys.stderr)
    return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED


def _is_interrupt(exc: BaseException | None) -> bool:
    """Return whether Ctrl-C is behind an error: a compiled module hides one in its start."""
    while exc is not None and not isinstance(exc, KeyboardInterrupt):
        exc = exc.__cause__ if exc.__cause__ is not None else exc.__context__
    return exc is not None
