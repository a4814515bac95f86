"""Instants, token counts and seconds as other systems write them."""

import math
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, TypeVar

from shared.simulation.importing.recording import NS_PER_S
from shared.simulation.traces import MAX_TOKENS

T = TypeVar("T")

# A number is taken for the unit in which it lies between 1973 and the year 5000, or for seconds
# from any start when it is smaller.
_UNITS = ((10**11, NS_PER_S), (10**14, 10**6), (10**17, 10**3))


def instant_ns(value: Any) -> int:
    """Return an instant in nanoseconds.

    Args:
        value: ISO 8601 (without an offset: UTC), or a number of seconds, milliseconds,
            microseconds or nanoseconds since 1970; the unit is told from the size. Numbers below
            10^11 are seconds, so a log may count from any start.

    Raises:
        ValueError: It is none of these; the message says what was found.
    """
    number = _number(value)
    if number is not None:
        if number < 0:
            raise ValueError(f"{value!r} is before its clock's start")
        for limit, ns in _UNITS:
            if number < limit:
                return int(number * ns)
        if number < 10**20:
            return int(number)
        raise ValueError(f"{value!r} is too large for an instant")
    if isinstance(value, str):
        return _iso_ns(value.strip())
    raise ValueError(f"{_shown(value)} is no instant (ISO 8601 or Unix time)")


def _iso_ns(text: str) -> int:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{_shown(text)} is no instant (ISO 8601 or Unix time)") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    microseconds = (since.days * 86_400 + since.seconds) * 10**6 + since.microseconds
    if microseconds < 0:
        raise ValueError(f"{_shown(text)} is before 1970")
    return microseconds * 1_000


def tokens(value: Any, *, least: int = 1) -> int:
    """Return a token count.

    Raises:
        ValueError: It is no whole number from `least` to ten million.
    """
    number = _number(value)
    if number is None or number != number.to_integral_value():
        raise ValueError(f"{_shown(value)} is no whole number of tokens")
    if not least <= number <= MAX_TOKENS:
        raise ValueError(f"{_shown(value)} is not in {least}..{MAX_TOKENS:,}")
    return int(number)


def positive_s(value: Any) -> float:
    """Return a duration in seconds, > 0.

    Raises:
        ValueError: It is no positive number.
    """
    number = _number(value)
    if number is None or not 0 < float(number) < math.inf:
        raise ValueError(f"{_shown(value)} is no positive number of seconds")
    return float(number)


def read(parse: Callable[[Any], T], value: Any, name: str) -> T:
    """Return `parse(value)`; an error names the field.

    Raises:
        ValueError: The value cannot be read.
    """
    try:
        return parse(value)
    except ValueError as exc:
        raise ValueError(f"{name}: {exc}") from exc


def _number(value: Any) -> Decimal | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = Decimal(str(value).strip())
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def _shown(value: Any) -> str:
    return repr(value)[:60]
