"""The dispatcher through its real wiring, on the in-process broker."""

from collections import Counter

import msgpack
import msgspec
import pytest

from shared.contracts.codec import encode
from shared.contracts.messages import (
    MAX_DETAIL,
    AlphaUpdate,
    CancelQuery,
    Needs,
    ReplyTo,
    SpeedUpdate,
    WorkflowProfile,
)
from shared.contracts.topics import CANCELLATIONS, CONTROL, STAGE_REQUESTS
from shared.domain.instance import LatencyModel
from shared.domain.profile import StageEstimate, WorkflowShape
from shared.errors import ConfigError
from shared.scheduling.profiles import Predictor
from tests.support.dispatching import TOPICS, Mesh, make_request


@pytest.fixture
async def mesh() -> Mesh:
    """Return a mesh without instances."""
    return await Mesh().open()


async def test_every_readable_call_gets_one_instance_record_or_one_outcome(mesh: Mesh):
    """Each call ends in exactly one place, and every offset is committed."""
    await mesh.instance("a")
    await mesh.instance("b", decode_s=0.058)
    good = [make_request(f"good-{i}") for i in range(40)]
    foreign = [make_request(f"foreign-{i}", model="other") for i in range(10)]
    empty = [make_request(f"empty-{i}", prompt=None) for i in range(10)]
    async with mesh.running():
        for index in range(10):
            await mesh.submit(*good[index * 4 : index * 4 + 4], foreign[index], empty[index])
            await mesh.submit_raw(b"\xc1 garbage", index % 3)
        await mesh.until(lambda: _has_ended(mesh, 60, 10))
        await mesh.pass_time(1)
    bound = Counter(call.request.request_id for call in await mesh.bound())
    ended = Counter(outcome.request_id for outcome in await mesh.outcomes())
    assert bound == Counter(call.request_id for call in good)
    assert ended == Counter(call.request_id for call in (*foreign, *empty))
    assert len(await mesh.dead_letters()) == 10
    ends = Counter(record.tp.partition for record in await mesh.records(STAGE_REQUESTS))
    assert {p: mesh.committed(STAGE_REQUESTS, partition=p) for p in ends} == dict(ends)


async def _has_ended(mesh: Mesh, calls: int, dead_letters: int) -> bool:
    ended = len(await mesh.bound()) + len(await mesh.outcomes())
    return ended >= calls and len(await mesh.dead_letters()) >= dead_letters


async def test_the_budget_of_a_stage_is_its_share_of_what_is_left(mesh: Mesh):
    """t_slo = (SLO - elapsed) * stage / (stage + remaining), with the shape from `control`."""
    shape = WorkflowShape(
        workflow="w",
        stages={
            "one": StageEstimate(input_tokens=1_000, output_tokens=101),
            "two": StageEstimate(input_tokens=1_000, output_tokens=101),
        },
        remaining={"one/0": {"two": 3.0}, "two/0": {}},
    )
    await mesh.publish(CONTROL, WorkflowProfile(shape=shape, revision=1), key="profile/w")
    instance = await mesh.instance()
    async with mesh.running():
        arrival_s = mesh.clock.now_s()
        await mesh.submit(make_request("c1", query_id="q", workflow="w", stage="one", slo_s=100.0))
        await mesh.until(instance.received)
        await mesh.clock.advance(20)
        await instance.say()
        await mesh.submit(
            make_request(
                "c2", query_id="q", workflow="w", stage="two", slo_s=100.0, arrival_s=arrival_s
            )
        )
        first, second = await mesh.until(lambda: _received(instance, 2))
    assert first.request.t_slo_s == pytest.approx(25.0)
    assert first.request.ready_at_s == first.request.arrival_s == arrival_s
    assert second.request.t_slo_s == pytest.approx(80.0)
    assert first.deadline_s == second.deadline_s == arrival_s + 100.0
    assert first.queue_score == pytest.approx(arrival_s + 25.0 - first.t_comp_s)


