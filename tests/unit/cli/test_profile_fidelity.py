"""What a profile is made of, and what fidelity compares."""

import asyncio
import math
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from services.cli.capacity import capacity_qps
from services.cli.console import check_writable
from services.cli.engine_options import asked_for, choice_of, on_one_core, real_choice_of
from services.cli.fidelity import parse_loads
from services.cli.fidelity_results import (
    METRICS,
    LoadResult,
    errors_of,
    fidelity_table,
    noise_of,
)
from services.cli.fidelity_runs import (
    CallTiming,
    RunTimings,
    knee_qps,
    simulated_run,
    small_queries,
    with_arrivals,
)
from services.cli.interrupts import unless_stopped
from services.cli.probing import Plan, full_scale, plan_experiment, probe_call, quick_scale
from services.cli.profile import write_profile
from services.cli.profiling import Profile, merged, pace_noise, profile_engine, profile_figure
from services.cli.progress import JobProgress
from services.cli.real_engines import EngineChoice, measured_quickly
from shared.adapters.clock import SystemClock
from shared.adapters.replayed_prompts import ReplayedPrompts, prompt_of, with_prompt
from shared.adapters.simulated_engine import SimulatedEngine
from shared.contracts.messages import BoundCall, SimulatedLengths, Usage
from shared.domain.instance import InstanceSpec, LatencyModel
from shared.domain.trace import PrefixPart
from shared.errors import ConfigError
from shared.ports import Finished
from shared.scheduling.knee import knee_calls
from shared.simulation.fleets import parse_fleet
from shared.simulation.latency_fit import FitErrors, LatencyFit, ProbedCall
from tests.support.worker_bench import bound_call

SPEC = InstanceSpec(
    instance_id="cpu-0",
    gpu="CPU",
    max_num_seqs=4,
    max_context_tokens=2_048,
    max_batched_tokens=512,
    kv_tokens=8_192,
    latency=LatencyModel(prefill_s_per_token=0.012, weights_s=0.02, overhead_s=0.004),
)


def test_the_experiment_is_lengths_times_batches_times_prefixes():
    """Lone calls of several lengths, batches up to the largest, cached prefixes, mixed runs."""
    whole = plan_experiment(SPEC, full_scale(SPEC))
    plan = whole.fitted
    lone = {run[0].input_tokens for run in plan if len(run) == 1 and not run[0].prefix}
    assert len(lone) >= 5
    assert {2, 4} <= {len(run) for run in plan}
    assert sum(bool(run[0].prefix) for run in plan) == 3
    longest = max(call.input_tokens for run in plan for call in run)
    assert 4 in [len(run) for run in plan if run[-1].input_tokens == longest]
    short, long = whole.held_out
    assert min(len(short), len(long)) >= 20
    assert max(c.input_tokens for c in short) < max(c.input_tokens for c in long)


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [(1, ()), (2, (2,)), (6, (2, 3, 4, 6)), (16, (2, 3, 4, 8, 16)), (48, (2, 3, 4, 16, 32, 48))],
)
def test_batches_of_two_three_and_four_are_measured(max_num_seqs: int, sizes: tuple[int, ...]):
    """They have costs of their own; of what is larger the largest three."""
    spec = msgspec.structs.replace(SPEC, max_num_seqs=max_num_seqs)
    assert full_scale(spec).batches == sizes
    assert quick_scale(spec).batches == tuple(size for size in sizes if size <= 4)


def test_a_batch_comes_while_its_first_prompt_is_computed():
    """All but the first come at one instant, before the first has its token: no race decides."""
    runs = plan_experiment(SPEC, full_scale(SPEC)).fitted
    batches = [run for run in runs if len({call.after_s for call in run}) == 2]
    assert {len(run) for run in batches} == {2, 3, 4}
    for first, *others in batches:
        (after_s,) = {call.after_s for call in others}
        assert 0.0 == first.after_s < after_s
        assert after_s < first.input_tokens * SPEC.latency.prefill_s_per_token


def test_equal_calls_are_spread_over_the_experiment():
    """A machine that changes its pace meanwhile makes them differ, which the noise tells."""
    runs = plan_experiment(SPEC, full_scale(SPEC)).fitted
    lone = [run for run in runs if len(run) == 1 and not run[0].prefix]
    for one in set(lone):
        first, second, third = (place for place, run in enumerate(runs) if run == one)
        assert min(second - first, third - second) > len(set(lone))


