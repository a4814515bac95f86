"""Shared prefixes from cached token counts, where the recording does not name them.

A recording says how many prompt tokens were found in a cache, not which. Calls of one stage that
find the same number of tokens there, again and again, share a template of that length. Where the
counts wander, one template of their median length is taken. Stages in which fewer than half of
the calls found something get none.

That is an estimate: it sees no sharing inside one query, and a cache that was often cold hides
templates.
"""

from collections import Counter
from collections.abc import Sequence
from statistics import median_low

import msgspec

from shared.domain.trace import PrefixPart
from shared.simulation.importing.recording import MAX_NAME, RecordedCall

_MIN_CALLS = 4
_MIN_HITS = 0.5
_MIN_REPEATS = 0.1
_MIN_EXPLAINED = 0.5

_Stage = tuple[str, str, str]


class _Templates(msgspec.Struct, frozen=True):
    """Template lengths of a stage, ascending, and the one of calls that found nothing."""

    lengths: tuple[int, ...]
    usual: int

    def of(self, call: RecordedCall) -> int:
        """Return the length of a call's template, tokens; 0 for none."""
        found = call.cached_tokens or self.usual
        fitting = [length for length in self.lengths if length <= min(found, call.input_tokens)]
        return max(fitting, default=0)


def infer_prefixes(calls: Sequence[RecordedCall]) -> tuple[list[RecordedCall], list[str]]:
    """Return the calls with inferred prefixes, and what was inferred.

    Where a call of a stage names its prefix, nothing is inferred for that stage.
    """
    templates = {
        stage: found
        for stage, members in _by_stage(calls).items()
        if (found := _templates(members)) is not None
    }
    filled = [_with_template(call, templates.get(_stage_of(call))) for call in calls]
    if not templates:
        return filled, []
    shown = ", ".join(
        f"{stage[2]} {' or '.join(map(str, found.lengths))}"
        for stage, found in sorted(templates.items())
    )
    return filled, [f"shared prefixes per stage, from cached token counts (tokens): {shown}"]


def _stage_of(call: RecordedCall) -> _Stage:
    return (call.model, call.workflow, call.stage)


def _by_stage(calls: Sequence[RecordedCall]) -> dict[_Stage, list[RecordedCall]]:
    stages: dict[_Stage, list[RecordedCall]] = {}
    for call in calls:
        stages.setdefault(_stage_of(call), []).append(call)
    return stages


def _templates(calls: Sequence[RecordedCall]) -> _Templates | None:
    if any(call.prefix for call in calls):
        return None
    known = [call.cached_tokens for call in calls if call.cached_tokens is not None]
    hits = [tokens for tokens in known if tokens > 0]
    if len(known) < _MIN_CALLS or len(hits) < _MIN_HITS * len(known):
        return None
    usual = median_low(hits)
    repeats = Counter(hits)
    least = max(2.0, _MIN_REPEATS * len(hits))
    lengths = sorted(tokens for tokens, count in repeats.items() if count >= least)
    if sum(repeats[tokens] for tokens in lengths) < _MIN_EXPLAINED * len(hits):
        lengths = [usual]
    return _Templates(tuple(lengths), usual)


def _with_template(call: RecordedCall, templates: _Templates | None) -> RecordedCall:
    tokens = templates.of(call) if templates else 0
    if tokens == 0:
        return call
    names = (*_stage_of(call), f"template-{tokens}")
    prefix_id = "/".join(name for name in names if name)[-MAX_NAME:]
    return msgspec.structs.replace(call, prefix=(PrefixPart(prefix_id, tokens),))
