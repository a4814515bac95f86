"""`vtc`: fair shares per tenant."""

import math
from collections import defaultdict, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.scheduling.policies import make_policy
from shared.scheduling.policies.vtc import (
    VirtualTokenCounter,
    charge_s,
    start_tag_s,
    virtual_time_s,
)
from shared.scheduling.policy import Cost, InstanceView, WaitingCall
from tests.support.scheduling import make_call, make_view

# Charges of multiples of 3,125 tokens are multiples of 1/32: sums of them are exact.
UNIT = 3_125


class _SourceQueue:
    """The source's queue, as published: counters, argmin, lift. Outputs are charged at once."""

    def __init__(self) -> None:
        self.served: defaultdict[str, int] = defaultdict(int)
        self.waiting: defaultdict[str, deque[tuple[int, int]]] = defaultdict(deque)

    def append(self, tenant: str, arrival: int, tokens: int) -> None:
        others = [self.served[t] for t, line in self.waiting.items() if line and t != tenant]
        if not self.waiting[tenant] and others:
            self.served[tenant] = max(self.served[tenant], min(others))
        self.waiting[tenant].append((arrival, tokens))

    def take(self) -> int:
        backlogged = [tenant for tenant, line in self.waiting.items() if line]
        tenant = min(backlogged, key=lambda t: (self.served[t], self.waiting[t][0][0]))
        arrival, tokens = self.waiting[tenant].popleft()
        self.served[tenant] += tokens
        return arrival


class _ScoredQueue:
    """One instance's line under the policy: smallest score first, ties by arrival."""

    def __init__(self) -> None:
        self.policy = make_policy("vtc", 0.0)
        self.line: list[tuple[float, int]] = []

    def append(self, call: WaitingCall, arrival: int) -> None:
        view = make_view(
            num_waiting=len(self.line), head_score=min(self.line)[0] if self.line else None
        )
        self.policy.choose(call, [view], {"a": Cost(t_comp_s=1.0)}, 0.0)
        self.line.append((self.policy.queue_score(call, 1.0), arrival))

    def take(self) -> int:
        first = min(self.line)
        self.line.remove(first)
        return first[1]


def _call(arrival: int, tenant: str, inputs: int, outputs: int) -> WaitingCall:
    return make_call(
        f"r{arrival}",
        tenant=tenant,
        input_tokens=inputs * UNIT,
        output_tokens=float(outputs * UNIT),
    )


def test_prompt_tokens_cost_one_and_output_tokens_two() -> None:
    """The source's prices: 1,000 prompt and 250 output tokens are 1,500 counted tokens."""
    assert charge_s(1_000, 250.0) == pytest.approx(1_500 / 100_000)


def test_service_order_of_a_worked_example() -> None:
    """Calls of u cost 3, of v 6: u is served twice as often (counters u 0 3 6 9, v 0 6 12)."""
    queue = _ScoredQueue()
    tenants = "uuuuvv"
    for arrival, tenant in enumerate(tenants):
        outputs = 1 if tenant == "u" else 2
        queue.append(_call(arrival, tenant, outputs, outputs), arrival)
    order = [tenants[queue.take()] for _ in tenants]
    assert "".join(order) == "uvuuvu"


@given(
    events=st.lists(
        st.none() | st.tuples(st.sampled_from("uvw"), st.integers(1, 9), st.integers(0, 9)),
        max_size=60,
    )
)
def test_the_order_is_the_sources_while_anyone_waits(
    events: list[tuple[str, int, int] | None],
) -> None:
    """Arrivals and services in any order: constant scores serve as the published queue does."""
    source, scored = _SourceQueue(), _ScoredQueue()
    for arrival, event in enumerate(events):
        if event is not None:
            tenant, inputs, outputs = event
            source.append(tenant, arrival, inputs + 2 * outputs)
            scored.append(_call(arrival, tenant, inputs, outputs), arrival)
        elif len(scored.line) > 1:  # an empty queue is where the two differ on purpose
            assert scored.take() == source.take()
    while scored.line:
        assert scored.take() == source.take()


