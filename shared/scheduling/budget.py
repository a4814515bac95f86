"""Split what remains of a query's SLO over the stages that remain.

Source: HexGen-Flow (arXiv 2505.05286), per-stage SLO budget proportional to expected time.
"""


def stage_budget_s(
    slo_s: float, elapsed_s: float, stage_s: float, remaining_stages_s: float
) -> float:
    """Return the budget t_SLO of the stage that becomes ready now (leaf).

    The stage gets its share of what is left. Once nothing is left there is nothing to share: the
    budget is the (negative) remainder itself, so the latest start is the query's deadline minus
    t_comp and late queries stay ordered by their deadlines.

    Args:
        slo_s: End-to-end SLO of the query, seconds.
        elapsed_s: Time since the query arrived, seconds.
        stage_s: Expected duration of this stage (its longest sibling), seconds, >= 0.
        remaining_stages_s: Expected duration of everything after it, seconds, >= 0.

    Returns:
        Seconds; negative when the query is already late.
    """
    left_s = slo_s - elapsed_s
    if left_s <= 0.0:
        return left_s
    total_s = stage_s + remaining_stages_s
    if total_s <= 0.0:
        return left_s
    return left_s * (stage_s / total_s)
