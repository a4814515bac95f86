"""Means over seeds with their 95% confidence intervals (Student's t)."""

import math
from collections.abc import Sequence

import msgspec

# Two-sided 95% quantiles of Student's t by degrees of freedom; beyond the last: the normal's.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_NORMAL95 = 1.96


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """A mean over seeds.

    Attributes:
        mean: The mean; NaN without values.
        half: Half width of the 95% confidence interval; NaN with fewer than two values.
        num: How many values.
    """

    mean: float
    half: float
    num: int

    @property
    def low(self) -> float:
        """Lower end; the mean itself where there is no interval."""
        return self.mean - (self.half if math.isfinite(self.half) else 0.0)

    @property
    def high(self) -> float:
        """Upper end; the mean itself where there is no interval."""
        return self.mean + (self.half if math.isfinite(self.half) else 0.0)


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of the finite values and its confidence interval."""
    finite = [value for value in values if math.isfinite(value)]
    num = len(finite)
    if num == 0:
        return Interval(mean=math.nan, half=math.nan, num=0)
    mean = sum(finite) / num
    if num == 1:
        return Interval(mean=mean, half=math.nan, num=1)
    variance = sum((value - mean) ** 2 for value in finite) / (num - 1)
    quantile = _T95[num - 2] if num - 2 < len(_T95) else _NORMAL95
    return Interval(mean=mean, half=quantile * math.sqrt(variance / num), num=num)


def ratio_interval(upper: Sequence[float], lower: Sequence[float]) -> Interval:
    """Return the geometric mean of paired ratios; the interval is that of their logarithms.

    Args:
        upper: Values of one policy, seed by seed.
        lower: Values of the other under the same seeds.
    """
    logs = [
        math.log(a / b)
        for a, b in zip(upper, lower, strict=True)
        if math.isfinite(a) and math.isfinite(b) and a > 0.0 and b > 0.0
    ]
    found = interval(logs)
    if found.num == 0:
        return found
    mean = math.exp(found.mean)
    # The interval of a ratio is not symmetric; its wider half is given.
    half = mean * (math.exp(found.half) - 1.0) if math.isfinite(found.half) else math.nan
    return Interval(mean=mean, half=half, num=found.num)
