"""Fits an instance's latency model to calls it really ran.

The calls of an experiment are run through the simulator's own batching model again, handed in at
the instants at which they really were, and the eleven coefficients are moved until first tokens and
durations come out as observed. So the fit is judged by what the simulator will make of it, mixed
iterations and waiting included, and not by formulas for calls that run alone.

Least squares (Levenberg-Marquardt) on the logarithms of the ratios, in the logarithms of the
coefficients, which keeps them positive; ratios far off weigh less (Huber). The search begins at
several guesses; it, and with it the result, is deterministic.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import msgspec
import numpy as np

from shared.domain.instance import TIMES, InstanceSpec, LatencyModel
from shared.domain.trace import PrefixPart
from shared.errors import InvalidCall
from shared.scheduling.attainment import percentile
from shared.simulation.batching import BatchEvent, BatchingInstance

FLOOR_S = 1e-7
FLOORS_S = dict.fromkeys(TIMES, FLOOR_S) | {"kv_s_per_token": 1e-11, "attention_s_per_pair": 1e-13}
"""Below it a coefficient makes no difference to any call, seconds."""
HUBER = 0.1
MAX_STEPS = 25
ENOUGH_GAIN = 1e-4
PROBE = 1e-3
TOO_STIFF = 1e6
MAX_WASTE_TOKENS = 4_096
WASTE_STEP_SHARE = 0.05
LEAST_CALLS = 8
ATTENTION_TOKENS = 200
"""Shorter prompts say nothing of attention: it is left out then."""


STEP_PARTS: tuple[Mapping[str, float], ...] = tuple(
    {
        "weights_s": weights,
        "overhead_s": overhead,
        "seq_s": seq,
        "pair_s": batched,
        "trio_s": batched,
        "batched_s": batched,
        "joined_s": joined,
    }
    for weights, overhead, seq, batched, joined in (
        (0.5, 0.3, 0.1, 0.1, 0.1),
        (0.1, 0.8, 0.02, 0.02, 0.02),
        (0.1, 0.1, 0.8, 0.3, 0.3),
        (0.1, 0.8, 0.02, 0.1, 0.2),
    )
)
"""Where the search begins: at engines that wait for memory, for their scheduler, for every call.

Which iteration a prompt joins is a matter of milliseconds, so the loss has many valleys.
"""


class FitStopped(Exception):
    """Nobody waits for the fit any more."""


class ProbedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of an experiment, as an engine really ran it.

    Attributes:
        started_s: Handed to the engine, seconds.
        first_token_s: First token, seconds.
        finished_s: Last token, seconds.
        input_tokens: Prompt length by the engine's count, tokens.
        output_tokens: Generated length by the engine's count, tokens.
        cached_tokens: Prompt tokens found in the prefix cache by its count, tokens; they are not
            computed again, only attended to.
    """

    started_s: float
    first_token_s: float
    finished_s: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0


class FitErrors(msgspec.Struct, frozen=True, kw_only=True):
    """How far the model is off the calls it was fitted on; shares of what was observed.

    Attributes:
        ttft_median: Median error of the time to the first token.
        ttft_p95: Its 95th percentile.
        latency_median: Median error of the whole time in the engine.
        latency_p95: Its 95th percentile.
    """

    ttft_median: float
    ttft_p95: float
    latency_median: float
    latency_p95: float


class LatencyFit(msgspec.Struct, frozen=True, kw_only=True):
    """A fitted model.

    Attributes:
        latency: The model.
        errors: How well it explains the experiment.
        num_calls: Calls it rests on.
    """

    latency: LatencyModel
    errors: FitErrors
    num_calls: int


def fit_latency(
    spec: InstanceSpec,
    runs: Sequence[Sequence[ProbedCall]],
    is_stopped: Callable[[], bool] = lambda: False,
) -> LatencyFit:
    """Return the latency model that explains an experiment best.

    Args:
        spec: The instance; its own latency model is not looked at.
        runs: Calls that shared the instance, in runs between which it was idle; >= 8 in all.
        is_stopped: Asked all the time, from this thread; the search takes seconds.

    Raises:
        ValueError: There are too few calls.
        FitStopped: `is_stopped` said so.
    """
    num_calls = sum(len(run) for run in runs)
    if num_calls < LEAST_CALLS:
        msg = f"{num_calls} calls are too few to fit a latency model; {LEAST_CALLS} are needed"
        raise ValueError(msg)
    search = _Search(spec, runs, is_stopped)
    ends = [search.descend(_encode(guess(runs, parts))) for parts in STEP_PARTS]
    best = min(ends, key=lambda theta: _loss(search.residuals(theta)))
    latency = _decode(search.descend(best))
    return LatencyFit(latency=latency, errors=errors_of(spec, latency, runs), num_calls=num_calls)


