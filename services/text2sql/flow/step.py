"""What a stage's code sees, and what it has to be."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from services.text2sql.flow.definition import StageDef
from services.text2sql.flow.progress import Progress
from shared.contracts.messages import CallOutcome, QueryKind, QueryRequest
from shared.errors import MeshError
from shared.ports import Clock
from shared.sdk import Call


class Ended(MeshError):
    """A query ends here, before its last stage.

    Args:
        kind: How it ends.
        reason: Constant word.
        detail: For people.
    """

    reason = "ended"

    def __init__(self, kind: QueryKind, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.kind: QueryKind = kind
        self.word = reason
        self.detail = detail


@dataclass(kw_only=True)
class Context:
    """One query on its way.

    Attributes:
        request: The question.
        clock: Mesh clock.
        deadline_s: When its result must be out, mesh clock.
        progress: Where to tell what happens.
        outputs: Inputs, and outputs of the stages so far, by name.
    """

    request: QueryRequest
    clock: Clock
    deadline_s: float
    progress: Progress
    outputs: dict[str, Any] = field(default_factory=dict)

    @property
    def remaining_s(self) -> float:
        """Time until the deadline, mesh seconds; negative after it."""
        return self.deadline_s - self.clock.now_s()

    @property
    def remaining_wall_s(self) -> float:
        """Time until the deadline, wall seconds."""
        return self.remaining_s / self.clock.time_scale


class Step(Protocol):
    """Makes a stage's prompts and reads its answers.

    Both methods must do the same on a second run with the same outcomes: after a crash a query is
    run again, and calls that ended before are not made again.
    """

    async def calls(self, stage: StageDef, number: int) -> Sequence[Call]:
        """Return the calls of a round (0 is the first); none ends the stage."""
        ...

    async def take(self, stage: StageDef, number: int, outcomes: Sequence[CallOutcome]) -> bool:
        """Read a round's outcomes, whatever their kinds; whether another round is wanted.

        Raises:
            Ended: The query ends here.
        """
        ...
