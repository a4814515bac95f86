"""Who could answer a question, from what agents say of themselves."""

import pytest

from shared.adapters.memory_store import MemoryStore
from shared.contracts.agents import (
    AGENTS,
    MAX_LISTED,
    AgentNotice,
    decode_notice,
    encode_notice,
)
from shared.contracts.messages import QueryRequest
from shared.sdk import agents_of, announce_agent, refusal_of

WORKFLOWS = {"text2sql": True, "code_review": False}
LEAGUE = AgentNotice(workflows=WORKFLOWS, databases=("league",))
SHOPS = AgentNotice(workflows={"text2sql": True}, databases=("bazaar", "shop"))
REVIEWER = AgentNotice(workflows={"code_review": False})
ENDLESS = AgentNotice(workflows=WORKFLOWS, databases=None)


def asking(**named: str) -> QueryRequest:
    """Return a question."""
    return QueryRequest(**{"query_id": "q", "question": "?", **named})


@pytest.mark.parametrize(
    ("request_", "agents"),
    [
        (asking(database="league"), [LEAGUE]),
        (asking(), [LEAGUE]),  # its only one
        (asking(), [SHOPS, LEAGUE]),
        (asking(database="shop"), [LEAGUE, SHOPS]),
        (asking(database="any"), [SHOPS, ENDLESS]),
        (asking(workflow="code_review"), [LEAGUE]),
        (asking(workflow="code_review", database="any"), [REVIEWER]),
    ],
)
def test_a_question_that_some_agent_may_answer_is_asked(
    request_: QueryRequest, agents: list[AgentNotice]
):
    """Where there is doubt, it is asked."""
    assert refusal_of(request_, agents) is None


@pytest.mark.parametrize(
    ("request_", "agents", "reason", "field", "told"),
    [
        (asking(database="league"), [], "no_agent", "", "python -m services.text2sql"),
        (
            asking(database="leage"),
            [LEAGUE, SHOPS],
            "unknown_database",
            "database",
            "'leage'; did you mean league? (there are: bazaar, league, shop)",
        ),
        (asking(database="x"), [REVIEWER, LEAGUE], "unknown_database", "database", "are: league)"),
        (asking(), [SHOPS], "unknown_database", "database", "names no database (there are: bazaar"),
        (
            asking(workflow="text2sq1"),
            [SHOPS, REVIEWER],
            "unknown_workflow",
            "workflow",
            "did you mean text2sql? (there are: code_review, text2sql)",
        ),
        (asking(workflow="text2sql"), [REVIEWER], "unknown_workflow", "workflow", "code_review)"),
    ],
)
def test_a_question_that_nobody_could_answer_is_refused(
    request_: QueryRequest, agents: list[AgentNotice], reason: str, field: str, told: str
):
    """The refusal names what is wrong, the nearest name, and what to do."""
    refusal = refusal_of(request_, agents)
    assert refusal is not None
    assert (refusal.reason, refusal.field) == (reason, field)
    assert told in refusal.text


def test_a_refusal_stays_short():
    """A thousand databases are counted, not listed."""
    many = AgentNotice(workflows=WORKFLOWS, databases=tuple(f"d{i}" for i in range(999)))
    refusal = refusal_of(asking(database="none"), [many])
    assert refusal is not None
    assert "and 979 more" in refusal.text
    assert len(refusal.text) < 400


async def test_agents_are_read_back_as_they_announced_themselves():
    """What another release wrote and this one cannot read is no agent."""
    store = MemoryStore()
    await announce_agent(store, "one", LEAGUE)
    await store.announce(AGENTS, "odd", "no notice", lease_s=60.0)
    assert await agents_of(store) == {"one": LEAGUE}


def test_a_notice_is_bounded_and_takes_fields_of_later_releases():
    """Too many databases become `None`: any name may be one of them."""
    names = tuple(f"d{i}" for i in range(MAX_LISTED + 1))
    large = AgentNotice(workflows=WORKFLOWS, databases=names)
    assert decode_notice(encode_notice(large)) == ENDLESS
    later = '{"workflows": {"text2sql": true}, "databases": ["league"], "colour": "red"}'
    found = decode_notice(later)
    assert found is not None
    assert found.databases == ("league",)
