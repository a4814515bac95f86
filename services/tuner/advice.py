"""What other settings than α would bring: advice for people, who own the engines' flags.

An engine's admission limit and its prefill token budget take a restart; the tuner replays the
window under other values, one changed at a time, and says when one is surely better.
"""

from collections.abc import Mapping

import msgspec
import numpy as np
import structlog

from services.tuner.replay import Replay, ReplayLost
from shared.scheduling.judgement import BOOTSTRAP_SEED, Replayed, gain_low_of
from shared.simulation.window_replay import ReplayRequest

log = structlog.get_logger(__name__)

CHOICES: Mapping[str, tuple[int, ...]] = {
    "admission": (8, 16, 32, 64),
    "max_batched_tokens": (512, 1_024, 2_048, 4_096, 8_192),
}


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """A setting that would be better.

    Attributes:
        setting: `admission` (calls in an engine at a time) or `max_batched_tokens`.
        value: What to set it to.
        gain: Predicted relative gain in P95.
        sure_gain: Its lower 95% bound.
    """

    setting: str
    value: int
    gain: float
    sure_gain: float


async def advice(
    replay: Replay, request: ReplayRequest, alpha: float, margin: float
) -> list[Advice]:
    """Return, per setting, the best value where its sure gain is above the margin.

    Args:
        replay: Predicts.
        request: The window as it was replayed for α.
        alpha: α in force from now on.
        margin: Least gain worth saying.

    Returns:
        Nothing where a replay is lost: the next scheduled decision asks again.
    """
    try:
        return await _found(replay, request, alpha, margin)
    except ReplayLost as exc:
        log.warning("advice_given_up", error=str(exc))
        return []


async def _found(
    replay: Replay, request: ReplayRequest, alpha: float, margin: float
) -> list[Advice]:
    base_request = msgspec.structs.replace(request, alphas=(), current=alpha, past=None)
    base = await _run(replay, base_request)
    found = []
    for setting, values in CHOICES.items():
        best: Advice | None = None
        for value in values:
            if not _is_possible(request, setting, value):
                continue
            run = await _run(replay, msgspec.structs.replace(base_request, **{setting: value}))
            rng = np.random.default_rng(BOOTSTRAP_SEED)
            sure = gain_low_of(base, run, rng, request.warm_up)
            gain = 1.0 - run.p95_s / base.p95_s if base.p95_s > 0 else 0.0
            if sure > margin and (best is None or gain > best.gain):
                best = Advice(setting=setting, value=value, gain=gain, sure_gain=sure)
        if best is not None:
            found.append(best)
    return found


def _is_possible(request: ReplayRequest, setting: str, value: int) -> bool:
    longest = max(spec.max_num_seqs for spec in request.fleet)
    return value <= longest if setting == "admission" else value >= longest


async def _run(replay: Replay, request: ReplayRequest) -> Replayed:
    answer = await replay.sweep(request)
    return next(run for run in answer.runs if run.alpha == request.current)
