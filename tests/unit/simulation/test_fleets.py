"""Fleets, built in and from files."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.domain.instance import InstanceSpec, LatencyModel
from shared.errors import ConfigError
from shared.simulation.fleets import BUILTIN_GPUS, builtin_fleet, dump_fleet, parse_fleet


def _error(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_fleet(text, "f.toml")
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "gpus"),
    [
        ("hetero-1", ["A100", "A100", "L40S", "A6000"]),
        ("hetero-2", ["A100", "A6000", "A100", "A6000"]),
        ("homogeneous", ["A100"] * 4),
    ],
)
def test_built_in_fleets_have_the_published_instances(name: str, gpus: list[str]) -> None:
    """Four instances each, with unique ids."""
    fleet = builtin_fleet(name)
    assert [spec.gpu for spec in fleet] == gpus
    assert len({spec.instance_id for spec in fleet}) == 4
    assert fleet[0].instance_id == "a100-0"


def test_presets_have_the_documented_speeds() -> None:
    """Decode seconds per token, prompt tokens per second and cache of the three GPUs."""
    by_gpu = {spec.gpu: spec for spec in builtin_fleet("hetero-1")}
    found = {
        gpu: (
            spec.latency.weights_s,
            round(1 / spec.latency.prefill_s_per_token),
            spec.kv_tokens,
            spec.max_batched_tokens,
            spec.latency.chunk_waste_tokens,
            spec.max_num_seqs,
        )
        for gpu, spec in by_gpu.items()
    }
    assert found == {
        "A100": (0.035, 5_000, 440_000, 2_048, 64, 64),
        "L40S": (0.0545, 2_900, 95_000, 2_048, 64, 64),
        "A6000": (0.058, 2_480, 95_000, 2_048, 64, 64),
    }


def test_an_unknown_fleet_names_the_known_and_the_nearest() -> None:
    """A slip of the pen is recognised."""
    with pytest.raises(ConfigError, match=r"built in: hetero-1.*did you mean 'hetero-1'"):
        builtin_fleet("hetero1")


@pytest.mark.parametrize("name", sorted(BUILTIN_GPUS))
def test_a_written_fleet_reads_back(name: str) -> None:
    """Dump and parse are inverse for the built-in fleets."""
    fleet = builtin_fleet(name)
    assert parse_fleet(dump_fleet(fleet)) == fleet


coefficient = st.floats(0.0, 10.0)
words = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S")), min_size=1)
specs = st.builds(
    InstanceSpec,
    instance_id=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True),
    gpu=words,
    model=words,
    adapters=st.lists(words, max_size=3).map(tuple),
    features=st.lists(words, max_size=3).map(tuple),
    kv_tokens=st.integers(1, 10**9),
    prefix_caching=st.booleans(),
    latency=st.builds(
        LatencyModel,
        prefill_s_per_token=st.floats(1e-9, 1.0),
        weights_s=st.floats(1e-9, 1.0),
        overhead_s=coefficient,
        seq_s=coefficient,
        kv_s_per_token=coefficient,
        chunk_waste_tokens=st.integers(0, 1_000),
    ),
)


@given(fleet=st.lists(specs, min_size=1, max_size=4, unique_by=lambda spec: spec.instance_id))
def test_any_fleet_reads_back(fleet: list[InstanceSpec]) -> None:
    """Names in any script and every field survive."""
    assert parse_fleet(dump_fleet(fleet)) == tuple(fleet)


def test_a_count_makes_so_many_instances() -> None:
    """Ids count up across tables and skip those that are taken."""
    text = """
        [[instance]]
        gpu = "A100"
        id = "a100-1"
        [[instance]]
        gpu = "A100"
        count = 2
        [[instance]]
        gpu = "L40S"
    """
    ids = [spec.instance_id for spec in parse_fleet(text)]
    assert ids == ["a100-1", "a100-0", "a100-2", "l40s-0"]


def test_defaults_apply_to_every_instance_and_can_be_overridden() -> None:
    """The model is said once, one instance says otherwise."""
    text = """
        [defaults]
        model = "llama-70b"
        prefix_caching = false
        [[instance]]
        gpu = "A100"
        [[instance]]
        gpu = "A6000"
        model = "llama-8b"
    """
    fleet = parse_fleet(text)
    assert [(spec.model, spec.prefix_caching) for spec in fleet] == [
        ("llama-70b", False),
        ("llama-8b", False),
    ]


def test_single_numbers_of_a_preset_can_be_changed() -> None:
    """A measured overhead is added to the preset's speed."""
    text = '[[instance]]\ngpu = "A100"\nlatency = { overhead_s = 0.002 }\n'
    (spec,) = parse_fleet(text)
    expected = msgspec.structs.replace(builtin_fleet("homogeneous")[0].latency, overhead_s=0.002)
    assert spec.latency == expected