def test_prompts_join_calls_that_decode():
    """One after another, while the others still have tokens to make by the first guess."""
    model = SPEC.latency
    runs = [run for run in plan_experiment(SPEC, full_scale(SPEC)).fitted if run[-1].after_s > 0]
    joining = [run for run in runs if len({call.after_s for call in run}) > 2]
    assert {len(run) for run in joining} == {1 + 3, 2 + 3, 3 + 3}
    for run in joining:
        arrivals = [call.after_s for call in run[-3:]]
        assert arrivals == sorted(set(arrivals))
        prompts_s = sum(call.input_tokens for call in run[:-1]) * model.prefill_s_per_token
        steps = (run[-1].after_s - prompts_s) / (model.overhead_s + model.weights_s)
        assert 0 < steps < run[0].output_tokens


@pytest.mark.parametrize("scale", [quick_scale, full_scale])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 64])
def test_every_planned_call_fits(scale, max_num_seqs: int):
    """No experiment asks for more context or memory than there is, or for too few calls."""
    spec = msgspec.structs.replace(SPEC, max_num_seqs=max_num_seqs, max_context_tokens=256)
    plan = plan_experiment(spec, scale(spec)).runs
    calls = [call for run in plan for call in run]
    assert len(calls) >= 8
    assert all(call.input_tokens + call.output_tokens < 256 for call in calls)
    for run in plan:
        used = sum(call.input_tokens + call.output_tokens for call in run)
        is_batch = len(run) > 1 and len({call.after_s for call in run}) == 2
        assert used <= spec.kv_tokens or not is_batch


def test_the_longest_prompt_is_one_of_a_few_seconds():
    """A slow instance is not asked for prompts that take minutes."""
    slow = full_scale(SPEC).lengths[-1] * SPEC.latency.prefill_s_per_token
    assert slow < 4.0
    quick = msgspec.structs.replace(SPEC.latency, prefill_s_per_token=1e-4)
    assert full_scale(msgspec.structs.replace(SPEC, latency=quick)).lengths[-1] == 1_024


def test_prompts_begin_alike_only_where_they_should():
    """Equal prefix names give equal beginnings, other prompts differ from the first words on."""
    part = (PrefixPart("shared", 40),)
    one, two = prompt_of("a", 60, part).split(), prompt_of("b", 60, part).split()
    assert one[:40] == two[:40]
    assert one[40:] != two[40:]
    assert len(one) == len(two) == 60
    assert prompt_of("a", 30).split()[:8] != prompt_of("b", 30).split()[:8]
    assert prompt_of("a", 30) == prompt_of("a", 30)


def test_a_replayed_call_gets_a_prompt_and_others_pass():
    """Lengths of a replay become a prompt and a held output; an ordinary call is unchanged."""
    lengths = SimulatedLengths(input_tokens=25, output_tokens=7)
    request = with_prompt(bound_call("a", simulated=lengths)).request
    assert request.prompt is not None
    assert (len(request.prompt.split()), request.max_tokens) == (25, 7)
    assert request.extra["ignore_eos"] is True
    assert request.simulated is None
    plain = bound_call("b", simulated=None, prompt="hello")
    assert with_prompt(plain) is plain


def test_a_probe_is_a_call_like_any_other():
    """A planned call has a prompt of its length and its output held."""
    (planned, *_), *_ = plan_experiment(SPEC, quick_scale(SPEC)).fitted
    call = probe_call(SPEC, planned, "one", 1)
    assert call.request.prompt is not None
    assert len(call.request.prompt.split()) == planned.input_tokens
    assert call.request.max_tokens == planned.output_tokens


async def test_a_profile_is_measured_written_and_drawn(tmp_path: Path):
    """The experiment runs on any engine; what it finds is a fleet file that loads again."""
    fast = LatencyModel(prefill_s_per_token=1e-4, weights_s=1e-3)
    spec = msgspec.structs.replace(SPEC, latency=fast, max_context_tokens=512)
    written = StringIO()
    async with SimulatedEngine.open(spec, SystemClock()) as engine:
        simulated = _Simulating(engine)
        profile = await profile_engine(simulated, spec, JobProgress(Console(file=written)))
    assert profile.num_calls == sum(map(len, profile.plan.runs)) == sum(map(len, profile.runs))
    mixed = profile.plan.held_out
    assert len(mixed) == 2
    assert profile.fit.num_calls == profile.num_calls - sum(map(len, mixed))
    assert 0 < profile.held_out.latency_median < 1
    num_runs = len(profile.plan.runs)
    assert f"profiling {spec.instance_id}, runs: {num_runs}/{num_runs}" in written.getvalue()
    assert 0 <= profile.noise < 1
    path = tmp_path / "deep" / "fleet.toml"
    write_profile([profile], path)
    assert parse_fleet(path.read_bytes()) == (profile.spec,)
    assert profile_figure(profile).axes