async def _received(instance, count: int):
    calls = await instance.received()
    return calls if len(calls) >= count else None


async def test_a_late_query_gets_its_negative_remainder_as_budget(mesh: Mesh):
    """Once the deadline has passed there is no share: order among late queries is by deadline."""
    instance = await mesh.instance()
    async with mesh.running():
        arrival_s = mesh.clock.now_s() - 90.0
        await mesh.submit(make_request("c", arrival_s=arrival_s, slo_s=60.0))
        (call,) = await mesh.until(instance.received)
    assert call.request.t_slo_s == pytest.approx(-30.0)
    assert call.queue_score == pytest.approx(arrival_s + 60.0 - call.t_comp_s)


async def test_a_call_without_slo_gets_its_tenants_default_or_five_times_the_isolated_time(
    mesh: Mesh,
):
    """The SLO is filled in, and the call says that it was."""
    instance = await mesh.instance()
    async with mesh.running(tenant_slo_s={"acme": 77.0}):
        await mesh.submit(
            make_request("t", slo_s=None, tenant="acme"),
            make_request("d", slo_s=None),
            make_request("g", slo_s=33.0),
            make_request("f", slo_s=0.001),
        )
        calls = await mesh.until(lambda: _received(instance, 4))
    slo = {c.request.request_id: (c.request.slo_s, c.request.slo_defaulted) for c in calls}
    assert slo["t"] == (77.0, True)
    assert slo["g"] == (33.0, False)
    assert slo["f"] == (0.5, False)  # the floor
    default = next(c.request for c in calls if c.request.request_id == "d")
    assert default.slo_defaulted
    isolated_s = Predictor().isolated_s("default", "call", [instance.spec])
    assert default.slo_s == pytest.approx(5 * isolated_s)


@pytest.mark.parametrize(
    ("changes", "reason", "word"),
    [
        ({"slo_s": 0.0}, "undecodable", "slo_s"),
        ({"max_tokens": -5}, "undecodable", "max_tokens"),
        ({"version": 99}, "future_version", "99"),
        ({"prompt": None}, "invalid_call", "neither"),
        ({"messages": [{"role": "user", "content": "x"}]}, "invalid_call", "both"),
        ({"model": "unheard-of"}, "no_eligible_instance", "unheard-of"),
        ({"needs": {"features": ["tools"]}}, "no_eligible_instance", "tools"),
        ({"needs": {"context_tokens": 9_000_000}}, "no_eligible_instance", "9000000"),
    ],
)
async def test_an_impossible_call_is_rejected_with_a_reason_and_a_detail(
    mesh: Mesh, changes: dict[str, object], reason: str, word: str
):
    """The producer learns on its own reply partition why its call was refused."""
    await mesh.instance()
    raw = msgpack.packb(msgpack.unpackb(encode(make_request("bad"))) | changes)
    async with mesh.running():
        await mesh.submit_raw(raw)
        (outcome,) = await mesh.until(mesh.outcomes)
        await mesh.pass_time(1)
        assert mesh.committed(STAGE_REQUESTS) == 1
    assert (outcome.request_id, outcome.query_id) == ("bad", "q-bad")
    assert (outcome.kind, outcome.reason) == ("rejected", reason)
    assert word in outcome.detail
    (record,) = await mesh.records("stage-results")
    assert record.tp.partition == 1
    is_dead_letter = reason in {"undecodable", "future_version"}
    assert len(await mesh.dead_letters()) == is_dead_letter


