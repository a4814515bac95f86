"""The steps of the Text-to-SQL workflow, by the names that its definition uses.

Schema linking (`route`, `keywords`, `retrieve`), drafting (`candidates`), correction on the real
database (`revise`), and judging where candidates disagree (`tests_wanted`, `tests`, `judge`,
`pick`). A model that answers nonsense slows the work down, and never breaks it: every step has a
sensible default.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from services.text2sql.chess import prompts
from services.text2sql.chess.parsing import read_choice, read_letters, read_list, read_sql
from services.text2sql.chess.state import EMPTY, Candidate, Work
from services.text2sql.chess.trying import search_values, try_sql
from services.text2sql.flow.definition import StageDef
from services.text2sql.flow.prompting import chat_call
from services.text2sql.flow.step import Step
from shared.contracts.messages import CallOutcome, Needs
from shared.sdk import Call

EXTRACT, VALUES, COLUMNS, TESTS, DONE = (
    "extract_keywords",
    "retrieve_values",
    "select_columns",
    "generate_unit_test",
    "done",
)
MAX_TESTS = 5
PATIENT_ROUNDS = 3
DEFAULT_TEST = "it answers exactly what the question asks, no more and no less"


def text_of(outcome: CallOutcome) -> str:
    """Return what a call generated; empty for one that did not complete."""
    return outcome.text or "" if outcome.kind == "completed" else ""


def letters_of(outcome: CallOutcome, count: int) -> frozenset[int]:
    """Return the candidates that a judge named."""
    return read_letters(text_of(outcome), count)


class _Base:
    """A step of one question.

    Args:
        work: The question.
    """

    def __init__(self, work: Work) -> None:
        self.work = work

    def ask(self, stage: StageDef, system: str, user: str) -> Call:
        """Return a call about anything but SQL."""
        return chat_call(stage, system, user)

    def ask_sql(self, stage: StageDef, system: str, user: str) -> Call:
        """Return a call whose answer is a statement, after the linked schema."""
        schema = prompts.schema_text(self.work)
        call = chat_call(stage, system, f"{schema}{user}", shared=schema)
        return _structured(call) if self.work.is_structured else call


class Route(_Base):
    """Asks whether keywords are needed; where the answer is nonsense, they are."""

    async def calls(self, stage: StageDef, number: int) -> Sequence[Call]:
        """Return the router's call."""
        del number
        text = prompts.router_text(self.work, (EXTRACT, VALUES))
        return [self.ask(stage, prompts.ROUTER_SYSTEM, text)]

    async def take(self, stage: StageDef, number: int, outcomes: Sequence[CallOutcome]) -> bool:
        """Note the choice."""
        del stage, number
        choice = read_choice(text_of(outcomes[0]), (EXTRACT, VALUES))
        self.work.wants_keywords = choice != VALUES
        return False


class Keywords(_Base):
    """Asks what the question may name."""

    async def calls(self, stage: StageDef, number: int) -> Sequence[Call]:
        """Return the call, where the router wanted it."""
        del number
        if not self.work.wants_keywords:
            return []
        return [self.ask(stage, prompts.KEYWORDS_SYSTEM, prompts.question_text(self.work))]

    async def take(self, stage: StageDef, number: int, outcomes: Sequence[CallOutcome]) -> bool:
        """Keep what is short enough to be one."""
        del stage, number
        found = read_list(text_of(outcomes[0]))
        self.work.keywords = tuple(one for one in found if len(one) <= 60)
        return False


class Retrieve(_Base):
    """Lets a router choose among the retrieval tools until it is done, or none is left."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self._left = [VALUES, COLUMNS, DONE]
        self._used: list[str] = []

    async def calls(self, stage: StageDef, number: int) -> Sequence[Call]:
        """Return the router's call."""
        del number
        text = prompts.router_text(self.work, self._left, self._used)
        return [self.ask(stage, prompts.ROUTER_SYSTEM, text)]

    async def take(self, stage: StageDef, number: int, outcomes: Sequence[CallOutcome]) -> bool:
        """Use the tool that was chosen; the first that is left where the answer is nonsense."""
        del stage, number
        choice = read_choice(text_of(outcomes[0]), self._left) or self._left[0]
        self._left.remove(choice)
        self._used.append(choice)
        if choice == VALUES:
            await search_values(self.work)
        if choice == COLUMNS:
            self.work.link()
        return choice != DONE and len(self._left) > 1


