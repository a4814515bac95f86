"""Progress of a question while an agent works on it: JSON in the state store's chunk streams.

Not a topic: nothing depends on it, and what is lost is not missed. Events of one question are the
chunks of the stream `event_stream(query_id)`; a later attempt is an agent that took the question
over after another one ended.
"""

from typing import Literal

import msgspec

EventKind = Literal["began", "stage_began", "stage_ended", "sql", "note"]


class QueryEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that happened to a question.

    Attributes:
        kind: `began`: an agent took it; `stage_began`, `stage_ended`: calls of a stage;
            `sql`: a statement was tried; `note`: a decision, for people.
        at_s: When, mesh clock.
        stage: Stage name.
        iteration: Occurrence of the stage.
        siblings: Number of parallel calls.
        took_s: How long the stage, or the statement in the database, took, seconds.
        output_tokens: Tokens that the stage's calls generated.
        sql: The statement.
        verdict: What became of it, as in `SqlAttempt`.
        detail: One sentence for people.
    """

    kind: EventKind
    at_s: float
    stage: str = ""
    iteration: int = 0
    siblings: int = 0
    took_s: float = 0.0
    output_tokens: int = 0
    sql: str = ""
    verdict: str = ""
    detail: str = ""


def event_stream(query_id: str) -> str:
    """Return the name of the chunk stream that carries a question's events."""
    return f"query/{query_id}"


def encode_event(event: QueryEvent) -> str:
    """Return an event as text."""
    return msgspec.json.encode(event).decode()


def decode_event(text: str) -> QueryEvent | None:
    """Return the event in a chunk; None for what no release here wrote."""
    try:
        return msgspec.json.decode(text, type=QueryEvent)
    except msgspec.DecodeError:
        return None