async def test_only_a_text_that_surely_does_not_fit_is_refused(mesh: Mesh):
    """Of 20,000 and 40,000 bytes on a context of 2,048 the engine decides about the first."""
    instance = await mesh.instance(max_context_tokens=2_048)
    async with mesh.running():
        await mesh.submit(
            make_request("perhaps", prompt="x" * 20_000, max_tokens=10),
            make_request("never", prompt="x" * 40_000, max_tokens=10),
        )
        (bound,) = await mesh.until(instance.received)
        (outcome,) = await mesh.until(mesh.outcomes)
    assert (bound.request.request_id, bound.predicted_input_tokens) == ("perhaps", 5_000)
    assert (outcome.request_id, outcome.reason) == ("never", "no_eligible_instance")
    assert "a context of at least 2510 tokens" in outcome.detail


async def test_a_text_likely_too_long_waits_for_a_large_instance_that_is_away(mesh: Mesh):
    """A small one might refuse it for good; it gets the call where the large one stays away."""
    small = await mesh.instance("small", max_context_tokens=2_048)
    large = await mesh.instance("large", max_context_tokens=8_192)
    await large.say("draining")
    async with mesh.running(no_instance_grace_s=10.0):
        await mesh.submit(make_request("first", prompt="x" * 20_000))
        await mesh.pass_time(3, beating=[small])
        assert await small.received() == []
        await large.say()
        (call,) = await mesh.until(large.received)
        assert call.request.request_id == "first"
        await large.say("draining")
        await mesh.submit(make_request("second", prompt="x" * 20_000))
        await mesh.pass_time(15, beating=[small])
        (call,) = await mesh.until(small.received)
        assert call.request.request_id == "second"


async def test_where_reply_to_is_unreadable_the_refusal_goes_to_partition_0(mesh: Mesh):
    """A readable request_id is always answered."""
    raw = msgpack.packb({"type": "stage_request", "request_id": "r", "reply_to": "nowhere"})
    async with mesh.running():
        await mesh.submit_raw(raw)
        (outcome,) = await mesh.until(mesh.outcomes)
    (record,) = await mesh.records("stage-results")
    assert (record.tp.partition, outcome.request_id, outcome.query_id) == (0, "r", "r")


@pytest.mark.parametrize(
    "reply_to", [ReplyTo(partition=99), ReplyTo(topic="control"), ReplyTo(topic="instance-states")]
)
async def test_a_call_that_cannot_be_answered_is_a_dead_letter(mesh: Mesh, reply_to: ReplyTo):
    """No outcome is written where nobody reads, nor into a topic that is not for outcomes."""
    await mesh.instance()
    before = len(await mesh.records("control")) + len(await mesh.records("instance-states"))
    async with mesh.running(probe_interval_s=1e6):
        await mesh.submit(make_request("r", reply_to=reply_to))
        (letter,) = await mesh.until(mesh.dead_letters)
        await mesh.submit(make_request("next"))
        await mesh.until(mesh.bound)
    assert letter.error == "invalid_call"
    assert "reply_to" in letter.detail
    assert letter.topic == STAGE_REQUESTS
    assert await mesh.outcomes() == []
    states = [r for r in await mesh.records("instance-states") if b"probe" not in (r.key or b"")]
    assert len(await mesh.records("control")) + len(states) == before


async def test_a_repeated_delivery_is_dropped_and_a_later_attempt_is_not(mesh: Mesh):
    """Deliveries are told apart by (request_id, attempt)."""
    instance = await mesh.instance()
    request = make_request("r")
    async with mesh.running():
        await mesh.submit(request, request)
        (bound,) = await mesh.until(instance.received)
        await mesh.submit(request)
        again = msgspec.structs.replace(bound.request, attempt=1)
        await mesh.submit(again)
        calls = await mesh.until(lambda: _received(instance, 2))
        await mesh.submit(again, make_request("last"))
        calls = await mesh.until(lambda: _received(instance, 3))
    assert [(c.request.request_id, c.request.attempt) for c in calls] == [
        ("r", 0),
        ("r", 1),
        ("last", 0),
    ]
    assert mesh.metrics.totals()["hexflow_duplicates_dropped_total{topic=stage-requests}"] == 3


