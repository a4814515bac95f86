"""Advice about engine settings: only what is surely better."""

import numpy as np

from services.tuner.advice import advice
from shared.scheduling.judgement import Replayed
from shared.simulation.speed_fit import SpeedFit
from shared.simulation.window_replay import ReplayAnswer, ReplayRequest
from tests.support.scheduling import make_spec


class SettingReplay:
    """Predicts times by settings.

    Args:
        factors: (setting, value) -> factor on the times.
    """

    def __init__(self, factors: dict[tuple[str, int | None], float]) -> None:
        self._factors = factors

    async def sweep(self, request: ReplayRequest) -> ReplayAnswer:
        """Return the same exponential times, multiplied."""
        factor = self._factors.get(("admission", request.admission), 1.0)
        factor *= self._factors.get(("max_batched_tokens", request.max_batched_tokens), 1.0)
        times = factor * np.random.default_rng(1).exponential(10.0, 300)
        run = Replayed(
            alpha=request.current,
            latencies_s=tuple(times.tolist()),
            p95_s=float(np.percentile(times[30:], 95)),
            shares={},
        )
        return ReplayAnswer(runs=(run,), as_it_was=run)

    async def speeds(self, requests) -> dict[str, SpeedFit]:
        """Nothing is known of speeds here."""
        assert requests is not None
        return {}


REQUEST = ReplayRequest(queries=(), fleet=(make_spec("a"),), policy="hexgen-flow", shapes={})


async def test_the_best_value_of_each_setting_is_advised():
    """A token budget of 512 is 20% better, 1,024 is 10% better; admission makes no difference."""
    replay = SettingReplay({("max_batched_tokens", 512): 0.8, ("max_batched_tokens", 1_024): 0.9})
    (found,) = await advice(replay, REQUEST, 0.1, margin=0.03)
    assert (found.setting, found.value) == ("max_batched_tokens", 512)
    assert 0.03 < found.sure_gain <= found.gain + 1e-9


async def test_what_is_within_the_margin_is_not_worth_a_restart():
    """Two percent."""
    replay = SettingReplay({("max_batched_tokens", 512): 0.98})
    assert await advice(replay, REQUEST, 0.1, margin=0.03) == []
