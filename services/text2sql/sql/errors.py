"""What can become of a statement that does not give rows."""

from typing import ClassVar

from shared.errors import MeshError


class SqlError(MeshError):
    """A statement gave no rows; the message may be shown to the model.

    Attributes:
        verdict: Word for `SqlAttempt.verdict`.
    """

    reason = "sql_failed"
    verdict: ClassVar[str] = "error"


class SqlRefused(SqlError):
    """The statement is not one that may run; it did not reach the database."""

    reason = "sql_refused"
    verdict = "refused"


class SqlFailed(SqlError):
    """The database could not run it."""

    reason = "sql_failed"
    verdict = "error"


class SqlTimedOut(SqlError):
    """It ran longer than allowed and was stopped."""

    reason = "sql_timeout"
    verdict = "timeout"