async def test_a_call_handed_back_keeps_its_ready_time_and_budget(mesh: Mesh):
    """Only its costs are computed anew."""
    instance = await mesh.instance()
    now_s = mesh.clock.now_s()
    request = make_request(
        "r", attempt=2, ready_at_s=now_s - 20, t_slo_s=4.5, arrival_s=now_s - 43, slo_s=50.0
    )
    async with mesh.running():
        await mesh.submit(request)
        (bound,) = await mesh.until(instance.received)
    assert bound.request == request
    assert bound.deadline_s == now_s + 7.0


async def test_times_invented_by_a_producer_are_not_believed(mesh: Mesh):
    """A first attempt's ready time is the broker's, and an impossible arrival is replaced."""
    instance = await mesh.instance()
    now_s = mesh.clock.now_s()
    async with mesh.running():
        await mesh.submit(
            make_request("future", arrival_s=now_s + 1_000.0),
            make_request("past", arrival_s=5.0),
            make_request("ready", ready_at_s=1.0, t_slo_s=-1e9),
        )
        calls = await mesh.until(lambda: _received(instance, 3))
    assert {c.request.arrival_s for c in calls} == {now_s}
    assert {c.request.ready_at_s for c in calls} == {now_s}
    assert all(0 < c.request.t_slo_s <= 60 for c in calls)


async def test_later_calls_of_a_query_inherit_its_arrival(mesh: Mesh):
    """A producer that names no arrival still gets one deadline per query."""
    instance = await mesh.instance()
    async with mesh.running():
        await mesh.submit(make_request("c1", query_id="q", slo_s=None))
        await mesh.until(instance.received)
        await mesh.clock.advance(2)
        await mesh.submit(make_request("c2", query_id="q", slo_s=None))
        first, second = await mesh.until(lambda: _received(instance, 2))
    assert second.request.ready_at_s == first.request.ready_at_s + 2
    assert second.deadline_s == first.deadline_s


async def test_a_call_waits_for_an_instance_to_appear(mesh: Mesh):
    """With no instance live a call waits within the grace, and goes out when one comes."""
    async with mesh.running():
        await mesh.submit(make_request("r"))
        await mesh.pass_time(20)
        assert await mesh.outcomes() == []
        instance = await mesh.instance()
        (bound,) = await mesh.until(instance.received)
    assert bound.request.request_id == "r"


async def test_after_the_grace_a_call_without_instances_is_rejected(mesh: Mesh):
    """Nobody waits for ever for a fleet that does not come."""
    async with mesh.running():
        await mesh.submit(make_request("r"))
        await mesh.pass_time(29)
        assert await mesh.outcomes() == []
        await mesh.pass_time(3)
        (outcome,) = await mesh.until(mesh.outcomes)
    assert (outcome.kind, outcome.reason) == ("rejected", "no_eligible_instance")


async def test_a_call_waits_for_an_eligible_instance_that_restarts(mesh: Mesh):
    """While an eligible instance is known, others being live is no reason to refuse."""
    other = await mesh.instance("other", model="other")
    mine = await mesh.instance("mine")
    await mine.say("draining")
    async with mesh.running():
        await mesh.submit(make_request("r"))
        await mesh.pass_time(10, beating=[other])
        assert await mesh.outcomes() == []
        await mine.begin()
        await mine.say()
        (bound,) = await mesh.until(mine.received)
    assert bound.request.request_id == "r"


async def test_an_outage_of_the_broker_is_no_silence_of_its_instances(mesh: Mesh):
    """A call that was held when the broker went away waits for the instances to be heard again."""
    mine, other = await mesh.instance("mine"), await mesh.instance("other", model="other")
    async with mesh.running():
        await mesh.pass_time(2, beating=[mine, other])
        mesh.broker.refuse_publish = lambda topic: topic == TOPICS.instance("mine")
        await mesh.submit(make_request("held"))
        await mesh.pass_time(1, beating=[mine, other])
        mesh.broker.is_down = True
        await mesh.submit(make_request("unread"))
        await mesh.pass_time(60)
        mesh.broker.is_down = False
        mesh.broker.refuse_publish = lambda _: False
        await mesh.pass_time(5, beating=[other])
        assert await mesh.outcomes() == []
        await mine.say()
        await mesh.until(lambda: _received(mine, 2))