async def test_a_first_guess_lets_a_few_calls_in():
    """Where batches look dear in its few calls, the guess is no reason to leave slots empty."""
    dear = LatencyModel(prefill_s_per_token=1e-4, weights_s=1e-5, seq_s=3e-2)
    spec = msgspec.structs.replace(SPEC, latency=dear, max_context_tokens=512, max_num_seqs=8)
    async with SimulatedEngine.open(spec, SystemClock()) as engine:
        console, choice = Console(quiet=True), EngineChoice()
        guessed = await measured_quickly(_Simulating(engine), spec, choice, console)
    assert knee_calls(msgspec.structs.replace(spec, latency=guessed.latency)) < 4
    assert guessed.max_num_seqs == 4


class _Simulating(ReplayedPrompts):
    """Gives probes the lengths that a simulated engine goes by."""

    def generate(self, call: BoundCall, engine_id: str):
        """Run one call."""
        prompt = call.request.prompt or ""
        lengths = SimulatedLengths(
            input_tokens=len(prompt.split()), output_tokens=call.request.max_tokens or 1
        )
        request = msgspec.structs.replace(call.request, simulated=lengths)
        return self._engine.generate(msgspec.structs.replace(call, request=request), engine_id)


def test_the_workload_fits_the_instance_and_is_not_the_experiment():
    """Queries of several stages whose prompts an instance computes in about half a second."""
    queries = small_queries(SPEC, 30, seed=1)
    assert queries == small_queries(SPEC, 30, seed=1)
    calls = [call for query in queries for stage in query.stages for call in stage.calls]
    assert max(call.input_tokens + call.output_tokens for call in calls) < 1_024
    assert {len(query.stages) for query in queries} == {3, 4}
    probed = {
        call.input_tokens for run in plan_experiment(SPEC, full_scale(SPEC)).runs for call in run
    }
    assert len({call.input_tokens for call in calls} - probed) > 20


def test_at_the_knee_the_simulated_instance_is_busy():
    """Load is a share of the rate that saturates: waiting grows with it."""
    queries = small_queries(SPEC, 40, seed=1)
    knee = knee_qps(queries, SPEC)
    times = [
        simulated_run(with_arrivals(queries, SPEC, load * knee, 0), SPEC).call_latency_s(50)
        for load in (0.1, 0.5, 1.0)
    ]
    assert times[0] < times[1] < times[2]


def _run(scale: float) -> RunTimings:
    calls = tuple(
        CallTiming(first_token_s=scale * n, end_s=scale * 2 * n, output_tokens=n + 1)
        for n in range(1, 101)
    )
    return RunTimings(calls=calls, queries_s=tuple(scale * n for n in range(1, 101)))


def test_errors_are_shares_of_what_was_measured():
    """A simulator that says 10% too much everywhere is off by 10% in every metric."""
    errors = errors_of(_run(1.1), [_run(0.95), _run(1.05)])
    assert set(errors) == set(METRICS)
    assert list(errors.values()) == pytest.approx([0.1] * len(METRICS))
    assert noise_of([_run(0.95), _run(1.05)]) == pytest.approx(0.05)


@pytest.mark.parametrize("text", ["", "0", "1.5", "half", "0.3,-1"])
def test_wrong_loads_are_refused(text: str):
    """A load is a share of the knee."""
    with pytest.raises(ConfigError):
        parse_loads(text)


