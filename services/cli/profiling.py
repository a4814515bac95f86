"""Profiles one instance: runs the designed experiment and fits its latency model."""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from statistics import mean, median
from typing import Any

import msgspec
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from services.cli.probing import (
    Plan,
    PlannedCall,
    Prober,
    Run,
    full_scale,
    lone_tokens_per_s,
    plan_experiment,
)
from services.cli.progress import JobProgress
from shared.domain.instance import InstanceSpec, LatencyModel
from shared.errors import ConfigError, GenerationFailed
from shared.ports import Engine
from shared.scheduling.knee import knee_calls
from shared.simulation.latency_fit import (
    FitErrors,
    LatencyFit,
    ProbedCall,
    errors_of,
    fit_latency,
    modelled,
)

BLUE, ORANGE, GREY = "#0b6e99", "#d9730d", "#6b6b6b"

Runs = tuple[tuple[ProbedCall, ...], ...]


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """What an experiment says of an instance.

    Attributes:
        spec: The instance with the fitted speed.
        fit: The fit to lone calls, batches and cached beginnings, with its errors.
        held_out: The errors on the mixed runs, which it was not fitted on.
        plan: What was run.
        runs: What came of it.
    """

    spec: InstanceSpec
    fit: LatencyFit
    held_out: FitErrors
    plan: Plan
    runs: Runs

    @property
    def num_calls(self) -> int:
        """Calls made."""
        return sum(map(len, self.runs))

    @property
    def noise(self) -> float:
        """How far equal calls were apart: half the range over the mean, median over lengths."""
        return _spread(self.lone_times_s())

    def lone_times_s(self) -> dict[PlannedCall, list[float]]:
        """Return how long each lone call took, every time, seconds."""
        times_s: dict[PlannedCall, list[float]] = {}
        for planned, run in zip(self.plan.runs, self.runs, strict=True):
            if len(run) == 1 and not planned[0].prefix:
                times_s.setdefault(planned[0], []).append(run[0].finished_s - run[0].started_s)
        return times_s


async def profile_engine(
    engine: Engine, spec: InstanceSpec, progress: JobProgress, seed: int = 0, name: str = "profile"
) -> Profile:
    """Run the experiment on an engine that nothing else uses, and fit its latency model.

    Args:
        engine: What is measured.
        spec: Its description; its speed is a first guess, by which the mixed runs are paced.
        progress: Where it is shown how many runs are done, of how many.
        seed: Of the mixed runs.
        name: Draws the prompts; another one for every experiment on the same engine.

    Raises:
        ConfigError: A call failed: there is no profile then.
    """
    plan = plan_experiment(spec, full_scale(spec), seed)
    prober = Prober(engine, name, is_strict=True)
    try:
        await prober.warm_up()
        await prober.run((_largest_batch(plan),))  # not counted: a size costs more the first time
        with progress.stage(f"profiling {spec.instance_id}, runs", len(plan.runs)) as advance:
            runs = await prober.run(plan.runs, advance)
    except* GenerationFailed as exc:
        raise ConfigError(f"{spec.instance_id} cannot be profiled: {exc.exceptions[0]}") from exc
    return await _in_thread(lambda stop: _profile_of(spec, plan, tuple(map(tuple, runs)), stop))


def pace_noise(profiles: Sequence[Profile]) -> float:
    """Return how far equal experiments are apart in the median times of their lone calls.

    Half the range over the mean, median over lengths: as for medians of equal runs. Single calls
    are further apart (`Profile.noise`), but no fit hangs on one of them.

    Args:
        profiles: Of the same plan.
    """
    medians_s: dict[PlannedCall, list[float]] = {}
    for one in profiles:
        for planned, times_s in one.lone_times_s().items():
            medians_s.setdefault(planned, []).append(median(times_s))
    return _spread(medians_s)


def _spread(times_s: Mapping[PlannedCall, Sequence[float]]) -> float:
    spreads = [(max(one) - min(one)) / (2 * mean(one)) for one in times_s.values()]
    return median(spreads) if spreads else 0.0


