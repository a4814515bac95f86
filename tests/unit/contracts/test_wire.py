"""The wire: golden bytes, versions, validation."""

import json
import os
from pathlib import Path

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.codec import (
    MAX_NESTING,
    decode,
    decode_any,
    encode,
    headers_for,
    mint_request_id,
)
from shared.contracts.messages import (
    ALL_MESSAGES,
    BoundCall,
    CallOutcome,
    CancelQuery,
    Message,
    StageRequest,
)
from shared.errors import ContractError, FutureVersion
from tests.support.message_samples import REQUEST, SAMPLES

GOLDEN = Path(__file__).parent / "golden.json"


def _name(message: Message) -> str:
    return f"{type(message).__struct_config__.tag}/{message.version}"


def _golden() -> dict[str, str]:
    found: dict[str, str] = json.loads(GOLDEN.read_text())
    if os.environ.get("WRITE_GOLDEN"):  # a person adds bytes for a new class or version by hand
        found = {**{_name(m): encode(m).hex() for m in SAMPLES}, **found}
        GOLDEN.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    return found


@pytest.mark.parametrize("sample", SAMPLES, ids=_name)
def test_bytes_written_by_an_earlier_release_still_decode_to_the_same_message(sample: Message):
    """Golden bytes of every class decode to the sample they were made from."""
    raw = bytes.fromhex(_golden()[_name(sample)])
    assert decode(raw, type(sample)) == sample


def test_every_message_class_has_a_sample_and_golden_bytes():
    """No class of the contract is without golden bytes."""
    assert {type(sample) for sample in SAMPLES} == set(ALL_MESSAGES)
    assert {_name(sample) for sample in SAMPLES} <= set(_golden())


@pytest.mark.parametrize("sample", SAMPLES, ids=_name)
def test_samples_fill_every_field(sample: Message):
    """A sample leaves no field at its default, so golden bytes cover all fields."""
    for field in msgspec.structs.fields(type(sample)):
        if field.name in {"version", "prompt", "reason", "parents", "attempt", "failed_on"}:
            continue
        assert field.required or getattr(sample, field.name) != field.default, field.name


@pytest.mark.parametrize("sample", SAMPLES, ids=_name)
def test_unknown_fields_are_ignored(sample: Message):
    """A newer release may add fields without breaking this one."""
    fields = msgpack.unpackb(encode(sample))
    fields["added_later"] = {"x": [1, 2]}
    assert decode(msgpack.packb(fields), type(sample)) == sample


@pytest.mark.parametrize("sample", SAMPLES, ids=_name)
def test_a_future_version_is_told_apart_from_garbage(sample: Message):
    """A higher version raises FutureVersion, with the request id where there is one."""
    fields = msgpack.unpackb(encode(sample))
    fields["version"] = 2
    with pytest.raises(FutureVersion) as caught:
        decode(msgpack.packb(fields), type(sample))
    expected = REQUEST.request_id if "request_id" in fields or "request" in fields else None
    assert caught.value.request_id == expected


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("input_tokens_estimate", -1, "input_tokens_estimate"),
        ("slo_s", 0, "slo_s"),
        ("slo_s", -5.0, "slo_s"),
        ("max_tokens", 0, "max_tokens"),
        ("iteration", -1, "iteration"),
        ("siblings", 0, "siblings"),
        ("model", "", "model"),
        ("prefix", [["a"]], "prefix"),
        ("messages", "hi", "messages"),
        ("arrival_s", float("nan"), "arrival_s"),
        ("slo_s", float("inf"), "slo_s"),
        ("think_s", float("inf"), "think_s"),
        ("t_slo_s", float("nan"), "t_slo_s"),
    ],
)
def test_a_readable_but_invalid_call_names_the_field_and_keeps_its_id(field, value, told):
    """The error names the field, and the request id survives so a rejection can be sent."""
    fields = msgpack.unpackb(encode(REQUEST))
    fields[field] = value
    with pytest.raises(ContractError, match=told) as caught:
        decode(msgpack.packb(fields), StageRequest)
    assert caught.value.request_id == REQUEST.request_id


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        b"\x93\x01\x02",
        b"\xa3abc",
        msgpack.packb({"type": "nonsense"}),
        b"\x81\x01\x02",
    ],
)
def test_bytes_that_are_no_message_raise_one_error(raw: bytes):
    """Whatever the bytes, the only error is ContractError."""
    with pytest.raises(ContractError):
        decode(raw, StageRequest)