@given(
    sizes=st.lists(
        st.tuples(st.sampled_from("uv"), st.integers(1, 9), st.integers(0, 9)), max_size=60
    )
)
def test_two_waiting_tenants_never_differ_by_more_than_one_call(
    sizes: list[tuple[str, int, int]],
) -> None:
    """The source's bound: service differs by at most the largest call while both wait."""
    queue = _ScoredQueue()
    for arrival, (tenant, inputs, outputs) in enumerate(sizes):
        queue.append(_call(arrival, tenant, inputs, outputs), arrival)
    left = {tenant: sum(one == tenant for one, _, _ in sizes) for tenant in "uv"}
    served = {"u": 0, "v": 0}
    while all(left.values()):
        tenant, inputs, outputs = sizes[queue.take()]
        left[tenant] -= 1
        served[tenant] += inputs + 2 * outputs
        assert abs(served["u"] - served["v"]) <= 9 + 2 * 9


def test_a_flood_does_not_delay_another_tenant() -> None:
    """After 50 calls of u, the first call of v is next or next but one."""
    queue = _ScoredQueue()
    for arrival in range(50):
        queue.append(_call(arrival, "u", 1, 1), arrival)
    for _ in range(10):
        queue.take()
    queue.append(_call(50, "v", 1, 1), 50)
    assert 50 in {queue.take(), queue.take()}


def test_idling_earns_no_credit() -> None:
    """A tenant that comes late is lifted to those who wait: they alternate from then on."""
    queue = _ScoredQueue()
    for arrival in range(20):
        queue.append(_call(arrival, "u", 1, 1), arrival)
    for _ in range(10):
        queue.take()
    for arrival in range(20, 26):
        queue.append(_call(arrival, "v", 1, 1), arrival)
    served = [queue.take() >= 20 for _ in range(8)]
    assert served.count(True) == 4


def test_when_nobody_waits_the_clock_is_the_real_one() -> None:
    """An idle pool levels all tenants at the present instant; the clock never goes back."""
    assert virtual_time_s(5.0, 0, math.inf, 9.0) == 9.0
    assert virtual_time_s(12.0, 0, math.inf, 9.0) == 12.0


def test_while_calls_wait_the_clock_is_the_smallest_score() -> None:
    """It moves with service, and stays where it is when no head is known."""
    assert virtual_time_s(5.0, 3, 7.0, 900.0) == 7.0
    assert virtual_time_s(8.0, 3, 7.0, 900.0) == 8.0
    assert virtual_time_s(5.0, 3, math.inf, 900.0) == 5.0


@pytest.mark.parametrize(("counter_s", "expected_s"), [(3.0, 5.0), (8.0, 8.0)])
def test_a_call_starts_at_its_tenants_counter_or_at_the_lift(
    counter_s: float, expected_s: float
) -> None:
    """Whichever is larger, with the clock at 5."""
    assert start_tag_s(counter_s, 5.0) == expected_s


def test_a_dispatcher_that_starts_anew_sorts_in_behind_what_waits() -> None:
    """It knows no counters and no heads: its first call's score is the present instant."""
    policy = make_policy("vtc", 0.0)
    call = make_call(tenant="u")
    policy.choose(call, [make_view(num_waiting=7)], {"a": Cost(t_comp_s=1.0)}, 1_000.0)
    assert policy.queue_score(call, 1.0) == 1_000.0


def test_the_smallest_head_of_all_lines_counts() -> None:
    """Lines with heads at 40, 30 and unknown: a newcomer is lifted to 30."""
    policy = make_policy("vtc", 0.0)
    views: list[InstanceView] = [
        make_view("a", num_waiting=2, head_score=40.0),
        make_view("b", num_waiting=1, head_score=30.0),
        make_view("c", num_waiting=5),
    ]
    costs = {name: Cost(t_comp_s=1.0) for name in "abc"}
    call = make_call(tenant="new")
    choice = policy.choose(call, views, costs, 1_000.0)
    assert choice is not None
    assert choice.instance_id == "b"
    assert policy.queue_score(call, 1.0) == 30.0


def test_counters_of_level_tenants_are_forgotten() -> None:
    """A million tenants that come once each do not fill the memory."""
    policy = VirtualTokenCounter()
    views, costs = [make_view()], {"a": Cost(t_comp_s=1.0)}
    for number in range(10_500):
        call = make_call(tenant=f"t{number}", input_tokens=10, output_tokens=0.0)
        policy.choose(call, views, costs, float(number))
    assert len(policy._counters_s) < 1_000
