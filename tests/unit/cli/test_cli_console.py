"""How commands end: what is told, and the exit code."""

import errno
from pathlib import Path

import pytest

from services.cli.console import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    check_output,
    counted,
    exit_code_for,
)
from shared.errors import ConfigError


def test_an_interrupt_inside_an_import_is_an_interrupt(capsys: pytest.CaptureFixture[str]):
    """Compiled modules turn Ctrl-C into an ImportError; no traceback is shown for it."""
    hidden = ImportError("initialization failed")
    hidden.__cause__ = KeyboardInterrupt()
    assert exit_code_for(hidden) == EXIT_INTERRUPTED
    assert exit_code_for(ImportError("no such module")) is None
    assert capsys.readouterr().err == ""


def test_output_that_cannot_be_written_is_told(capsys: pytest.CaptureFixture[str]):
    """A full disk is one line; another error of the system stays a bug to be seen."""
    assert exit_code_for(OSError(errno.ENOSPC, "No space left on device")) == EXIT_FAILED
    assert "cannot be written: No space left on device" in capsys.readouterr().err
    assert exit_code_for(OSError(errno.EINVAL, "Invalid argument")) is None


def test_a_file_that_cannot_be_used_is_named(capsys: pytest.CaptureFixture[str]):
    """A path that is wrong is one line with its name, never a traceback."""
    assert exit_code_for(FileNotFoundError(errno.ENOENT, "No such file", "/nope/x")) == EXIT_USAGE
    assert capsys.readouterr().err == "hexflow: /nope/x: No such file\n"
    assert exit_code_for(OSError(errno.ENOENT, "No such file")) is None  # of no file: a bug


def test_an_output_file_is_checked_before_the_work(tmp_path: Path):
    """A missing folder and a folder in the file's place are refused; a new file is fine."""
    check_output(None)
    check_output(tmp_path / "new.json")
    with pytest.raises(ConfigError, match="no folder"):
        check_output(tmp_path / "nope" / "x.json")
    with pytest.raises(ConfigError, match="is a folder"):
        check_output(tmp_path)


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (1, "query", "1 query"),
        (0, "query", "0 queries"),
        (2_000, "query", "2,000 queries"),
        (1, "call", "1 call"),
        (3, "call", "3 calls"),
        (2, "day", "2 days"),
    ],
)
def test_things_are_counted_as_people_do(count: int, noun: str, text: str):
    """One is singular, everything else plural."""
    assert counted(count, noun) == text
