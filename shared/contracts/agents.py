"""What an agent says of itself while it runs: JSON in the state store, under a lease.

Not a topic: it holds for seconds. Whoever asks questions learns from it at once that nobody could
answer one; what is lost is said again soon. Pure.
"""

import msgspec

AGENTS = "agents"
MAX_LISTED = 1_000


class AgentNotice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One agent, as it says.

    Attributes:
        workflows: Workflow name -> whether its questions need a database.
        databases: Names of the databases it knows; None: more than it lists.
        lease_s: How long the notice holds, wall seconds.
        beat: How often it was said: tells a living agent from what one left behind.
    """

    workflows: dict[str, bool]
    databases: tuple[str, ...] | None = ()
    lease_s: float = 60.0
    beat: int = 0


def encode_notice(notice: AgentNotice) -> str:
    """Return a notice as text; one with too many databases lists none of them."""
    if notice.databases is not None and len(notice.databases) > MAX_LISTED:
        notice = msgspec.structs.replace(notice, databases=None)
    return msgspec.json.encode(notice).decode()


def decode_notice(text: str) -> AgentNotice | None:
    """Return the notice in a text; None for what no release here wrote."""
    try:
        return msgspec.json.decode(text, type=AgentNotice)
    except msgspec.DecodeError:
        return None
