"""Fleets: built in, or read from a TOML file.

    [defaults]                 # optional: applies to every instance below
    model = "llama-70b"

    [[instance]]
    gpu = "A100"               # a preset; or any label together with a latency table
    id = "a100-east"           # optional: `a100-0`, `a100-1`, ... otherwise
    count = 2                  # optional, without `id`
    kv_tokens = 440_000        # any field of InstanceSpec

    [[instance]]
    gpu = "H200"
    latency = { prefill_s_per_token = 1e-4, weights_s = 0.02 }

Presets are single-stream speeds of a 70B model on the instances of HexGen-Flow
(arXiv 2505.05286); see `PRESETS`.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from shared.domain.instance import InstanceSpec, LatencyModel
from shared.domain.near_names import nearest
from shared.errors import ConfigError

INSTANCE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_INSTANCES = 10_000


def _preset(decode_s: float, prefill_tokens_per_s: float, kv_tokens: int) -> dict[str, Any]:
    latency = LatencyModel(
        weights_s=decode_s,
        prefill_s_per_token=1.0 / prefill_tokens_per_s,
        chunk_waste_tokens=64,
    )
    return {
        "kv_tokens": kv_tokens,
        "max_batched_tokens": 2_048,
        "max_num_seqs": 64,
        "latency": latency,
    }


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "A100": _preset(0.035, 5_000, 440_000),
    "L40S": _preset(0.0545, 2_900, 95_000),
    "A6000": _preset(0.058, 2_480, 95_000),
}

BUILTIN_GPUS = {
    "hetero-1": ("A100", "A100", "L40S", "A6000"),
    "hetero-2": ("A100", "A6000", "A100", "A6000"),
    "homogeneous": ("A100", "A100", "A100", "A100"),
}

_SPEC_FIELDS = tuple(
    field for field in InstanceSpec.__struct_fields__ if field not in {"instance_id", "latency"}
)
_KEYS = ("id", "count", "latency", *_SPEC_FIELDS)
_DEFAULT_KEYS = tuple(key for key in _KEYS if key not in {"id", "count"})
_LATENCY_KEYS = LatencyModel.__struct_fields__
_POSITIVE = (
    "max_context_tokens",
    "max_num_seqs",
    "max_batched_tokens",
    "kv_tokens",
    "block_tokens",
)


def builtin_fleet(name: str) -> tuple[InstanceSpec, ...]:
    """Return a built-in fleet: `hetero-1`, `hetero-2` or `homogeneous`.

    Raises:
        ConfigError: The name is unknown.
    """
    if name not in BUILTIN_GPUS:
        raise ConfigError(
            f"unknown fleet {name!r}; built in: {', '.join(BUILTIN_GPUS)}"
            f"{_nearest(name, BUILTIN_GPUS)} (or give a fleet file)"
        )
    names = _Names()
    return tuple(
        InstanceSpec(instance_id=names.next_for(gpu), gpu=gpu, **PRESETS[gpu])
        for gpu in BUILTIN_GPUS[name]
    )


def parse_fleet(text: str | bytes, source_name: str = "fleet") -> tuple[InstanceSpec, ...]:
    """Read a fleet file (TOML, see the module's text).

    Args:
        text: The file's content (bytes are UTF-8).
        source_name: Name of the file, for error messages.

    Raises:
        ConfigError: Names the table and the key, what is wrong and the nearest valid key.
    """
    data = _load_toml(text, source_name)
    _check_keys(data, ("defaults", "instance"), source_name)
    tables = data.get("instance")
    if not isinstance(tables, list) or not tables:
        raise ConfigError(f"{source_name}: at least one [[instance]] table is needed")
    defaults = data.get("defaults", {})
    if not isinstance(defaults, dict):
        raise ConfigError(f"{source_name}: 'defaults' must be a table")
    _check_keys(defaults, _DEFAULT_KEYS, f"{source_name}: [defaults]")
    names = _Names()
    specs: list[InstanceSpec] = []
    for index, table in enumerate(tables):
        place = f"{source_name}: [[instance]] {index}"
        if not isinstance(table, dict):
            raise ConfigError(f"{place}: must be a table")
        specs += _parse_instance(table, defaults, place, names)
    return tuple(specs)


def dump_fleet(specs: Sequence[InstanceSpec]) -> str:
    """Write a fleet as a TOML file that `parse_fleet` reads back to the same fleet."""
    return "\n".join(_dump_instance(spec) for spec in specs)


class _Names:
    """Hands out instance ids: `a100-0`, `a100-1`, ... and refuses a second use of one."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def take(self, instance_id: str) -> bool:
        """Reserve an id; False when it is taken."""
        if instance_id in self._taken:
            return False
        self._taken.add(instance_id)
        return True

    def next_for(self, gpu: str) -> str:
        """Return and reserve the first free id of a GPU label."""
        stem = re.sub(r"[^a-z0-9._-]+", "-", gpu.lower()).strip("._-")[:50] or "instance"
        number = 0
        while not self.take(f"{stem}-{number}"):
            number += 1
        return f"{stem}-{number}"


def _load_toml(text: str | bytes, source_name: str) -> dict[str, Any]:
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        return tomllib.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{source_name}: not valid TOML: {exc}") from exc


def _parse_instance(
    own: dict[str, Any], defaults: dict[str, Any], place: str, names: _Names
) -> list[InstanceSpec]:
    _check_keys(own, _KEYS, place)
    table = defaults | own
    count = table.get("count", 1)
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_INSTANCES:
        raise ConfigError(f"{place}: 'count' must be an integer in 1..{MAX_INSTANCES:,}")
    gpu = table.get("gpu")
    if not isinstance(gpu, str) or not gpu.strip():
        raise ConfigError(f"{place}: 'gpu' is missing; presets: {', '.join(PRESETS)}")
    fields = dict(PRESETS.get(gpu, {}))
    fields |= {key: table[key] for key in _SPEC_FIELDS if key in table}
    fields["latency"] = _parse_latency(gpu, defaults, own, place)
    return [
        _convert({"instance_id": instance_id, **fields}, place)
        for instance_id in _ids(table, gpu, count, place, names)
    ]


def _ids(table: dict[str, Any], gpu: str, count: int, place: str, names: _Names) -> list[str]:
    if "id" not in table:
        return [names.next_for(gpu) for _ in range(count)]
    instance_id = table["id"]
    if count != 1:
        raise ConfigError(f"{place}: 'id' and 'count' exclude each other; ids must be unique")
    if not isinstance(instance_id, str) or not INSTANCE_ID.fullmatch(instance_id):
        raise ConfigError(
            f"{place}: 'id' must be 1 to 64 letters, digits, '.', '_' or '-', is {instance_id!r}"
        )
    if not names.take(instance_id):
        raise ConfigError(f"{place}: 'id' {instance_id!r} is used by an earlier instance")
    return [instance_id]


def _parse_latency(
    gpu: str, defaults: dict[str, Any], own: dict[str, Any], place: str
) -> dict[str, Any]:
    preset = PRESETS.get(gpu)
    numbers = msgspec.structs.asdict(preset["latency"]) if preset else {}
    for table in (defaults.get("latency", {}), own.get("latency", {})):
        if not isinstance(table, dict):
            raise ConfigError(f"{place}: 'latency' must be a table")
        _check_keys(table, _LATENCY_KEYS, f"{place}, latency")
        numbers |= table
    missing = [key for key in ("prefill_s_per_token", "weights_s") if key not in numbers]
    if missing:
        raise ConfigError(
            f"{place}: unknown gpu {gpu!r}{_nearest(gpu, PRESETS)}; either use a preset "
            f"({', '.join(PRESETS)}) or give latency.{' and latency.'.join(missing)}"
        )
    for key, value in numbers.items():
        _check_number(value, f"{place}, latency: {key!r}", integer=key == "chunk_waste_tokens")
    if numbers["weights_s"] == 0 or numbers["prefill_s_per_token"] == 0:
        raise ConfigError(
            f"{place}, latency: 'weights_s' and 'prefill_s_per_token' must be above 0"
        )
    return numbers


def _convert(fields: dict[str, Any], place: str) -> InstanceSpec:
    for key in _POSITIVE:
        if key in fields:
            _check_number(fields[key], f"{place}: {key!r}", integer=True)
            if fields[key] == 0:
                raise ConfigError(f"{place}: {key!r} must be at least 1")
    try:
        spec = msgspec.convert(fields, InstanceSpec)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{place}: {exc}") from exc
    if not spec.model.strip():
        raise ConfigError(f"{place}: 'model' must not be empty")
    return spec


def _check_number(value: Any, what: str, *, integer: bool) -> None:
    kinds = (int,) if integer else (int, float)
    is_number = isinstance(value, kinds) and not isinstance(value, bool)
    limit = 1e12 if integer else 1e6
    if not is_number or not 0 <= value <= limit:
        kind = "an integer" if integer else "a number"
        raise ConfigError(f"{what} must be {kind} in 0..{limit:g}, is {value!r}")


def _check_keys(table: Mapping[str, Any], known: Sequence[str], place: str) -> None:
    for key in table:
        if key not in known:
            raise ConfigError(
                f"{place}: unknown key {key!r}{_nearest(key, known)}; known: {', '.join(known)}"
            )


def _nearest(word: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    near = nearest(word, known)
    return f" (did you mean {near!r}?)" if near else ""


def _dump_instance(spec: InstanceSpec) -> str:
    lines = ["[[instance]]", f"id = {_toml(spec.instance_id)}"]
    lines += [f"{key} = {_toml(getattr(spec, key))}" for key in _SPEC_FIELDS]
    latency = msgspec.structs.asdict(spec.latency)
    inner = ", ".join(f"{key} = {_toml(value)}" for key, value in latency.items())
    return "\n".join([*lines, f"latency = {{ {inner} }}", ""])


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return msgspec.json.encode(value).decode()
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    return repr(value)
