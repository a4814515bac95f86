"""From HTTP bodies and headers to calls, and from outcomes to statuses."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.fields import MeshFields, mesh_fields, needs_of
from services.gateway.openai_checks import RULES
from services.gateway.openai_requests import parse_chat, parse_object, parse_text
from services.gateway.problems import Problem, problem_of
from shared.contracts.messages import CallOutcome

USER = {"role": "user", "content": "x"}
BLANK_PART = {"type": "text", "text": " "}
CONTENT = "messages[0].content"
TEXT_OF_PART = "messages[0].content[0].text"
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


def test_fields_come_from_three_places_and_headers_win():
    """Metadata, then the body's object, then headers; texts are read as the types they are."""
    body = {
        "metadata": {"hexflow_slo_s": "10", "hexflow_stage": "a", "other": "x"},
        "hexflow": {"stage": "b", "query_id": "q"},
    }
    headers = {"x-hexflow-stage": "c", "x-hexflow-parents": "p1, p2", "x-hexflow-iteration": "3"}
    assert mesh_fields(headers, body) == MeshFields(
        query_id="q", stage="c", slo_s=10.0, parents=("p1", "p2"), iteration=3
    )
    assert mesh_fields({}, {}) == MeshFields()


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"x-hexflow-slo-s": "soon"}, {}),
        ({"x-hexflow-slo-s": "-1"}, {}),
        ({"x-hexflow-slos": "1"}, {}),
        ({}, {"hexflow": {"slo_s": "nan"}}),
        ({}, {"hexflow": []}),
        ({}, {"hexflow": {"query_id": "x" * 200}}),
    ],
)
def test_a_wrong_field_is_refused(headers: dict[str, str], body: dict[str, Any]):
    """A misspelt or impossible mesh field is a 400, never ignored."""
    with pytest.raises(Problem) as caught:
        mesh_fields(headers, body)
    assert (caught.value.status, caught.value.param) == (400, "hexflow")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"model": None}, "model"),
        ({"model": ""}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ["x"]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "robot", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, TEXT_OF_PART),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None, "tool_calls": [{}]}]}, CONTENT),
        ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "messages[0].tool_calls"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"n": 2}, "n"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"n": "1"}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"stream": 0}, "stream"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"seed": 1.5}, "seed"),
        ({"stop": [1]}, "stop"),
        ({"tools": {}}, "tools"),
        ({"tools": ["x"]}, "tools"),
        ({"tool_choice": 1}, "tool_choice"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format"),
        ({"metadata": "x"}, "metadata"),
        ({"user": 7}, "user"),
        ({"stream_options": True}, "stream_options"),
        ({"logit_bias": []}, "logit_bias"),
        ({"logprobs": "yes"}, "logprobs"),
    ],
)
def test_a_wrong_chat_field_is_named(change: dict[str, Any], param: str):
    """The error says which field is wrong."""
    with pytest.raises(Problem) as caught:
        parse_chat({**CHAT, **change})
    assert (caught.value.status, caught.value.param) == (400, param)


def test_the_message_names_the_nearest_role():
    """A misspelt role is told with the one that was meant."""
    with pytest.raises(Problem, match=r"messages\[0\]\.role: .*did you mean assistant\?"):
        parse_chat({**CHAT, "messages": [{"role": "assistent", "content": "x"}]})


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]},
        {"role": "assistant", "tool_calls": [{"id": "c"}]},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c"}]},
        {"role": "assistant", "content": None, "function_call": {"name": "f"}},
        {"role": "tool", "tool_call_id": "c", "content": ""},
        {"role": "system", "content": ""},
        {"role": "user", "content": ""},
        {"role": "user", "content": [BLANK_PART]},
        {"role": "developer", "content": "x"},
        {"role": "function", "name": "f", "content": "x"},
        {"role": "user", "name": "me", "content": [{"type": "text", "text": "x"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]},
        {"role": "user", "content": [BLANK_PART, {"type": "text", "text": "x"}]},
    ],
)
def test_what_clients_really_send_is_taken(message: dict[str, Any]):
    """Calls of tools without a text, results without one, pictures: all as they came."""
    asked = parse_chat({**CHAT, "messages": [USER, message]})
    assert asked.messages == (USER, message)


