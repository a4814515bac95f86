"""What a reader should take away from a comparison, easy wins and lost comparisons included."""

from collections.abc import Sequence

from services.cli.lab.comparison import BEST, GIVEN, TARGET, Comparison, Contender
from services.cli.lab.grids import gain_text, ratio_text, sustained_text
from services.cli.lab.intervals import interval
from services.cli.lab.setting import Cell, Setting

PLAIN = "vllm"
SPANS_OF_P95 = 5.0


def headlines(found: Comparison, setting: Setting) -> list[str]:
    """Return the takeaways of one setting: the first policy, its strongest rival, the usual one.

    Policies are held against each other with the fleet's engine flags, and again with the flags
    that suit each best where those were searched.
    """
    lines = []
    for flags in (GIVEN, BEST):
        contenders = [one for one in found.contenders() if one.flags == flags]
        if contenders:
            lines += _verdict(found, setting, contenders)
    return lines + _warnings(found, setting)


def _verdict(found: Comparison, setting: Setting, contenders: Sequence[Contender]) -> list[str]:
    first, *rivals = contenders
    lines = [_keeps(found, setting, first)]
    if not rivals:
        return lines
    ranked = sorted(rivals, key=lambda other: found.sustained(setting, other).mean)
    best, plain = ranked[-1], Contender(policy=PLAIN, flags=first.flags)
    lines.append(_against("the strongest of the others here", found, setting, first, best))
    if plain in rivals and plain != best:
        lines.append(_against("what most teams run today", found, setting, first, plain))
    elif ranked[0] != best:
        lines.append(_against("the weakest of the others here", found, setting, first, ranked[0]))
    return lines


def _keeps(found: Comparison, setting: Setting, first: Contender) -> str:
    bound = found.bound_qps(setting, first)
    text = (
        f"{first.label} keeps {TARGET:.0%} of the queries within their SLO up to "
        f"{sustained_text(found, setting, first)} queries/s"
    )
    share = found.sustained(setting, first).mean / bound
    known = f"{share:.0%} of {bound:.3f}, " if share > 0.0 else f"{bound:.3f} is "
    return f"{text}; {known}the upper bound of any policy on this fleet."


def _against(
    word: str, found: Comparison, setting: Setting, first: Contender, other: Contender
) -> str:
    cell = Cell(setting=setting, rate_qps=found.focus_qps[setting])
    p95 = ratio_text(found.ratio(cell, other, first, "p95_s"))
    gain = gain_text(found, setting, first, other)
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