def test_any_hardware_can_be_described() -> None:
    """A label without a preset needs only its own speed."""
    text = """
        [[instance]]
        gpu = "H200 SXM"
        latency = { prefill_s_per_token = 0.0001, weights_s = 0.02 }
    """
    (spec,) = parse_fleet(text)
    assert (spec.instance_id, spec.gpu, spec.latency.weights_s) == ("h200-sxm-0", "H200 SXM", 0.02)


A100 = '[[instance]]\ngpu = "A100"\n'


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["at least one [[instance]] table is needed"]),
        ("[[instance]", ["not valid TOML"]),
        ("instance = 3", ["at least one [[instance]]"]),
        ("instance = [3]", ["[[instance]] 0", "must be a table"]),
        ('[[instances]]\ngpu = "A100"', ["unknown key 'instances'", "did you mean 'instance'"]),
        (A100 + "kv_token = 5", ["[[instance]] 0", "'kv_token'", "did you mean 'kv_tokens'"]),
        (A100 + A100 + "zzz = 5", ["[[instance]] 1", "'zzz'", "known: id, count"]),
        ('[defaults]\nmodle = "m"\n' + A100, ["[defaults]", "did you mean 'model'"]),
        ('[defaults]\nid = "m"\n' + A100, ["[defaults]", "unknown key 'id'"]),
        ("defaults = 3\n" + A100, ["'defaults' must be a table"]),
        (A100 + "latency = { weight_s = 1 }", ["latency", "did you mean 'weights_s'"]),
        (A100 + "latency = 3", ["'latency' must be a table"]),
        (A100 + "latency = { weights_s = -1 }", ["'weights_s' must be a number in 0..1e+06"]),
        (A100 + "latency = { weights_s = 0 }", ["must be above 0"]),
        (A100 + "latency = { weights_s = nan }", ["'weights_s' must be a number"]),
        (A100 + "latency = { weights_s = true }", ["'weights_s' must be a number"]),
        (A100 + "latency = { chunk_waste_tokens = 1.5 }", ["must be an integer"]),
        ('[[instance]]\ngpu = "A10"', ["unknown gpu 'A10'", "did you mean 'A100'", "A6000"]),
        ('[[instance]]\ngpu = "a100"', ["unknown gpu 'a100'", "did you mean 'A100'"]),
        ('[[instance]]\nid = "x"', ["'gpu' is missing"]),
        (A100 + 'id = "x"\n' + A100 + 'id = "x"', ["[[instance]] 1", "'x' is used by an earlier"]),
        (A100 + 'id = "x"\ncount = 2', ["'id' and 'count' exclude each other"]),
        (A100 + 'id = "no blanks"', ["'id' must be 1 to 64 letters"]),
        (A100 + "id = 7", ["'id' must be 1 to 64 letters"]),
        (A100 + "count = 0", ["'count' must be an integer in 1..10,000"]),
        (A100 + "count = true", ["'count' must be an integer"]),
        (A100 + "kv_tokens = 0", ["'kv_tokens' must be at least 1"]),
        (A100 + "kv_tokens = -4", ["'kv_tokens' must be an integer in 0.."]),
        (A100 + "kv_tokens = 1e5", ["'kv_tokens' must be an integer"]),
        (A100 + 'max_num_seqs = "64"', ["'max_num_seqs' must be an integer"]),
        (A100 + 'prefix_caching = "yes"', ["prefix_caching"]),
        (A100 + "model = 5", ["model"]),
        (A100 + 'model = ""', ["'model' must not be empty"]),
        (A100 + 'adapters = "lora"', ["adapters"]),
    ],
)
def test_mistakes_are_refused_with_table_and_key(text: str, parts: list[str]) -> None:
    """Typos, unknown hardware, duplicates and bad numbers say where they are."""
    message = _error(text)
    assert message.startswith("f.toml: ")
    for part in parts:
        assert part in message


@given(data=st.binary(max_size=100))
def test_arbitrary_bytes_are_parsed_or_refused(data: bytes) -> None:
    """No content makes the parser fail in any other way."""
    try:
        parse_fleet(data)
    except ConfigError:
        return
