"""What the Text-to-SQL steps know of one question, and how the answer is chosen from it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.text2sql.chess.linking import Evidence, Place, prune, stems
from services.text2sql.flow.step import Context
from services.text2sql.sql.database import Database, Rows
from services.text2sql.sql.schema import Table
from shared.contracts.messages import SqlAttempt

OK, EMPTY, UNREADABLE = "ok", "empty", "unreadable"


@dataclass(kw_only=True)
class Candidate:
    """One line of thought: a statement and its corrections.

    Attributes:
        index: Which.
        attempts: Its versions, oldest first.
        rows: What the last version gave; None: it did not run.
        is_settled: Whether asking for another version is pointless.
    """

    index: int
    attempts: list[SqlAttempt] = field(default_factory=list)
    rows: Rows | None = None
    is_settled: bool = False

    @property
    def last(self) -> SqlAttempt | None:
        """Its present version."""
        return self.attempts[-1] if self.attempts else None

    @property
    def verdict(self) -> str:
        """What became of its present version; empty before there is one."""
        return self.attempts[-1].verdict if self.attempts else ""

    @property
    def is_good(self) -> bool:
        """Whether its present version gave rows."""
        return self.verdict == OK


@dataclass(kw_only=True)
class Work:
    """The question's state.

    Attributes:
        context: The query.
        database: Where it is asked.
        schema_tokens: Most tokens of schema in a prompt.
        max_rows: Most rows of an answer.
        is_structured: Whether engines hold to a JSON schema.
        wants_keywords: Whether the router wanted keywords.
        keywords: What the question may name.
        values: Where in the database such values are.
        candidates: Lines of thought.
        tests: What a right answer has to fulfil.
        votes: Candidate -> tests passed.
        picked: The candidate that a tie was decided for.
    """

    context: Context
    database: Database
    schema_tokens: int
    max_rows: int
    is_structured: bool = False
    wants_keywords: bool = True
    keywords: tuple[str, ...] = ()
    values: dict[Place, tuple[str, ...]] = field(default_factory=dict)
    candidates: list[Candidate] = field(default_factory=list)
    tests: tuple[str, ...] = ()
    wants_tests: bool = False
    votes: dict[int, int] = field(default_factory=dict)
    picked: int | None = None
    linked: tuple[Table, ...] = ()
    refusal: tuple[str, str, str] | None = None

    @property
    def evidence(self) -> Evidence:
        """What linking goes by."""
        request = self.context.request
        words = stems(" ".join((request.question, request.hint, *self.keywords)))
        return Evidence(words=words, values=self.values)

    def link(self) -> None:
        """Choose the tables and columns that prompts show."""
        self.linked = prune(self.database.schema, self.evidence, self.schema_tokens)

    def groups(self) -> list[list[Candidate]]:
        """Return the candidates that gave rows, those with the same rows together."""
        found: dict[object, list[Candidate]] = {}
        for candidate in self.candidates:
            if candidate.is_good and candidate.rows is not None:
                found.setdefault(content_of(candidate.rows), []).append(candidate)
        return list(found.values())

    def leaders(self) -> list[Candidate]:
        """Return one candidate of each group that passed the most tests."""
        groups = self.groups()
        best = max((self._votes_of(group) for group in groups), default=0)
        return [group[0] for group in groups if self._votes_of(group) == best]

    def chosen(self) -> Candidate | None:
        """Return the candidate to answer with; None: none can be.

        Rows win over none, then tests passed, then the decision of a tie, then how many candidates
        agree, then the order of candidates. Where no statement gave rows, one that ran is taken.
        """
        groups = self.groups()
        if groups:
            return max(groups, key=self._rank)[0]
        ran = [one for one in self.candidates if one.verdict == EMPTY]
        return ran[0] if ran else None

    def attempts(self) -> tuple[SqlAttempt, ...]:
        """Return every statement considered, in order."""
        found = [attempt for one in self.candidates for attempt in one.attempts]
        return tuple(sorted(found, key=lambda one: (one.round, one.candidate)))

    def _votes_of(self, group: Sequence[Candidate]) -> int:
        return max(self.votes.get(one.index, 0) for one in group)

    def _rank(self, group: Sequence[Candidate]) -> tuple[int, bool, int, int]:
        is_picked = any(one.index == self.picked for one in group)
        return self._votes_of(group), is_picked, len(group), -group[0].index


def content_of(rows: Rows) -> tuple[object, ...]:
    """Return what two results are compared by; the order counts where a statement gives one."""
    content = [tuple(map(_rounded, row)) for row in rows.rows]
    if not rows.is_ordered:
        content.sort(key=repr)
    return (rows.is_truncated, *content)


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return round(value, 6)
    return repr(value) if isinstance(value, list | dict) else value