class Candidates(_Base):
    """Asks for statements in different ways, in parallel, and tries each."""

    async def calls(self, stage: StageDef, number: int) -> Sequence[Call]:
        """Return one call per sibling; those beyond the ways of asking are drawn at random."""
        del number
        self.work.link()  # with whatever was found
        systems = prompts.CANDIDATE_SYSTEMS
        text = prompts.candidate_text(self.work)
        found = []
        for index in range(stage.siblings):
            call = self.ask_sql(stage, systems[index % len(systems)], text)
            if index >= len(systems):
                warm = {**call.sampling, "temperature": max(0.7, stage.temperature)}
                call = msgspec.structs.replace(call, sampling={**warm, "seed": index})
            found.append(call)
        return found

    async def take(self, stage: StageDef, number: int, outcomes: Sequence[CallOutcome]) -> bool:
        """Try every statement."""
        del stage
        self.work.candidates = [Candidate(index=n) for n in range(len(outcomes))]
        await _try_all(self.work, self.work.candidates, outcomes, number)
        self.work.refusal = _refusal(outcomes)
        return False


class Revise(_Base):
    """Feeds errors and empty results back, for every candidate that needs it."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self._asked: list[Candidate] = []

    async def calls(self, stage: StageDef, number: int) -> Sequence[Call]:
        """Return one call per candidate to correct; none ends the correction."""
        self._asked = self._failing(number)[: stage.siblings]
        return [
            self.ask_sql(
                stage,
                prompts.REVISE_SYSTEM,
                prompts.revise_text(self.work, candidate.attempts[-1], candidate.rows),
            )
            for candidate in self._asked
        ]

    async def take(self, stage: StageDef, number: int, outcomes: Sequence[CallOutcome]) -> bool:
        """Try the corrected statements; whether one of them still fails."""
        del stage
        answered = []
        for candidate, outcome in zip(self._asked, outcomes, strict=True):
            if outcome.kind == "completed":
                answered.append((candidate, outcome))
            else:
                candidate.is_settled = True  # the mesh will not correct it
        await _try_all(
            self.work,
            [candidate for candidate, _ in answered],
            [outcome for _, outcome in answered],
            number + 1,
        )
        return bool(self._failing(number + 1))

    def _failing(self, number: int) -> list[Candidate]:
        """Return the candidates to correct: while another one is good, not for long."""
        has_good = any(one.is_good for one in self.work.candidates)
        if has_good and number >= PATIENT_ROUNDS:
            return []
        return [one for one in self.work.candidates if not one.is_good and not one.is_settled]


class TestsWanted(_Base):
    """Where candidates disagree, asks whether tests would help."""

    async def calls(self, stage: StageDef, number: int) -> Sequence[Call]:
        """Return the router's call; none where all candidates with rows agree."""
        del number
        if len(self.work.groups()) < 2:
            return []
        text = f"{prompts.router_text(self.work, (TESTS, DONE))}\n{self._shown()}"
        return [self.ask(stage, prompts.ROUTER_SYSTEM, text)]

    async def take(self, stage: StageDef, number: int, outcomes: Sequence[CallOutcome]) -> bool:
        """Note the choice; where it is nonsense, tests are wanted."""
        del stage, number
        choice = read_choice(text_of(outcomes[0]), (TESTS, DONE))
        self.work.wants_tests = choice != DONE
        return False

    def _shown(self) -> str:
        return prompts.candidates_text([group[0] for group in self.work.groups()])


