"""Who is let in: promises within what the pool does, fair shares, hopeless calls behind."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.scheduling.admission import (
    OVERLOADED,
    Admission,
    AdmissionRules,
    Asked,
    Demand,
    Shares,
    demoted,
    is_hopeless,
)

RULES = AdmissionRules(margin=0.5, lowest_margin=0.1)
RATE = 10.0


def ask(query_id: str, *, tenant: str = "a", deadline_s: float = 100.0, work_s: float = 50.0):
    """Return a query that needs 0.5 work per second until its deadline, by default."""
    return Asked(
        query_id=query_id, tenant=tenant, deadline_s=deadline_s, work_s=work_s, path_s=10.0
    )


def offer(admission: Admission, asked: Asked, now_s: float = 0.0, stretch: float = 1.0):
    """Return why a query is turned away, or None."""
    return admission.offer(asked, now_s, RATE, stretch)


def test_promises_stay_within_the_margin():
    """Half of a rate of 10 is promised: ten queries of 0.5 each, and no eleventh."""
    admission = Admission(RULES)
    answers = [offer(admission, ask(f"q{index}")) for index in range(12)]
    assert answers == [None] * 10 + [OVERLOADED] * 2
    assert admission.demand.density == pytest.approx(5.0)


def test_an_end_makes_room():
    """When a query's last call has ended, its share is free at once."""
    admission = Admission(RULES)
    for index in range(10):
        offer(admission, ask(f"q{index}"))
    stage = ("judge", 0)
    assert not admission.demand.call_ended("q3", stage, 2, 5.0, is_last=True)
    assert admission.demand.call_ended("q3", stage, 2, 6.0, is_last=True)
    assert offer(admission, ask("next", deadline_s=106.0), 6.0) is None


def test_a_deadline_that_has_passed_frees_its_share_and_counts_as_broken():
    """A late query no longer takes part, and less is promised from then on."""
    admission = Admission(RULES)
    for index in range(10):
        offer(admission, ask(f"q{index}"))
    admission.tidy(101.0)
    assert len(admission.demand) == 0
    assert admission.margin < RULES.margin


def test_the_margin_recovers_and_never_exceeds_the_rule():
    """Promises kept give back what promises broken took."""
    admission = Admission(RULES)
    for _ in range(50):
        admission.ended(in_time=False)
    low = admission.margin
    for _ in range(2_000):
        admission.ended(in_time=True)
    assert RULES.lowest_margin <= low < admission.margin == RULES.margin


def test_a_query_alone_is_always_let_in():
    """Whatever is believed of the pool, an idle one refuses nobody."""
    assert offer(Admission(RULES), ask("q", work_s=1e9)) is None


def test_what_cannot_be_in_time_at_the_present_pace_is_refused():
    """Ten seconds alone, twenty times slower in a full batch, do not fit into a hundred."""
    admission = Admission(RULES)
    offer(admission, ask("first"))
    assert offer(admission, ask("q"), stretch=20.0) == OVERLOADED
    assert offer(admission, ask("q"), stretch=9.0) is None


def test_a_query_of_which_nothing_is_heard_gives_its_share_back():
    """A producer that went away does not hold capacity for ever."""
    admission = Admission(RULES)
    offer(admission, ask("q"))
    admission.tidy(49.0)
    assert "q" in admission.demand
    admission.tidy(51.0)
    assert "q" not in admission.demand


def test_a_hog_does_not_push_out_a_small_tenant():
    """One asks for eight times the capacity, another for a tenth of it, and gets that."""
    admission = Admission(AdmissionRules(margin=0.6, horizon_s=60.0))
    got = {"hog": [0, 0], "small": [0, 0]}
    for tick in range(4_000):
        now_s = tick * 0.5
        admission.tidy(now_s)
        tenants = ["hog"] * 8 + (["small"] if tick % 10 == 0 else [])
        for number, tenant in enumerate(tenants):
            asked = ask(f"{tick}-{number}", tenant=tenant, deadline_s=now_s + 50.0, work_s=5.0)
            got[tenant][0] += 1
            got[tenant][1] += admission.offer(asked, now_s, RATE, 1.0) is None
    assert got["small"][1] > 0.9 * got["small"][0]
    assert 0 < got["hog"][1] < 0.3 * got["hog"][0]


def test_shares_are_max_min_fair_by_weight():
    """Who asks for less than the level gets all; the others share the rest by weight."""
    shares = Shares(100.0, {"c": 3.0})
    for tenant, rate in (("a", 1.0), ("b", 9.0), ("c", 20.0)):
        shares.asks(tenant, rate * 100.0, 0.0)
    assert [shares.is_above(one, 9.0, 0.0) for one in "abc"] == [False, True, True]
    assert not shares.is_above("c", 100.0, 0.0)  # enough for all
    shares.gets("b", 199.0, 0.0)
    assert not shares.has_had_enough("b", 9.0, 0.0)  # (9 - 1) / 4 = 2 per weight
    shares.gets("b", 2.0, 0.0)
    assert shares.has_had_enough("b", 9.0, 0.0)


def test_one_tenant_alone_is_never_above_its_share():
    """Without others there is nothing to share."""
    shares = Shares(100.0, {})
    shares.asks("a", 1e6, 0.0)
    assert not shares.is_above("a", 1.0, 0.0)


def test_tenants_of_long_ago_are_forgotten():
    """Names come from producers: they must not fill the memory."""
    shares = Shares(1.0, {})
    for index in range(100):
        shares.asks(f"t{index}", 1.0, 0.0)
    shares.forget(11.0)
    shares.asks("a", 2.0, 11.0)
    assert not shares.is_above("a", 1.0, 11.0)


@given(st.lists(st.tuples(st.floats(1, 100), st.floats(0.1, 100)), max_size=30))
def test_the_density_is_that_of_the_open_queries(queries: list[tuple[float, float]]):
    """Adding, renewing and removing leaves exactly the shares of those that are open."""
    demand = Demand()
    for index, (deadline_s, work_s) in enumerate(queries):
        demand.add(f"q{index % 7}", deadline_s, work_s, 0.0)
    last = {f"q{index % 7}": pair for index, pair in enumerate(queries)}
    assert demand.density == pytest.approx(sum(work / due for due, work in last.values()))
    late = demand.take_late(50.0)
    assert sorted(late) == sorted(one for one, (due, _) in last.items() if due <= 50.0)
    assert len(demand) == len(last) - len(late)


def test_a_hopeless_call_goes_behind_every_other_and_keeps_its_order_there():
    """Demotion keeps the order among the demoted, at any time scale."""
    assert is_hopeless(10.0, 20.0, 11.0)
    assert not is_hopeless(10.0, 20.0, 10.0)
    now_s = 1.8e9 * 100
    scores = [now_s - 3_600.0, now_s, now_s + 86_400.0]
    assert max(scores) < demoted(scores[0]) < demoted(scores[1])