async def merged(spec: InstanceSpec, profiles: Sequence[Profile]) -> Profile:
    """Return what several experiments on the same instance say together, at their mean pace.

    Args:
        spec: The instance, as it was given to `profile_engine`.
        profiles: At least one.
    """
    plan = Plan(
        fitted=tuple(run for one in profiles for run in one.plan.fitted),
        held_out=tuple(run for one in profiles for run in one.plan.held_out),
    )
    fitted = [run for one in profiles for run in one.runs[: len(one.plan.fitted)]]
    held_out = [run for one in profiles for run in one.runs[len(one.plan.fitted) :]]
    return await _in_thread(lambda stop: _profile_of(spec, plan, tuple(fitted + held_out), stop))


async def _in_thread(fit: Callable[[Callable[[], bool]], Profile]) -> Profile:
    """Run a fit beside the event loop; it ends early where this is cancelled."""
    stopped = threading.Event()
    try:
        return await asyncio.to_thread(fit, stopped.is_set)
    finally:
        stopped.set()


def _profile_of(
    spec: InstanceSpec, plan: Plan, runs: Runs, is_stopped: Callable[[], bool]
) -> Profile:
    # In a mixed run a step that comes a little later leaves a call behind for a whole iteration:
    # it tells well how good a model is, and badly in which direction a better one lies.
    num_fitted = len(plan.fitted)
    fit = fit_latency(spec, runs[:num_fitted], is_stopped)
    fitted = msgspec.structs.replace(spec, latency=fit.latency)
    return Profile(
        spec=msgspec.structs.replace(fitted, max_num_seqs=knee_calls(fitted)),
        fit=fit,
        held_out=errors_of(spec, fit.latency, runs[num_fitted:]),
        plan=plan,
        runs=runs,
    )


def _largest_batch(plan: Plan) -> Run:
    return max(plan.fitted, key=len)


def profile_table(profile: Profile) -> Table:
    """Return the coefficients and how well they explain what was measured."""
    latency, errors, held_out = profile.fit.latency, profile.fit.errors, profile.held_out
    table = Table(title=profile.spec.instance_id, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    prompt_rate = 1.0 / latency.prefill_s_per_token
    for name, text in (
        ("prompt", f"{prompt_rate:,.0f} tokens/s, {latency.chunk_waste_tokens} lost per chunk"),
        ("one call", f"{lone_tokens_per_s(latency):,.1f} tokens/s"),
        ("a step", f"{1e3 * (latency.weights_s + latency.overhead_s):.2f} ms, whatever it does"),
        ("  for each call in it", f"+{1e3 * latency.seq_s:.3f} ms"),
        ("  for 2 / 3 / more calls", _batch_text(latency)),
        ("  beside a prompt", f"+{1e3 * latency.joined_s:.2f} ms for each"),
        ("  for 1,000 KV tokens", f"+{1e6 * latency.kv_s_per_token:.3f} ms"),
        ("long prompts", f"+{5e8 * latency.attention_s_per_pair:.1f} ms for one of 1,000 tokens"),
        ("equal calls differ by", f"±{profile.noise:.1%}"),
        ("error of the fit", f"{_share_text(errors.latency_median, errors.latency_p95)}"),
        ("  first token", _share_text(errors.ttft_median, errors.ttft_p95)),
        ("  on calls not fitted", _share_text(held_out.latency_median, held_out.latency_p95)),
        ("calls at a time", f"{profile.spec.max_num_seqs}: more bring next to no throughput"),
        ("measured", f"{profile.num_calls} calls in {len(profile.runs)} runs"),
    ):
        table.add_row(name, text)
    return table


def profile_json(profile: Profile) -> dict[str, Any]:
    """Return the JSON object of `hexflow profile --json`."""
    return {
        "instance": msgspec.to_builtins(profile.spec),
        "errors": _errors_json(profile.fit.errors),
        "held_out_errors": _errors_json(profile.held_out),
        "repeat_noise": round(profile.noise, 5),
        "calls": profile.num_calls,
        "runs": len(profile.runs),
    }


def _errors_json(errors: FitErrors) -> dict[str, float]:
    """Return fit errors as JSON."""
    return {name: round(getattr(errors, name), 5) for name in FitErrors.__struct_fields__}


def profile_figure(profile: Profile) -> Figure:
    """Return the picture: first tokens by prompt, steps by batch, model against measurement."""
    figure = Figure(figsize=(13.0, 4.2), dpi=130, layout="constrained")
    errors = profile.fit.errors
    figure.suptitle(
        f"{profile.spec.instance_id}: {profile.num_calls} calls measured, and the fitted model "
        f"(median error {errors.latency_median:.1%}, first token {errors.ttft_median:.1%})",
        fontsize=11,
    )
    prompts, steps, scatter = figure.subplots(1, 3)
    for axes in (prompts, steps, scatter):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(visible=True, alpha=0.25)
    _draw_prompts(prompts, profile)
    _draw_steps(steps, profile)
    _draw_agreement(scatter, profile)
    return figure


def _draw_prompts(axes: Axes, profile: Profile) -> None:
    lone = [run[0] for run in profile.runs if len(run) == 1]
    found = sorted((one.input_tokens - one.cached_tokens, _ttft_s(one)) for one in lone)
    axes.plot(*zip(*found, strict=True), "o", color=BLUE, label="measured")
    lengths = np.unique(np.linspace(1, max(length for length, _ in found), 40).astype(int))
    curve = [
        modelled(profile.spec, profile.fit.latency, [_lone(int(length))])[0][0]
        for length in lengths
    ]
    axes.plot(lengths, curve, color=ORANGE, label="model")
    axes.set(title="a call alone", xlabel="prompt tokens computed", ylabel="first token, s")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)


