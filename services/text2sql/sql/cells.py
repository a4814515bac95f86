"""Values of a result as they travel: null, booleans, numbers, text, lists and maps of these."""

import datetime as dt
import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

MAX_CELL_CHARS = 10_000
_WIDEST_INT = 2**63


def plain_row(row: Sequence[Any]) -> tuple[Any, ...]:
    """Return a row's values as they travel."""
    return tuple(plain(value) for value in row)


def plain(value: Any) -> Any:
    """Return a value as it travels: times as ISO text, decimals as numbers, bytes as hex."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float | Decimal):
        return _number(value)
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    return _cut(_text(value))


def size_of(row: Sequence[Any]) -> int:
    """Return about how many bytes a plain row takes."""
    return sum(len(value) if isinstance(value, str) else 8 for value in row) + sum(
        len(str(value)) for value in row if isinstance(value, list | dict)
    )


def _number(value: float | Decimal) -> int | float | str:
    if not isinstance(value, int) and not math.isfinite(value):
        return str(value)
    if isinstance(value, float):
        return value
    if value == int(value):
        whole = int(value)
        return whole if -_WIDEST_INT <= whole < _WIDEST_INT else str(whole)
    return float(value)


def _text(value: object) -> str:
    if isinstance(value, dt.datetime):
        return value.isoformat(sep=" ")
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)[:MAX_CELL_CHARS].hex()
    return str(value)


def _cut(text: str) -> str:
    # A text may hold halves of surrogate pairs, which MessagePack does not carry.
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= MAX_CELL_CHARS else text[: MAX_CELL_CHARS - 1] + "…"
