"""Finds the moment at which a series changed its level, so that older samples can be left out.

Source: A. N. Pettitt, "A Non-Parametric Approach to the Change-Point Problem", Applied Statistics
28 (1979). The test compares ranks, not values, so a few outliers cannot fake a change, and it
needs no scale. It assumes independent samples; ours are only roughly so (calls of one batch slow
each other down), hence the very small level and the least effect a change must have.
"""

import math
from collections.abc import Sequence

import numpy as np

LEVEL = 1e-4
LEAST_EFFECT = 1.25
LEAST_SIDE = 20
MAX_CUTS = 8


def latest_change(
    values: Sequence[float],
    *,
    level: float = LEVEL,
    least_effect: float = LEAST_EFFECT,
    least_side: int = LEAST_SIDE,
) -> int | None:
    """Return the index of the first sample after the latest change of level, or None.

    The part after a change found is tested again, until it holds none.

    Args:
        values: Positive samples in order of time.
        level: Probability of seeing a change where there is none, per test.
        least_effect: Least ratio between the means of the two sides, > 1.
        least_side: Fewest samples on either side of a change.
    """
    start: int | None = None
    series = np.asarray(values, dtype=np.float64)
    for _ in range(MAX_CUTS):
        base = start or 0
        cut = _change(series[base:], level, least_effect, least_side)
        if cut is None:
            break
        start = base + cut
    return start


def _change(series: np.ndarray, level: float, least_effect: float, least_side: int) -> int | None:
    size = len(series)
    if size < 2 * least_side:
        return None
    ranks = _mid_ranks(series)
    # U(t): how far the ranks of the first t samples are from what equal levels would give.
    statistic = np.abs(2.0 * np.cumsum(ranks) - np.arange(1, size + 1) * (size + 1.0))
    allowed = statistic[least_side - 1 : size - least_side]
    cut = int(np.argmax(allowed)) + least_side
    top = float(statistic[cut - 1])
    chance = 2.0 * math.exp(-6.0 * top * top / (float(size) ** 3 + float(size) ** 2))
    if chance >= level or _effect(series[:cut], series[cut:]) < least_effect:
        return None
    return cut


def _mid_ranks(series: np.ndarray) -> np.ndarray:
    """Return ranks from 1; equal values share their mean rank."""
    _, inverse, counts = np.unique(series, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: np.ndarray = (ends - (counts - 1) / 2.0)[inverse]
    return ranks


def _effect(before: np.ndarray, after: np.ndarray) -> float:
    low, high = sorted((_trimmed_mean(before), _trimmed_mean(after)))
    return math.inf if low <= 0.0 < high else high / low if low > 0.0 else 1.0


def _trimmed_mean(series: np.ndarray) -> float:
    """Return the mean of all but the highest twentieth."""
    kept = np.sort(series)[: max(1, math.ceil(0.95 * len(series)))]
    return float(kept.mean())