def test_engines_are_chosen_by_options(monkeypatch: pytest.MonkeyPatch):
    """No option means simulated engines; the servers' key comes from the environment."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert choice_of(None, None) is None
    assert choice_of("simulated", []) is None
    chosen = choice_of(None, ["http://a:1"])
    assert chosen is not None
    assert (chosen.urls, chosen.api_key) == (("http://a:1",), "secret")


URL = "http://a:1"


@pytest.mark.parametrize(
    ("choose", "said"),
    [
        (lambda: choice_of("llamacp", None), "did you mean llamacpp"),
        (lambda: choice_of("openai", None), "--openai URL"),
        (lambda: choice_of("llamacpp", [URL]), "use one of them"),
        (lambda: real_choice_of("vllm", [URL], ""), "use one of them"),
        (lambda: choice_of("llamacpp", None, fleet="hetero-1"), "hexflow profile wrote"),
        (lambda: choice_of(None, [URL], fleet="homogeneous"), "hexflow profile wrote"),
        (lambda: real_choice_of("simulated", None, "of no use"), "of no use"),
        (lambda: on_one_core(None, [URL, URL], None, ""), "one at a time"),
        (lambda: on_one_core(None, [URL], 0, ""), "--core"),
        (lambda: choice_of(None, None, model="m"), "--model m chooses"),
        (lambda: real_choice_of("llamacpp", None, "", model="m"), "--model m chooses"),
    ],
)
def test_options_that_contradict_each_other_are_refused(choose: Callable[[], object], said: str):
    """None of them is left out without a word."""
    with pytest.raises(ConfigError, match=said):
        choose()


def test_what_is_not_chosen_has_a_default():
    """A command for real engines starts one when none is named; a fleet file comes with any."""
    assert real_choice_of(None, None, "").engine == "llamacpp"
    assert real_choice_of(None, [URL], "").urls == (URL,)
    assert choice_of("simulated", None, fleet="hetero-2") is None
    chosen = choice_of(None, [URL], fleet="out/profile.toml")
    assert chosen is not None
    assert chosen.fleet == Path("out/profile.toml")


def test_a_choice_is_told_as_it_is_typed():
    """What `profile` says at its end can be copied."""
    assert asked_for(real_choice_of(None, None, "")) == "--engine llamacpp"
    assert asked_for(real_choice_of(None, [URL, URL], "")) == f"--openai {URL} --openai {URL}"
    one = on_one_core(None, [URL], None, "", model="large")
    assert asked_for(one) == f"--openai {URL} --model large"


NO_ERRORS = FitErrors(ttft_median=0.0, ttft_p95=0.0, latency_median=0.0, latency_p95=0.0)
NO_PROFILE = Profile(
    spec=SPEC,
    fit=LatencyFit(latency=SPEC.latency, errors=NO_ERRORS, num_calls=0),
    held_out=NO_ERRORS,
    plan=Plan(fitted=()),
    runs=(),
)


def test_one_run_has_no_noise():
    """Where Ctrl-C left one run of a load, nobody knows what its error means: void."""
    load = LoadResult(
        load=0.5,
        rate_qps=1.0,
        errors=errors_of(_run(1.1), [_run(1.0)]),
        noise=math.nan,
        real=(_run(1.0),),
        simulated=_run(1.1),
        profile=NO_PROFILE,
    )
    assert load.is_void
    assert next(iter(fidelity_table([load]).columns[-1].cells)) == "one run (void)"


class _Telling(_Simulating):
    """An engine that tells counts of its own."""

    usage = Usage(input_tokens=10, output_tokens=24)

    async def generate(self, call: BoundCall, engine_id: str):
        """Answer at once."""
        del call, engine_id
        yield Finished(text="", usage=self.usage)


@pytest.mark.parametrize(
    ("usage", "said"),
    [(Usage(), "no token counts"), (Usage(input_tokens=9, output_tokens=1), "1 of ")],
)
async def test_a_profile_needs_counts(usage: Usage, said: str):
    """Where a server tells no tokens, or gives one instead of many, there is no profile."""
    async with SimulatedEngine.open(SPEC, SystemClock()) as simulated:
        engine = _Telling(simulated)
        engine.usage = usage
        with pytest.raises(ConfigError, match=said):
            await profile_engine(engine, SPEC, JobProgress(Console(), quiet=True))


async def test_a_wish_to_stop_ends_what_is_worth_nothing_by_halves():
    """The work is cancelled, and with it what waits for it; without the wish its result counts."""
    stop, began = asyncio.Event(), asyncio.Event()

    async def works() -> int:
        began.set()
        await asyncio.sleep(0 if stop.is_set() else 1_000)
        return 7

    waiting = asyncio.ensure_future(unless_stopped(works(), stop))
    await began.wait()
    stop.set()
    assert await waiting is None
    assert await unless_stopped(works(), asyncio.Event()) == 7


async def test_a_cancelled_wait_cancels_the_work():
    """A second Ctrl-C leaves nothing behind, and is no result."""
    began, ended = asyncio.Event(), asyncio.Event()

    async def works() -> None:
        began.set()
        try:
            await asyncio.sleep(1_000)
        finally:
            ended.set()

    waiting = asyncio.ensure_future(unless_stopped(works(), asyncio.Event()))
    await began.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended.is_set()


async def test_an_error_of_the_work_is_told_as_it_is():
    """Not within a group: commands tell it to the user."""

    async def works() -> None:
        raise ConfigError("no")

    with pytest.raises(ConfigError, match="no"):
        await unless_stopped(works(), asyncio.Event())


async def test_experiments_are_merged_at_their_mean_pace():
    """Half of the calls on a machine a fifth slower: a speed between both, and noise that tells.

    One call that was held up makes equal calls differ, but not the experiments.
    """
    quick = await _quiet_profile()
    slow = msgspec.structs.replace(
        quick, runs=tuple(tuple(_later(call, 1.2) for call in run) for run in quick.runs)
    )
    whole = await merged(SPEC, (quick, slow))
    assert whole.num_calls == 2 * quick.num_calls
    assert whole.plan.runs == (2 * quick.plan.fitted + 2 * quick.plan.held_out)
    assert pace_noise((quick, slow)) == pytest.approx(0.1 / 1.1)
    assert pace_noise((quick, slow, quick)) == pytest.approx(0.1 / (3.2 / 3))
    assert whole.noise >= 0.1 / 1.1
    held_up = msgspec.structs.replace(
        quick, runs=((_later(quick.runs[0][0], 3.0),), *quick.runs[1:])
    )
    assert pace_noise((quick, held_up)) < 0.02
    step_s = [one.spec.latency.weights_s + one.spec.latency.overhead_s for one in (quick, whole)]
    assert 1.0 < step_s[1] / step_s[0] < 1.2
    assert (await merged(SPEC, (quick,))).fit == quick.fit


async def _quiet_profile() -> Profile:
    fast = LatencyModel(prefill_s_per_token=1e-4, weights_s=1e-3)
    spec = msgspec.structs.replace(SPEC, latency=fast, max_context_tokens=512)
    async with SimulatedEngine.open(spec, SystemClock()) as engine:
        progress = JobProgress(Console(), quiet=True)
        return await profile_engine(_Simulating(engine), spec, progress)


def _later(call: ProbedCall, factor: float) -> ProbedCall:
    """Return a call on a machine that takes so much longer for everything."""
    return msgspec.structs.replace(
        call,
        started_s=factor * call.started_s,
        first_token_s=factor * call.first_token_s,
        finished_s=factor * call.finished_s,
    )


async def test_a_second_experiment_asks_other_prompts():
    """An engine remembers the first one's; what comes out of its cache would look quick."""
    (planned, *_), *_ = plan_experiment(SPEC, full_scale(SPEC)).fitted
    prompts = {probe_call(SPEC, planned, name, 1).request.prompt for name in ("one", "two")}
    assert len(prompts) == 2
    begun = msgspec.structs.replace(planned, prefix="shared", prefix_tokens=8, input_tokens=8)
    heads = {probe_call(SPEC, begun, name, 1).request.prompt for name in ("one", "two")}
    assert len(heads) == 2


