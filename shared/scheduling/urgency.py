"""In which order an instance's calls wait.

Urgency U = t_comp - (t_SLO - waited): how late the call would be for its stage's budget if it
started now. All waiting calls age alike, so their order never changes while they wait, and the
queue can be kept by the constant *latest start*, smallest first.

Source: HexGen-Flow (arXiv 2505.05286), urgency of a queued call.
"""


def urgency_s(t_comp_s: float, t_slo_s: float, waited_s: float) -> float:
    """Return U, seconds, highest first (leaf).

    Args:
        t_comp_s: Expected service time on this instance, seconds.
        t_slo_s: The stage's budget, seconds.
        waited_s: Time since the call became ready, seconds.
    """
    return t_comp_s - (t_slo_s - waited_s)


def latest_start_s(ready_at_s: float, t_slo_s: float, t_comp_s: float) -> float:
    """Return the instant by which the call must start to keep its budget, smallest first (leaf).

    `latest_start_s(r, s, c) == now - urgency_s(c, s, now - r)` at any `now`.

    Args:
        ready_at_s: When the call became ready, seconds.
        t_slo_s: The stage's budget, seconds.
        t_comp_s: Expected service time on this instance, seconds.
    """
    return ready_at_s + t_slo_s - t_comp_s
