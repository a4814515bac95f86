"""Traces in the authors' JSON form."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.domain.trace import PrefixPart
from shared.errors import ConfigError
from shared.simulation.generator import generate
from shared.simulation.traces import (
    STEP_OF_STAGE,
    dump_authors_trace,
    parse_authors_trace,
    stage_name,
)


def _call(step: str = "revise", **fields: Any) -> dict[str, Any]:
    return {"step": step, "input_length": 5_900, "output_length": 80} | fields


def _text(*queries: list[dict[str, Any]]) -> str:
    return json.dumps([{"Text2SQLRequest": calls} for calls in queries])


def _error(text: str | bytes) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_authors_trace(text, "t.json")
    return str(caught.value)


def test_steps_map_to_stages() -> None:
    """Case, blanks and the agent's suffix make no difference."""
    assert stage_name("Information Retriever") == "information_retriever"
    assert stage_name("generate_candidate_llama-agent") == "generate_candidate"
    assert stage_name(" evaluate ") == "evaluate"


def test_every_stage_is_written_as_a_step_that_reads_back() -> None:
    """The two name mappings are inverse."""
    for stage, step in STEP_OF_STAGE.items():
        assert stage_name(step) == stage


def test_consecutive_parallel_calls_are_one_stage() -> None:
    """Two candidates run side by side, two revisions one after the other."""
    candidate = "generate_candidate_llama-agent"
    steps = [candidate, candidate, "revise", "revise", "evaluate", "evaluate", "evaluate"]
    (query,) = parse_authors_trace(_text([_call(step) for step in steps]))
    assert [(s.stage, s.iteration, len(s.calls)) for s in query.stages] == [
        ("generate_candidate", 0, 2),
        ("revise", 0, 1),
        ("revise", 1, 1),
        ("evaluate", 0, 3),
    ]


def test_separated_evaluations_are_two_stages() -> None:
    """A call in between ends the parallel stage; the next one is iteration 1."""
    (query,) = parse_authors_trace(_text([_call(s) for s in ("evaluate", "revise", "evaluate")]))
    assert [(s.stage, s.iteration) for s in query.stages] == [
        ("evaluate", 0),
        ("revise", 0),
        ("evaluate", 1),
    ]


def test_queries_are_numbered_in_the_order_of_the_file() -> None:
    """Ids are unique and stable."""
    queries = parse_authors_trace(_text([_call()], [_call()]))
    assert [query.query_id for query in queries] == ["q00000", "q00001"]
    assert {query.workflow for query in queries} == {"text2sql"}


def test_calls_share_their_stages_template() -> None:
    """A revision shares the first 3,059 of its tokens with every other revision."""
    (query,) = parse_authors_trace(_text([_call()]))
    assert query.stages[0].calls[0].prefix == (PrefixPart("text2sql/revise", 3_059),)


@pytest.mark.parametrize("lengths", [(11_900, 8_040), (14_131, 10_265), (8_040, 11_900)])
def test_candidates_use_two_templates(lengths: tuple[int, int]) -> None:
    """Of two candidates the longer prompt has the longer template, even if both could hold it."""
    step = "generate_candidate_llama-agent"
    (query,) = parse_authors_trace(_text([_call(step, input_length=n) for n in lengths]))
    tokens = {call.input_tokens: call.prefix[0].tokens for call in query.stages[0].calls}
    assert tokens == {max(lengths): 9_158, min(lengths): 5_292}


def test_a_prompt_shorter_than_its_template_shares_nothing() -> None:
    """A prefix is never longer than its prompt."""
    (query,) = parse_authors_trace(_text([_call(input_length=100)]))
    assert query.stages[0].calls[0].prefix == ()


def test_bytes_with_a_byte_order_mark_are_read() -> None:
    """Files saved by some editors begin with one."""
    assert parse_authors_trace(b"\xef\xbb\xbf" + _text([_call()]).encode())


@given(seed=st.integers(0, 2**32 - 1))
def test_a_written_trace_reads_back(seed: int) -> None:
    """Dump and parse are inverse for the queries the generator makes."""
    queries = generate(3, np.random.default_rng(seed), "stress")
    assert parse_authors_trace(dump_authors_trace(queries)) == queries


def test_an_unknown_step_is_refused_with_the_known_ones() -> None:
    """The place, the step and the list are named."""
    message = _error(_text([_call()], [_call(), _call("translate")]))
    assert message.startswith("t.json: query 1, call 1: unknown step 'translate'")
    assert "generate_unit_test" in message


def test_unknown_steps_can_be_allowed_as_serial_stages() -> None:
    """Two consecutive calls of an unknown step are two stages without a prefix."""
    text = _text([_call("translate"), _call("translate")])
    (query,) = parse_authors_trace(text, allow_unknown_steps=True)
    assert [(s.stage, s.iteration, s.calls[0].prefix) for s in query.stages] == [
        ("translate", 0, ()),
        ("translate", 1, ()),
    ]


@pytest.mark.parametrize("key", ["input_length", "output_length"])
@pytest.mark.parametrize("value", [-1, 0, 10**12, 12.5, True, "12", None, [1], float("nan")])
def test_impossible_token_counts_are_refused(key: str, value: object) -> None:
    """Negative, zero, absurd and non-integer lengths name query, call and field."""
    message = _error(_text([_call(), _call(**{key: value})]))
    assert f"query 0, call 1: '{key}' must be an integer in 1..10,000,000" in message


def test_a_query_without_calls_is_refused() -> None:
    """An empty query is named."""
    assert "query 1: the query has no calls" in _error(_text([_call()], []))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "t.json:1:1: not valid JSON"),
        ("[{]", "t.json:1:3: not valid JSON"),
        ("{}", "expected a list of queries, found an object"),
        ("[]", "the trace has no queries"),
        ("[7]", "query 0: expected an object with 'Text2SQLRequest', found 7"),
        ('[{"Text2SqlRequest": []}]', "did you mean 'Text2SQLRequest'"),
        ('[{"Text2SQLRequest": {}}]', "must be a list of calls, is an object"),
        ('[{"Text2SQLRequest": [null]}]', "query 0, call 0: expected an object, found null"),
        ('[{"Text2SQLRequest": [{"stp": "revise"}]}]', "'step' is missing; did you mean 'step'"),
        ('[{"Text2SQLRequest": [{"step": 3}]}]', "'step' must be a name, is 3"),
        ('[{"Text2SQLRequest": [{"step": "revise"}]}]', "'input_length' is missing"),
        ("[" * 100_000, "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        ('[{"Text2SQLRequest": [{"step": "revise", "input_length": ' + "9" * 5_000 + "}]}]", ""),
    ],
)
def test_the_wrong_shape_is_refused_with_its_place(text: str | bytes, part: str) -> None:
    """Whatever the file holds, the error is a ConfigError that says where and what."""
    message = _error(text)
    assert message.startswith("t.json")
    assert part in message


@given(data=st.binary(max_size=200))
def test_arbitrary_bytes_are_parsed_or_refused(data: bytes) -> None:
    """No content makes the parser fail in any other way."""
    try:
        parse_authors_trace(data)
    except ConfigError:
        return


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["step", "input_length", "output_length", "Text2SQLRequest", "x"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=12,
)


@given(value=json_values)
def test_arbitrary_json_is_parsed_or_refused(value: object) -> None:
    """Any JSON of any shape ends in queries or in a ConfigError."""
    try:
        parse_authors_trace(json.dumps(value), allow_unknown_steps=True)
    except ConfigError:
        return