class Tests(_Base):
    """Asks for properties that tell right results from wrong ones."""

    async def calls(self, stage: StageDef, number: int) -> Sequence[Call]:
        """Return the call, where tests are wanted."""
        del number
        if not self.work.wants_tests:
            return []
        leaders = [group[0] for group in self.work.groups()]
        text = prompts.judge_text(self.work, leaders)
        return [self.ask(stage, prompts.TESTS_SYSTEM, text)]

    async def take(self, stage: StageDef, number: int, outcomes: Sequence[CallOutcome]) -> bool:
        """Keep a few; one of our own where none could be read."""
        del stage, number
        self.work.tests = read_list(text_of(outcomes[0]))[:MAX_TESTS] or (DEFAULT_TEST,)
        return False


class Judge(_Base):
    """Judges every candidate by every test, the tests in parallel."""

    async def calls(self, stage: StageDef, number: int) -> Sequence[Call]:
        """Return one call per test."""
        del number
        leaders = [group[0] for group in self.work.groups()]
        return [
            self.ask(stage, prompts.JUDGE_SYSTEM, prompts.judge_text(self.work, leaders, test))
            for test in self.work.tests[: stage.siblings]
        ]

    async def take(self, stage: StageDef, number: int, outcomes: Sequence[CallOutcome]) -> bool:
        """Count the tests that each candidate passed."""
        del stage, number
        leaders = [group[0] for group in self.work.groups()]
        for outcome in outcomes:
            for place in letters_of(outcome, len(leaders)):
                index = leaders[place].index
                self.work.votes[index] = self.work.votes.get(index, 0) + 1
        return False


class Pick(_Base):
    """Where several candidates passed equally many tests, asks for the best."""

    async def calls(self, stage: StageDef, number: int) -> Sequence[Call]:
        """Return the call; none where it is decided."""
        del number
        leaders = self.work.leaders()
        if len(leaders) < 2:
            return []
        text = prompts.judge_text(self.work, leaders)
        return [self.ask(stage, prompts.PICK_SYSTEM, text)]

    async def take(self, stage: StageDef, number: int, outcomes: Sequence[CallOutcome]) -> bool:
        """Note the choice; where it is nonsense, the order of candidates decides."""
        del stage, number
        leaders = self.work.leaders()
        named = letters_of(outcomes[0], len(leaders))
        if named:
            self.work.picked = leaders[min(named)].index
        return False


def text2sql_steps(work: Work) -> dict[str, Step]:
    """Return the steps of one question by name."""
    return {
        "route": Route(work),
        "keywords": Keywords(work),
        "retrieve": Retrieve(work),
        "candidates": Candidates(work),
        "revise": Revise(work),
        "tests_wanted": TestsWanted(work),
        "tests": Tests(work),
        "judge": Judge(work),
        "pick": Pick(work),
    }


async def _try_all(
    work: Work, candidates: Sequence[Candidate], outcomes: Sequence[CallOutcome], number: int
) -> None:
    async with asyncio.TaskGroup() as group:
        for candidate, outcome in zip(candidates, outcomes, strict=True):
            sql = read_sql(text_of(outcome))
            group.create_task(
                try_sql(work, candidate, number, sql), name=f"try-{candidate.index}-{number}"
            )
    for candidate in candidates:
        # What a model repeats twice it means: an empty result may be the answer.
        if candidate.verdict == EMPTY and candidate.is_settled:
            await work.context.progress.tell(
                "note", detail=f"candidate {candidate.index} stays with its empty result"
            )


def _refusal(outcomes: Sequence[CallOutcome]) -> tuple[str, str, str] | None:
    """Return how calls ended where none completed."""
    if any(outcome.kind == "completed" for outcome in outcomes):
        return None
    first = outcomes[0]
    return first.kind, first.reason, first.detail


def _structured(call: Call) -> Call:
    """Return a call whose engine must answer with JSON that holds a statement."""
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"sql": {"type": "string"}},
        "required": ["sql"],
        "additionalProperties": False,
    }
    wanted = {
        "type": "json_schema",
        "json_schema": {"name": "statement", "schema": schema, "strict": True},
    }
    return msgspec.structs.replace(
        call,
        extra={**call.extra, "response_format": wanted},
        needs=Needs(features=("structured_output",)),
    )