async def test_a_silent_instance_gets_no_calls(mesh: Mesh):
    """After two missed heartbeats an instance is not offered, long before it counts as dead."""
    loud, silent = await mesh.instance("loud", decode_s=0.06), await mesh.instance("silent")
    async with mesh.running():
        await mesh.pass_time(3, beating=[loud])
        await mesh.submit(*(make_request(f"r{i}") for i in range(10)))
        await mesh.until(lambda: _received(loud, 10))
    assert await silent.received() == []


async def test_an_old_state_is_no_sign_of_life_at_start(mesh: Mesh):
    """A dispatcher that starts reads a state of yesterday and waits for a fresh heartbeat."""
    instance = await mesh.instance()
    await mesh.clock.advance(60)
    async with mesh.running(no_instance_grace_s=100.0):
        await mesh.submit(make_request("r"))
        await mesh.pass_time(1)
        assert await instance.received() == []
        await instance.say()
        await mesh.until(instance.received)


async def test_full_instances_are_not_offered_and_the_newest_waiting_calls_are_refused(mesh: Mesh):
    """Queues are bounded here too; what waits goes out when an instance reports room."""
    instance = await mesh.instance()
    await instance.say(queue_bound=2, num_waiting=1)
    async with mesh.running(pending_bound=3):
        await mesh.submit(*(make_request(f"r{i}", query_id="q") for i in range(6)))
        (refused, *more) = await mesh.until(lambda: _outcomes(mesh, 2))
        assert await _received(instance, 1)
        await instance.say(queue_bound=2, num_waiting=0, accounted_offset=0)
        calls = await mesh.until(lambda: _received(instance, 3))
    assert {o.reason for o in (refused, *more)} == {"queue_full"}
    assert {o.request_id for o in (refused, *more)} == {"r4", "r5"}
    assert [c.request.request_id for c in calls] == ["r0", "r1", "r2"]


async def _outcomes(mesh: Mesh, count: int):
    found = await mesh.outcomes()
    return found if len(found) >= count else None


async def test_an_instance_without_topic_is_passed_over(mesh: Mesh):
    """A call whose instance's topic does not exist goes to another instance."""
    await mesh.instance("ghost", topic=False)
    real = await mesh.instance("real", decode_s=0.06)
    async with mesh.running():
        await mesh.submit(*(make_request(f"r{i}") for i in range(8)))
        calls = await mesh.until(lambda: _received(real, 8))
    assert len({c.request.request_id for c in calls}) == 8


async def test_own_assignments_count_until_the_instance_has_accounted_for_them(mesh: Mesh):
    """The queue term is the published backlog plus exactly the assignments after its offset."""
    instance = await mesh.instance()
    async with mesh.running(alpha=0.0):
        await mesh.submit(make_request("r0", query_id="q"))
        (first,) = await mesh.until(lambda: _received(instance, 1))
        await mesh.submit(make_request("r1", query_id="q"))
        (_, second) = await mesh.until(lambda: _received(instance, 2))
        await instance.say(accounted_offset=0, backlog_s=100.0, foreign_s=7.0)
        await mesh.clock.settle()
        await mesh.submit(make_request("r2", query_id="q"))
        (_, _, third) = await mesh.until(lambda: _received(instance, 3))
    assert first.terms.t_queue_s == pytest.approx(0.05)
    assert second.terms.t_queue_s == pytest.approx(first.t_comp_s)
    assert third.terms.t_queue_s == pytest.approx(107.0 + second.t_comp_s)


