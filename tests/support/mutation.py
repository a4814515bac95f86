"""Messages that went wrong: seeded mutations of valid ones, in their bytes and in their fields."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import msgpack
import msgspec

from shared.contracts.codec import encode
from shared.contracts.messages import Message

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63 - 1, -(2**63), 2**64 - 1),
    *(0.0, -0.0, 1e308, -1e308, 1e-308, float("inf"), float("-inf"), float("nan")),
    *(
        "",
        "x",
        "x" * 5_000,
        "\u0000",
        "\ud7ff\ue000",
        "../../etc/passwd",
        "'; DROP TABLE calls; --",
    ),
    *(
        b"",
        b"\xff\xfe\x00",
        b"x" * 5_000,
        [],
        {},
        [[]],
        [None] * 100,
        {"": {}},
        {"a": [1, {"b": 2}]},
    ),
)
ODD_KEYS = ("type", "version", "unknown", "", "request_id", "x" * 300)


def mutations(samples: Sequence[Message], seed: int, count: int) -> Iterator[bytes]:
    """Yield so many mutated messages; the same seed gives the same bytes.

    Half are damaged as bytes, half in their fields; among both some are still valid.
    """
    rng = random.Random(seed)
    for _ in range(count):
        sample = rng.choice(samples)
        yield _damaged(encode(sample), rng) if rng.random() < 0.5 else _odd(sample, rng)


def _damaged(raw: bytes, rng: random.Random) -> bytes:
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 5, 20))):
        place = rng.randrange(len(data) + 1)
        match rng.randrange(6):
            case 0 if data:
                data[place % len(data)] ^= 1 << rng.randrange(8)
            case 1 if data:
                data[place % len(data)] = rng.randrange(256)
            case 2:
                del data[place:]
            case 3:
                data[place:place] = rng.randbytes(rng.randrange(1, 9))
            case 4:
                data[place:place] = data[: rng.randrange(len(data) + 1)]
            case _:
                del data[place : place + rng.randrange(1, 9)]
        if len(data) > 100_000:
            del data[100_000:]
    return rng.choice((bytes(data),) * 30 + (b"", rng.randbytes(40), b"\xc1", b"{}"))


def _odd(sample: Message, rng: random.Random) -> bytes:
    tree = msgspec.to_builtins(sample, builtin_types=(bytes,))
    for _ in range(rng.choice((1, 1, 2, 3))):
        _change(tree, rng)
    try:
        return bytes(msgpack.packb(tree, unicode_errors="surrogatepass"))
    except (ValueError, OverflowError, RecursionError):
        return encode(sample)


def _change(tree: dict[Any, Any], rng: random.Random) -> None:
    """Change one thing, at any depth."""
    node: Any = tree
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        inner = [key for key in keys if isinstance(node[key], dict | list) and node[key]]
        if not inner or rng.random() < 0.6:
            break
        node = node[rng.choice(inner)]
    if not keys:
        return
    key = rng.choice(keys)
    match rng.randrange(5):
        case 0:
            del node[key]
        case 1 if isinstance(node, dict):
            node[rng.choice(ODD_KEYS)] = rng.choice(ODD_VALUES)
        case 2 if isinstance(node[key], int | float) and not isinstance(node[key], bool):
            node[key] = node[key] * rng.choice((-1, 0, 1e3, 1e9, 1e300, 0.5))
        case _:
            node[key] = rng.choice(ODD_VALUES)