def guess(runs: Sequence[Sequence[ProbedCall]], parts: Mapping[str, float]) -> LatencyModel:
    """Return a rough model: medians of time per prompt token, and per step.

    Args:
        runs: What was measured.
        parts: Which share of a step is what, as in `STEP_PARTS`.
    """
    calls = [call for run in runs for call in run]
    per_token = [
        (call.first_token_s - call.started_s) / max(1, call.input_tokens - call.cached_tokens)
        for call in calls
    ]
    steps = [
        (call.finished_s - call.first_token_s) / (call.output_tokens - 1)
        for call in calls
        if call.output_tokens > 1
    ]
    prefill_s = max(FLOOR_S, median(per_token))
    step_s = max(FLOOR_S, min(steps)) if steps else prefill_s
    longest = max(call.input_tokens for call in calls)
    return LatencyModel(
        prefill_s_per_token=0.7 * prefill_s,
        kv_s_per_token=1e-4 * step_s,
        attention_s_per_pair=3e-4 * prefill_s if longest >= ATTENTION_TOKENS else 0.0,
        chunk_waste_tokens=8,
        **{name: part * step_s for name, part in parts.items()},
    )


def errors_of(
    spec: InstanceSpec, latency: LatencyModel, runs: Sequence[Sequence[ProbedCall]]
) -> FitErrors:
    """Return how far a model is off."""
    ttft: list[float] = []
    whole: list[float] = []
    for run in runs:
        for call, (first_s, last_s) in zip(run, modelled(spec, latency, run), strict=True):
            observed_s = call.first_token_s - call.started_s
            ttft.append(abs(first_s - observed_s) / max(FLOOR_S, observed_s))
            observed_s = call.finished_s - call.started_s
            whole.append(abs(last_s - observed_s) / max(FLOOR_S, observed_s))
    return FitErrors(
        ttft_median=median(ttft),
        ttft_p95=percentile(ttft, 95),
        latency_median=median(whole),
        latency_p95=percentile(whole, 95),
    )


def modelled(
    spec: InstanceSpec, latency: LatencyModel, run: Sequence[ProbedCall]
) -> list[tuple[float, float]]:
    """Return (time to first token, time to last token) of every call in the batching model.

    A call that can never fit takes no time.
    """
    instance, origin_s = _prepared(msgspec.structs.replace(spec, latency=latency), run)
    order = sorted(range(len(run)), key=lambda index: run[index].started_s)
    firsts, lasts = [0.0] * len(run), [0.0] * len(run)

    def take(events: Sequence[BatchEvent]) -> None:
        for event in events:
            ends = lasts if event.kind == "finished" else firsts
            ends[event.handle] = event.at_s - origin_s - run[event.handle].started_s

    for index in order:
        call = run[index]
        while instance.next_event_s() <= origin_s + call.started_s:
            take(instance.advance(instance.next_event_s()))
        _add(instance, index, call, origin_s)
    while math.isfinite(instance.next_event_s()):
        take(instance.advance(instance.next_event_s()))
    return list(zip(firsts, lasts, strict=True))


def _prepared(spec: InstanceSpec, run: Sequence[ProbedCall]) -> tuple[BatchingInstance, float]:
    """Return an idle instance that has cached what a run's calls found, and when a run may begin.

    What a call found there was put there by another one before.
    """
    cached = sorted({call.cached_tokens for call in run if call.cached_tokens})
    if not cached:
        return BatchingInstance(spec), 0.0
    # Blocks of one token: all that was found is there.
    instance = BatchingInstance(msgspec.structs.replace(spec, prefix_caching=True, block_tokens=1))
    at_s = 0.0
    for number, tokens in enumerate(cached):
        beginning = _beginning(tokens)
        instance.add(number, now_s=0.0, input_tokens=tokens, output_tokens=1, prefix=beginning)
    while math.isfinite(next_s := instance.next_event_s()):
        at_s = next_s
        instance.advance(at_s)
    return instance, at_s


def _beginning(cached_tokens: int) -> tuple[PrefixPart, ...]:
    return (PrefixPart(f"cached-{cached_tokens}", cached_tokens),) if cached_tokens else ()


def _add(instance: BatchingInstance, handle: int, call: ProbedCall, origin_s: float) -> None:
    try:
        instance.add(
            handle,
            now_s=origin_s + call.started_s,
            input_tokens=max(1, call.input_tokens),
            output_tokens=max(1, call.output_tokens),
            prefix=_beginning(call.cached_tokens),
            priority=call.started_s,
        )
    except InvalidCall:
        return