async def test_alpha_from_control_is_used_and_an_older_revision_is_ignored(mesh: Mesh):
    """The highest revision wins, whatever the order of arrival."""
    instance = await mesh.instance()
    for revision, alpha in ((2, 0.7), (1, 0.3)):
        update = AlphaUpdate(pool="default", alpha=alpha, revision=revision)
        await mesh.publish(CONTROL, update, key="alpha/default")
    async with mesh.running():
        await mesh.submit(make_request("r0"))
        (call,) = await mesh.until(instance.received)
        update = AlphaUpdate(pool="default", alpha=0.02, revision=3)
        await mesh.publish(CONTROL, update, key="alpha/default")
        await mesh.clock.settle()
        await mesh.pass_time(1, beating=[instance])
        await mesh.submit(make_request("r1"))
        (_, later) = await mesh.until(lambda: _received(instance, 2))
    assert (call.terms.alpha, later.terms.alpha) == (0.7, 0.02)
    assert call.terms.policy == "hexgen-flow"
    assert call.dispatcher_id == "d1"


async def test_a_call_of_a_cancelled_query_ends_cancelled(mesh: Mesh):
    """A tombstone that overtook its call ends it; one that comes while it waits does too."""
    await mesh.instance()
    until_s = mesh.clock.now_s() + 100
    await mesh.publish(CANCELLATIONS, CancelQuery(query_id="gone", until_s=until_s), key="gone")
    async with mesh.running():
        await mesh.submit(make_request("early", query_id="gone"))
        await mesh.until(lambda: _outcomes(mesh, 1))
        await mesh.instances["a"].say("draining")
        await mesh.clock.settle()
        await mesh.pass_time(0.5)
        await mesh.submit(make_request("waiting", query_id="later"))
        await mesh.pass_time(0.5)
        await mesh.publish(
            CANCELLATIONS, CancelQuery(query_id="later", until_s=until_s), key="later"
        )
        outcomes = await mesh.until(lambda: _outcomes(mesh, 2))
    assert {(o.request_id, o.kind) for o in outcomes} == {
        ("early", "cancelled"),
        ("waiting", "cancelled"),
    }
    assert await mesh.bound() == []


async def test_a_tombstone_that_names_a_call_spares_its_siblings(mesh: Mesh):
    """One call of a query is cancelled alone; the query's other calls go on."""
    await mesh.instance()
    until_s = mesh.clock.now_s() + 100
    await mesh.publish(CANCELLATIONS, CancelQuery(query_id="r1", until_s=until_s), key="r1")
    async with mesh.running():
        await mesh.submit(make_request("r1", query_id="q"))
        await mesh.submit(make_request("r2", query_id="q"))
        (outcome,) = await mesh.until(lambda: _outcomes(mesh, 1))
        (call,) = await mesh.until(lambda: _received(mesh.instances["a"], 1))
    assert (outcome.request_id, outcome.kind) == ("r1", "cancelled")
    assert call.request.request_id == "r2"


async def test_features_and_adapters_choose_the_instances(mesh: Mesh):
    """An adapter is served by an instance that offers it, in the pool of its base model."""
    await mesh.instance("plain")
    rich = await mesh.instance("rich", adapters=("lora",), features=("tools",))
    async with mesh.running():
        await mesh.submit(
            make_request("r0", model="lora"), make_request("r1", needs=Needs(features=("tools",)))
        )
        calls = await mesh.until(lambda: _received(rich, 2))
    assert {c.request.request_id for c in calls} == {"r0", "r1"}


async def test_a_refusal_quotes_a_call_only_so_far(mesh: Mesh):
    """A call that asks for thousands of features gets an outcome far smaller than itself."""
    request = make_request("r", needs=Needs(features=("a",) * 10_000))
    await mesh.instance()
    async with mesh.running():
        await mesh.submit(request)
        (outcome,) = await mesh.until(mesh.outcomes)
    assert (outcome.reason, len(outcome.detail)) == ("no_eligible_instance", MAX_DETAIL)


