"""Percentiles of end-to-end times when some queries have not ended yet.

A query that has been running for 80 s has taken *more than* 80 s: leaving it out makes the window
look faster than it is, and most so when the mesh is overloaded.

Source: E. L. Kaplan, P. Meier, "Nonparametric Estimation from Incomplete Observations", JASA 53
(1958).
"""

import math
from collections.abc import Sequence


def censored_percentile(
    ended_s: Sequence[float], running_s: Sequence[float], percent: float
) -> float:
    """Return a percentile of durations, some of which are only known to be longer.

    Args:
        ended_s: Durations of what ended, seconds.
        running_s: For how long the rest has been running, seconds.
        percent: In (0, 100].

    Returns:
        The first duration at which the Kaplan-Meier estimate of what is still running falls to
        `1 - percent/100`; the longest one where it never does; NaN when nothing ended.

    Raises:
        ValueError: `percent` is outside (0, 100].
    """
    if not 0.0 < percent <= 100.0:
        msg = f"percent {percent} is outside (0, 100]"
        raise ValueError(msg)
    if not ended_s:
        return math.nan
    marks = sorted([(value, 0) for value in ended_s] + [(value, 1) for value in running_s])
    surviving, left = 1.0, len(marks)
    for value, is_running in marks:
        if not is_running:
            surviving *= 1.0 - 1.0 / left
            if surviving <= 1.0 - percent / 100.0 + 1e-12:
                return value
        left -= 1
    return max(value for value, _ in marks)