def test_a_null_is_a_field_left_out():
    """Clients send null for what they do not set."""
    nothing = dict.fromkeys((*RULES, "n", "max_tokens"))
    assert parse_chat({**CHAT, **nothing}).max_tokens is None


def test_everything_else_passes_through():
    """Sampling parameters and unknown fields are told apart and kept as they are."""
    asked = parse_chat(
        {**CHAT, "top_p": 0.5, "logprobs": True, "metadata": {"a": "b"}, "n": 1, "stream": None}
    )
    assert asked.sampling == {"top_p": 0.5}
    assert asked.extra == {"logprobs": True, "metadata": {"a": "b"}}
    assert not asked.stream
    assert parse_text({"model": "m", "prompt": ["one"]}).prompt == "one"
    for prompt in (None, "", ["a", "b"], [1, 2], 3):
        with pytest.raises(Problem):
            parse_text({"model": "m", "prompt": prompt})


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"", "invalid_json"),
        (b"[1]", "invalid_json"),
        (b"{", "invalid_json"),
        (b'{"a": "\xff"}', "invalid_utf8"),
        (b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}", "invalid_json"),
        (b"[" * 200_000, "invalid_json"),
    ],
)
def test_a_body_that_is_no_object(raw: bytes, code: str):
    """Bytes that are no JSON object, or nested absurdly, are a 400 that says so."""
    with pytest.raises(Problem) as caught:
        parse_object(raw)
    assert (caught.value.status, caught.value.code) == (400, code)


@given(st.binary(max_size=200))
def test_any_bytes_are_an_object_or_a_400(raw: bytes):
    """Nothing but a Problem comes of hostile bytes."""
    try:
        assert isinstance(parse_object(raw), dict)
    except Problem as problem:
        assert problem.status == 400  # noqa: PT017 - either is right


def test_needs_follow_what_instances_declare():
    """Tools are asked of a fleet that declares them, not of one that declares nothing."""
    body = {"tools": [{}], "response_format": {"type": "json_schema"}}
    assert needs_of(body, MeshFields(), frozenset()).features == ()
    offered = frozenset({"tools", "structured_output"})
    assert needs_of(body, MeshFields(), offered).features == ("tools", "structured_output")
    assert needs_of({}, MeshFields(features=("vision",)), offered).features == ("vision",)


@pytest.mark.parametrize(
    ("kind", "reason", "is_served", "status"),
    [
        ("rejected", "queue_full", True, 429),
        ("rejected", "some_policy_word", True, 429),
        ("rejected", "no_eligible_instance", True, 400),
        ("rejected", "no_eligible_instance", False, 503),
        ("rejected", "invalid_call", True, 400),
        ("rejected", "undecodable", True, 400),
        ("rejected", "too_large", True, 413),
        ("failed", "generation_failed", True, 502),
        ("failed", "engine_unavailable", True, 503),
        ("failed", "stalled", True, 502),
        ("failed", "too_large", True, 413),
        ("evicted", "deadline_passed", True, 504),
        ("cancelled", "cancelled", True, 499),
    ],
)
def test_every_outcome_has_its_status(kind: Any, reason: str, is_served: bool, status: int):
    """Each end of a call is one HTTP status, with the outcome in the body, without text."""
    outcome = CallOutcome(request_id="r", query_id="q", kind=kind, reason=reason, text="secret")
    problem = problem_of(outcome, is_model_served=is_served, retry_after_s=3.0)
    assert problem.status == status
    assert ("retry-after" in dict(problem.headers())) is (status in (429, 503))
    body = msgspec.json.encode(problem.body())
    assert b'"outcome"' in body
    assert b"secret" not in body