async def test_meshes_that_share_a_cluster_share_no_group(mesh: Mesh):
    """The groups carry the topics' prefix: a rebalance of one mesh does not stop another."""
    async with mesh.running():
        await mesh.until(lambda: len(mesh.broker.consumers) == 2)
    assert mesh.broker.consumers.keys() == {"t.dispatcher", "t.recovery"}


async def test_the_trace_context_travels_on(mesh: Mesh):
    """The W3C header of the request is on the instance's record too."""
    await mesh.instance()
    parent = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with mesh.running():
        await mesh.broker.inner.publish(
            TOPICS.name(STAGE_REQUESTS),
            encode(make_request("r")),
            headers=[("traceparent", parent)],
        )
        (record,) = await mesh.until(lambda: mesh.records("instance.a"))
    assert dict(record.headers)["traceparent"] == parent


async def test_an_unreadable_state_or_control_record_is_skipped(mesh: Mesh):
    """Poison on a followed topic is counted and blocks nothing."""
    for topic in ("instance-states", CONTROL, CANCELLATIONS):
        await mesh.broker.inner.publish(TOPICS.name(topic), b"\xc1", key=b"x")
    instance = await mesh.instance()
    async with mesh.running():
        await mesh.submit(make_request("r"))
        await mesh.until(instance.received)
    totals = mesh.metrics.totals()
    assert totals["hexflow_records_unreadable_total{reason=undecodable,topic=control}"] == 1


async def test_one_absurd_instance_or_profile_does_not_spoil_the_calls_of_others(mesh: Mesh):
    """Whatever is valid on the wire, every record the dispatcher writes is valid too."""
    await mesh.instance("good")
    absurd = LatencyModel(prefill_s_per_token=1e6, weights_s=1e6, overhead_s=1e6, seq_s=1e6)
    await mesh.instance("absurd", latency=absurd, max_batched_tokens=1)
    await mesh.publish(
        CONTROL, SpeedUpdate(instance_id="absurd", factor=1e300, revision=1), key="speed/absurd"
    )
    huge = StageEstimate(input_tokens=1e12, output_tokens=1e12)
    shape = WorkflowShape(
        workflow="w", stages={"s": huge}, remaining={"s/0": {"s": 1e12, "t": 0.0}}
    )
    await mesh.publish(CONTROL, WorkflowProfile(shape=shape, revision=1), key="profile/w")
    async with mesh.running():
        await mesh.submit(
            make_request("r0"),
            make_request("r1", workflow="w", stage="s", slo_s=None, max_tokens=5),
            make_request("r2", workflow="w", stage="s", slo_s=None, input_tokens_estimate=3),
        )
        await mesh.until(lambda: _has_ended(mesh, 3, 0))
    assert {c.request.request_id for c in await mesh.bound()} >= {"r0", "r1"}


async def test_an_unknown_policy_is_refused_at_start(mesh: Mesh):
    """A wrong policy name is a configuration error, not a crash at the first call."""
    with pytest.raises(ConfigError, match="nonsense"):
        async with mesh.running(policy="nonsense"):
            pass


async def test_a_tenant_that_floods_pushes_out_only_its_own_calls(mesh: Mesh):
    """At the bounds the newest call of the tenant with the most waiting is refused."""
    instance = await mesh.instance()
    await instance.say(queue_bound=1, num_waiting=1)
    flood = [make_request(f"f{i}", query_id="q", tenant="flood") for i in range(8)]
    small = [make_request(f"s{i}", query_id="q", tenant="small") for i in range(2)]
    async with mesh.running(pending_bound=6, tenant_pending_bound=5):
        await mesh.submit(*flood, *small)
        refused = await mesh.until(lambda: _outcomes(mesh, 4))
    assert {outcome.request_id for outcome in refused} == {"f4", "f5", "f6", "f7"}
    assert {outcome.reason for outcome in refused} == {"queue_full"}