Vector = np.ndarray[tuple[int], np.dtype[np.float64]]


def _encode(latency: LatencyModel) -> Vector:
    seconds = [max(floor_s, getattr(latency, name)) for name, floor_s in FLOORS_S.items()]
    waste = max(1, latency.chunk_waste_tokens)
    return np.array([math.log(value) for value in (*seconds, float(waste))])


def _decode(theta: Vector) -> LatencyModel:
    values = np.exp(theta)
    seconds = {name: float(value) for name, value in zip(TIMES, values, strict=False)}
    small = {name: value if value > 2 * FLOORS_S[name] else 0.0 for name, value in seconds.items()}
    small["prefill_s_per_token"] = seconds["prefill_s_per_token"]
    small["weights_s"] = seconds["weights_s"]
    waste = min(MAX_WASTE_TOKENS, round(float(values[-1])))
    return LatencyModel(**small, chunk_waste_tokens=0 if waste <= 1 else waste)


def _log_ratio(modelled_s: float, observed_s: float) -> float:
    return math.log(max(FLOOR_S, modelled_s) / max(FLOOR_S, observed_s))


def _weights(residuals: Vector) -> Vector:
    return np.minimum(1.0, HUBER / np.maximum(np.abs(residuals), 1e-12))


def _loss(residuals: Vector) -> float:
    size = np.abs(residuals)
    return float(np.sum(np.where(size < HUBER, size**2 / 2, HUBER * (size - HUBER / 2))))


class _Search:
    """Moves the coefficients until an experiment comes out as it was.

    Args:
        spec: The instance.
        runs: The experiment.
        is_stopped: Whether nobody waits any more.
    """

    def __init__(
        self,
        spec: InstanceSpec,
        runs: Sequence[Sequence[ProbedCall]],
        is_stopped: Callable[[], bool],
    ) -> None:
        self._spec = spec
        self._runs = runs
        self._is_stopped = is_stopped

    def residuals(self, theta: Vector) -> Vector:
        """Return log(modelled ÷ observed) of first tokens and of the time after them."""
        if self._is_stopped():
            raise FitStopped
        latency = _decode(theta)
        found: list[float] = []
        for run in self._runs:
            for call, (first_s, last_s) in zip(
                run, modelled(self._spec, latency, run), strict=True
            ):
                found.append(_log_ratio(first_s, call.first_token_s - call.started_s))
                if call.output_tokens > 1:
                    found.append(_log_ratio(last_s - first_s, call.finished_s - call.first_token_s))
        return np.array(found)

    def descend(self, theta: Vector) -> Vector:
        """Return the coefficients at the end of a search that begins at some."""
        residuals = self.residuals(theta)
        loss, stiffness = _loss(residuals), 1e-2
        for _ in range(MAX_STEPS):
            slopes = self._slopes(theta, residuals)
            weights = _weights(residuals)
            normal = slopes.T @ (slopes * weights[:, None])
            gradient = slopes.T @ (residuals * weights)
            before = loss
            while stiffness < TOO_STIFF:
                damped = normal + stiffness * np.diag(np.diag(normal) + 1e-9)
                step = np.clip(np.linalg.solve(damped, -gradient), -1.0, 1.0)
                tried = _bounded(theta + step)
                tried_residuals = self.residuals(tried)
                tried_loss = _loss(tried_residuals)
                if tried_loss < loss:
                    theta, residuals, loss = tried, tried_residuals, tried_loss
                    stiffness = max(1e-6, stiffness / 5.0)
                    break
                stiffness *= 4.0
            if before - loss <= ENOUGH_GAIN * max(before, 1e-12):
                break
        return theta

    def _slopes(
        self, theta: Vector, residuals: Vector
    ) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        """Return the residuals' derivatives; the waste is a whole number and is moved by more."""
        columns = []
        for index in range(len(theta)):
            is_waste = index == len(theta) - 1
            size = max(WASTE_STEP_SHARE, 1.5 / float(np.exp(theta[-1]))) if is_waste else PROBE
            moved = theta.copy()
            moved[index] += size
            columns.append((self.residuals(moved) - residuals) / size)
        return np.stack(columns, axis=1)


def _bounded(theta: Vector) -> Vector:
    lowest = np.array([*map(math.log, FLOORS_S.values()), 0.0])
    highest = np.full(len(theta), math.log(100.0))
    highest[-1] = math.log(MAX_WASTE_TOKENS)
    return np.clip(theta, lowest, highest)
