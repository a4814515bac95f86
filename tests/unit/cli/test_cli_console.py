"""How commands end: what is told, and the exit code."""

import errno

import pytest

from services.cli.console import EXIT_FAILED, EXIT_INTERRUPTED, counted, exit_code_for


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
