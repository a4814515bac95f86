"""Arrival rates as people write them: queries per second, or shares of the fleet's capacity."""

import math
import re

import msgspec

from shared.errors import ConfigError

MAX_RATES = 200
_NUMBER = re.compile(r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+)(%?)", re.IGNORECASE)


class Rate(msgspec.Struct, frozen=True):
    """A rate, absolute or relative.

    Attributes:
        value: Queries per second, or a share of the capacity.
        is_share: Which of them.
    """

    value: float
    is_share: bool = False

    def qps(self, capacity_qps: float) -> float:
        """Return queries per second on a fleet of this capacity."""
        return self.value * capacity_qps if self.is_share else self.value


def parse_rates(text: str, option: str = "--rates") -> tuple[Rate, ...]:
    """Return the rates of `0.2,0.4`, `60%`, or `50%,60%..100%` (go on in that step).

    Args:
        text: What was written.
        option: Where, for messages.

    Raises:
        ConfigError: It is none of these, or a rate is not above 0.
    """
    rates: list[Rate] = []
    for item in text.split(","):
        first, dots, last = item.partition("..")
        rates.append(_rate(first, text, option))
        if dots:
            rates += _steps(rates, _rate(last, text, option), text, option)
    if len(set(rates)) < len(rates):
        raise ConfigError(f"{option} {text!r}: a rate is named twice")
    return tuple(rates)


def _rate(text: str, whole: str, option: str) -> Rate:
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"{option} {whole!r}: {text.strip()!r} is no rate; give queries per second (0.2,0.4), "
            "shares of the fleet's capacity (50%,60%), or a series (50%,60%..100%)"
        )
    value, is_share = float(match[1]), bool(match[2])
    if not (math.isfinite(value) and value > 0.0):
        raise ConfigError(f"{option} {whole!r}: a rate must be above 0, is {text.strip()}")
    return Rate(value / 100.0 if is_share else value, is_share)


def _steps(rates: list[Rate], last: Rate, text: str, option: str) -> list[Rate]:
    if len(rates) < 2:
        raise ConfigError(
            f"{option} {text!r}: a series needs two rates before its end, as in 1,2..5"
        )
    before, start = rates[-2:]
    step = start.value - before.value
    if (
        len({before.is_share, start.is_share, last.is_share}) > 1
        or step <= 0
        or last.value < start.value
    ):
        raise ConfigError(f"{option} {text!r}: a series must rise, in one unit")
    count = math.floor((last.value - start.value) / step + 1e-9)
    if count > MAX_RATES:
        raise ConfigError(f"{option} {text!r}: more than {MAX_RATES} rates")
    # Rounding keeps 0.1 + 0.2 from being another rate than 0.3.
    return [
        Rate(round(start.value + step * number, 12), last.is_share)
        for number in range(1, count + 1)
    ]
