"""What a reader should take away from a comparison, easy wins and lost comparisons included."""

from services.cli.lab.comparison import TARGET, Comparison, Contender
from services.cli.lab.grids import gain_text, ratio_text, sustained_text
from services.cli.lab.intervals import interval
from services.cli.lab.setting import Cell, Setting

PLAIN = "vllm"
SPANS_OF_P95 = 5.0


def headlines(found: Comparison, setting: Setting) -> list[str]:
    """Return the takeaways of one setting: the first policy, its strongest rival, the usual one."""
    first, *others = found.contenders()
    lines = [_keeps(found, setting, first)]
    rivals = [other for other in others if other.policy != first.policy]
    if rivals:
        ranked = sorted(rivals, key=lambda other: found.sustained(setting, other).mean)
        best, plain = ranked[-1], Contender(policy=PLAIN)
        lines.append(_against("the strongest of the others here", found, setting, best))
        if plain in rivals and plain != best:
            lines.append(_against("what most teams run today", found, setting, plain))
        elif ranked[0] != best:
            lines.append(_against("the weakest of the others here", found, setting, ranked[0]))
    return lines + _warnings(found, setting)


def _keeps(found: Comparison, setting: Setting, first: Contender) -> str:
    capacity = found.capacity_qps[setting]
    text = (
        f"{first.label} keeps {TARGET:.0%} of the queries within their SLO up to "
        f"{sustained_text(found, setting, first)} queries/s"
    )
    share = found.sustained(setting, first).mean / capacity
    known = f"{share:.0%} of what" if share > 0.0 else "where"
    return f"{text}, {known} no policy could exceed {capacity:.3f} on this fleet."


def _against(word: str, found: Comparison, setting: Setting, other: Contender) -> str:
    first = found.contenders()[0]
    cell = Cell(setting=setting, rate_qps=found.focus_qps[setting])
    p95 = ratio_text(found.ratio(cell, other, first, "p95_s"))
    gain = gain_text(found, setting, other)
    what = (
        f"that is {gain} times as many queries"
        if gain != "–"
        else f"which sustains {sustained_text(found, setting, other)}"
    )
    return (
        f"Against {other.label}, {word}, {what}; P95 at {cell.rate_qps:.3g} queries/s is {p95} "
        f"times {first.label}'s."
    )


def _warnings(found: Comparison, setting: Setting) -> list[str]:
    """Return what makes the numbers doubtful."""
    cell = Cell(setting=setting, rate_qps=found.focus_qps[setting])
    rows = found.rows(cell, found.contenders()[0])
    span_s = rows[0].measured.num_queries / cell.rate_qps
    p95_s = interval([row.measured.p95_s for row in rows]).mean
    if not span_s < SPANS_OF_P95 * p95_s:
        return []
    warning = (
        f"Careful: only {span_s:.0f} s of arrivals are measured where P95 is {p95_s:.0f} s, too "
        "little for a steady state. More --queries tell more."
    )
    return [warning]