def _nested(levels: int) -> bytes:
    """Return a packed value of that many lists inside each other."""
    return b"\x91" * (levels - 1) + b"\x90"


def _call_with(name: str, packed: bytes) -> bytes:
    """Return the sample call with one free-form field whose member `a` is the packed value."""
    fields = {**msgpack.unpackb(encode(REQUEST)), name: None}
    member = b"\x81" + msgpack.packb("a") + packed
    value = b"\x91" + member if name == "messages" else member
    key = msgpack.packb(name)
    return bytes(msgpack.packb(fields).replace(key + b"\xc0", key + value))


@pytest.mark.parametrize("field", ["extra", "sampling", "messages"])
@pytest.mark.parametrize(
    "packed",
    [
        msgpack.packb(msgpack.Timestamp(1, 2)),
        msgpack.packb([msgpack.ExtType(5, b"x")]),
        _nested(MAX_NESTING),
        _nested(600),
        _nested(1_000),
    ],
    ids=["timestamp", "extension", "deep", "deeper", "deepest"],
)
def test_free_form_fields_that_could_not_be_written_again_are_refused(field: str, packed: bytes):
    """A call that decodes can be encoded: what breaks the encoder is a contract error here."""
    with pytest.raises(ContractError) as caught:
        decode(_call_with(field, packed), StageRequest)
    assert caught.value.request_id == REQUEST.request_id


def test_the_deepest_call_accepted_travels_on_inside_a_bound_call():
    """The bound on nesting counts from the free-form field, so no later message is refused."""
    request = decode(_call_with("extra", _nested(MAX_NESTING - 1)), StageRequest)
    (bound,) = [sample for sample in SAMPLES if isinstance(sample, BoundCall)]
    wrapped = msgspec.structs.replace(bound, request=request)
    assert decode(encode(wrapped), BoundCall) == wrapped


@given(st.binary(max_size=300))
def test_random_bytes_never_raise_anything_else(raw: bytes):
    """Fuzz: decode returns a message or raises ContractError."""
    try:
        decode_any(raw, *ALL_MESSAGES)
    except ContractError:
        return


@given(st.data())
def test_mutated_messages_never_raise_anything_else(data: st.DataObject):
    """Fuzz on field level: one field replaced by an arbitrary value."""
    sample = data.draw(st.sampled_from(SAMPLES))
    fields = msgpack.unpackb(encode(sample))
    name = data.draw(st.sampled_from(sorted(fields)))
    fields[name] = data.draw(
        st.recursive(
            st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text(),
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
            ),
            max_leaves=5,
        )
    )
    try:
        decode_any(msgpack.packb(fields), *ALL_MESSAGES)
    except ContractError:
        return


def test_a_message_of_another_type_is_refused_with_what_was_expected():
    """A well-formed message on the wrong topic is a contract error, not a crash."""
    with pytest.raises(ContractError, match="call_outcome"):
        decode(encode(CancelQuery(query_id="q", until_s=1.0)), CallOutcome)


def test_request_ids_are_stable_and_distinct():
    """The id of a call is a pure function of its place in the query."""
    assert mint_request_id("q", "evaluate", 0, 1) == "1a32a6e1ff6b96d51309faa984935426"
    seen = {mint_request_id(q, s, i, k) for q in "ab" for s in "xy" for i in (0, 1) for k in (0, 1)}
    assert len(seen) == 16
    assert mint_request_id("q1", "x", 0, 0) != mint_request_id("q", "1x", 0, 0)


def test_headers_carry_type_version_and_trace_context():
    """Readers can route by headers without decoding the value."""
    headers = dict(headers_for(REQUEST, "00-abc-def-01"))
    assert headers == {
        "content-type": b"application/msgpack",
        "type": b"stage_request",
        "version": b"1",
        "traceparent": b"00-abc-def-01",
    }