def _draw_steps(axes: Axes, profile: Profile) -> None:
    batches = [run for run in profile.runs if _is_batch(run)]
    found = [(len(run), _step_s(run)) for run in batches]
    if not found:
        axes.set_visible(False)
        return
    axes.plot(*zip(*found, strict=True), "o", color=BLUE, label="measured")
    expected = [
        (len(run), _modelled_step_s(profile.spec, profile.fit.latency, run)) for run in batches
    ]
    axes.plot(*zip(*expected, strict=True), "x", color=ORANGE, label="model")
    axes.set(title="calls together", xlabel="batch size", ylabel="time per token of a call, s")
    axes.set_xticks(sorted({size for size, _ in found}))
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)


def _draw_agreement(axes: Axes, profile: Profile) -> None:
    pairs = [
        (one.finished_s - one.started_s, whole_s)
        for run in profile.runs
        for one, (_, whole_s) in zip(
            run, modelled(profile.spec, profile.fit.latency, run), strict=True
        )
    ]
    axes.plot(*zip(*pairs, strict=True), "o", color=BLUE, alpha=0.6)
    longest = max(max(pair) for pair in pairs)
    axes.plot([0, longest], [0, longest], color=GREY, linewidth=1)
    axes.set(title="every call", xlabel="measured, s", ylabel="modelled, s")


def _is_batch(run: Sequence[ProbedCall]) -> bool:
    return len(run) > 1 and max(call.started_s for call in run) < _ttft_s(run[0])


def _step_s(run: Sequence[ProbedCall]) -> float:
    steps = [(one.finished_s - one.first_token_s) / max(1, one.output_tokens - 1) for one in run]
    return float(np.median(steps))


def _modelled_step_s(spec: InstanceSpec, latency: LatencyModel, run: Sequence[ProbedCall]) -> float:
    steps = [
        (last_s - first_s) / max(1, one.output_tokens - 1)
        for one, (first_s, last_s) in zip(run, modelled(spec, latency, run), strict=True)
    ]
    return float(np.median(steps))


def _lone(input_tokens: int) -> ProbedCall:
    return ProbedCall(
        started_s=0.0,
        first_token_s=0.0,
        finished_s=0.0,
        input_tokens=input_tokens,
        output_tokens=2,
    )


def _ttft_s(call: ProbedCall) -> float:
    return call.first_token_s - call.started_s


def _batch_text(latency: LatencyModel) -> str:
    extra_s = (latency.pair_s, latency.trio_s, latency.batched_s)
    return " / ".join(f"+{1e3 * one:.2f}" for one in extra_s) + " ms"


def _share_text(half: float, most: float) -> str:
    return f"{half:.1%} median, {most:.1%} P95"
