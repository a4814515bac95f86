"""From bytes to calls."""

from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.dispatcher.intake import Intake, QueryMemory, Refusal
from services.dispatcher.params import DispatcherParams
from services.dispatcher.settings import DispatcherSettings
from shared.adapters.clock import ManualClock
from shared.contracts.codec import encode
from shared.contracts.messages import SimulatedLengths, StageRequest
from shared.domain.trace import PrefixPart
from shared.errors import ConfigError
from shared.ports import Record, TopicPartition
from shared.runtime.metrics import Metrics
from shared.runtime.settings import load

APPEND_UNIX_S = 1_000.0


def make_intake(**params: Any) -> Intake:
    """Return an intake on a clock at double speed."""
    clock = ManualClock(time_scale=2.0)
    found = Intake(
        clock,
        DispatcherParams(dispatcher_id="d", **params),
        Metrics("dispatcher"),
        QueryMemory(100),
    )
    found.reply_partitions = {"stage-results": 4}
    return found


def make_record(value: bytes | None) -> Record:
    """Return a record of `stage-requests`."""
    return Record(
        tp=TopicPartition("t", 0),
        offset=0,
        append_unix_s=APPEND_UNIX_S,
        key=None,
        value=value,
    )


def make_request(**fields: Any) -> StageRequest:
    """Return a valid call."""
    return StageRequest(**({"request_id": "r", "model": "m", "prompt": "p"} | fields))


def test_a_further_attempt_keeps_its_times():
    """What the mesh wrote when it handed a call back is used as it is."""
    sent = make_request(attempt=2, ready_at_s=1_990.0, arrival_s=1_950.0, slo_s=60.0, t_slo_s=-7.0)
    assert make_intake().read(make_record(encode(sent))) == sent


def test_a_further_attempt_claims_no_more_than_a_first_one_could():
    """Whoever writes it, no call of a query that never was so old gets before all others."""
    claims = {"attempt": 1, "ready_at_s": 0.0, "arrival_s": 0.0, "slo_s": 60.0, "t_slo_s": -1e15}
    intake = make_intake(max_query_age_s=100.0)
    call = intake.read(make_record(encode(make_request(**claims))))
    assert isinstance(call, StageRequest)
    assert (call.ready_at_s, call.arrival_s, call.t_slo_s) == (1_900.0, 1_800.0, -100.0)
    claims |= {"ready_at_s": 1e14, "arrival_s": 1e14, "t_slo_s": 1e14}
    call = intake.read(make_record(encode(make_request(**claims))))
    assert isinstance(call, StageRequest)
    assert (call.ready_at_s, call.arrival_s, call.t_slo_s) == (2_000.0, 2_000.0, 60.0)


def test_a_call_is_ready_when_the_broker_took_it():
    """Append times become mesh time, also at another time scale."""
    call = make_intake().read(make_record(encode(make_request())))
    assert isinstance(call, StageRequest)
    assert (call.ready_at_s, call.arrival_s) == (2_000.0, 2_000.0)


@pytest.mark.parametrize(
    ("claimed_s", "expected_s"),
    [(1_990.0, 1_990.0), (2_005.0, 2_000.0), (2_500.0, 2_000.0), (1.0, 2_000.0)],
)
def test_a_claimed_arrival_is_believed_within_bounds(claimed_s: float, expected_s: float):
    """Never later than ready; within the skew it is cut, beyond the bounds it is replaced."""
    intake = make_intake(max_query_age_s=100.0)
    call = intake.read(make_record(encode(make_request(arrival_s=claimed_s))))
    assert isinstance(call, StageRequest)
    assert call.arrival_s == expected_s


def test_an_unbelievable_arrival_is_replaced_by_the_querys_known_one():
    """A later call cannot change its query's deadline by inventing an arrival."""
    intake = make_intake(max_query_age_s=100.0)
    intake.read(make_record(encode(make_request(query_id="q", arrival_s=1_950.0))))
    call = intake.read(make_record(encode(make_request(query_id="q", arrival_s=3.0))))
    assert isinstance(call, StageRequest)
    assert call.arrival_s == 1_950.0


@given(raw=st.binary(max_size=200))
@settings(max_examples=200)
def test_no_bytes_crash_the_intake(raw: bytes):
    """Every record is a call or a refusal."""
    assert isinstance(make_intake().read(make_record(raw)), StageRequest | Refusal)


FIELDS = sorted(StageRequest.__struct_fields__)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.lists(st.integers(0, 5), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(0, 3), max_size=2),
)


@given(changes=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4))
@settings(max_examples=300)
def test_a_mutated_call_is_a_call_or_a_refusal_with_an_address(changes: dict[str, object]):
    """Where the request_id is readable somebody is told, unless reply_to leads nowhere."""
    fields = msgpack.unpackb(encode(make_request())) | changes
    found = make_intake().read(make_record(msgpack.packb(fields)))
    if isinstance(found, StageRequest):
        assert found.ready_at_s is not None
        return
    request_id = fields["request_id"]
    if isinstance(request_id, str) and 0 < len(request_id) <= 128 and not found.retry_topics:
        is_nowhere = found.bury and found.address is None
        assert is_nowhere or found.address.request_id == request_id


def test_prefix_chains_are_bounded():
    """An absurd number of parts is refused."""
    prefix = tuple(PrefixPart(str(i), 1) for i in range(65))
    found = make_intake().read(make_record(encode(make_request(prefix=prefix))))
    assert isinstance(found, Refusal)
    assert found.error.reason == "invalid_call"


def test_the_size_of_a_prompt_counts_text_only():
    """Message contents and text parts count; a replayed call's stand-in does not."""
    parts = [{"type": "text", "text": "ab"}, {"type": "image_url", "image_url": {}}, "x"]
    messages = ({"role": "user", "content": "é"}, {"role": "user", "content": parts})
    assert make_request(prompt=None, messages=messages).prompt_bytes == 4
    assert make_request(prompt="abc").prompt_bytes == 3
    lengths = SimulatedLengths(input_tokens=5, output_tokens=5)
    assert make_request(simulated=lengths).prompt_bytes is None


def test_a_query_remembers_its_chosen_slo_and_forgets_the_oldest():
    """Memory is bounded; a later arrival does not erase the SLO."""
    memory = QueryMemory(2)
    memory.remember("a", 1.0, 60.0)
    memory.remember("a", 1.0)
    assert (memory.arrival_s("a"), memory.slo_s("a")) == (1.0, 60.0)
    memory.remember("b", 2.0)
    memory.remember("c", 3.0)
    memory.remember("", 4.0)
    assert memory.arrival_s("a") is None
    assert memory.arrival_s("") is None
    assert memory.slo_s("b") is None


def test_settings_become_params_field_by_field():
    """Every setting reaches the core, and defaults agree."""
    own = DispatcherSettings(dispatcher_id="d")
    assert own.params() == DispatcherParams(dispatcher_id="d")
    assert DispatcherSettings().dispatcher_id != DispatcherSettings().dispatcher_id


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("DISPATCHER_ALPHA", "1.5", "DISPATCHER_ALPHA"),
        ("DISPATCHER_POLICY", "magic", "magic"),
        ("DISPATCHER_DEAD_AFTER_S", "2", "dead_after_s"),
        ("DISPATCHER_PENDING_BOUNDS", "5", "DISPATCHER_PENDING_BOUND"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, word: str
):
    """Bounds, contradictions and misspelt variables stop the start."""
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=word):
        load(DispatcherSettings)