def test_a_core_that_is_not_there_is_refused():
    """The error names those that may be used."""
    with pytest.raises(ConfigError, match="--core 999: this command may use 0"):
        on_one_core("llamacpp", None, 999, "")


def test_what_was_not_measured_is_no_number():
    """Runs of one-token calls have no time per token: null in JSON, words in the table."""
    calls = (CallTiming(first_token_s=1.0, end_s=1.0, output_tokens=1),)
    run = RunTimings(calls=calls, queries_s=(1.0,))
    load = LoadResult(
        load=0.5,
        rate_qps=1.0,
        errors=errors_of(run, [run]),
        noise=0.0,
        real=(run,),
        simulated=run,
        profile=NO_PROFILE,
    )
    assert math.isnan(load.errors["tpot_median_error"])
    shown = [next(iter(column.cells)) for column in fidelity_table([load]).columns]
    assert shown[:2] == ["50%", "0.0%"]
    assert "no values" in shown


def test_a_profile_that_cannot_be_written_is_told_before(tmp_path: Path):
    """A file in the way of a folder, and a folder in the way of the file; nothing is touched."""
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file" / "fleet.toml", tmp_path):
        with pytest.raises(ConfigError, match="cannot be written"):
            check_writable(path)
    check_writable(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_the_capacity_knows_what_batching_costs():
    """A step of a batch that takes longer makes for less capacity; that of one call does not."""
    slower = msgspec.structs.replace(SPEC.latency, batched_s=0.05)
    queries = small_queries(SPEC, 20, seed=1)
    for most, is_less in ((4, True), (1, False)):
        plain = msgspec.structs.replace(SPEC, max_num_seqs=most)
        other = msgspec.structs.replace(plain, latency=slower)
        assert (capacity_qps(queries, (other,)) < capacity_qps(queries, (plain,))) == is_less
