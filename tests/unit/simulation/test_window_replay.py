"""Replaying a window: what goes in, what comes out, and what tuning does to a steady load."""

import msgspec
import numpy as np
import pytest

from shared.scheduling.shapes import shape_from_trace
from shared.simulation.fleets import builtin_fleet
from shared.simulation.generator import generate
from shared.simulation.scenario import Change, Scenario
from shared.simulation.simulator import simulate
from shared.simulation.stationary import random_workload, run_stationary
from shared.simulation.window_replay import Past, ReplayRequest, replay_window
from shared.simulation.workload import PoissonArrivals, prepare


@pytest.fixture(scope="module")
def request_() -> ReplayRequest:
    """A small window on four instances, α = 0.7 in force."""
    rng = np.random.default_rng(0)
    fleet = builtin_fleet("hetero-1")
    queries = prepare(generate(40, rng), fleet, PoissonArrivals(0.4), None, rng)
    return ReplayRequest(
        queries=queries,
        fleet=fleet,
        policy="hexgen-flow",
        shapes=shape_from_trace(queries),
        alphas=(0.0, 0.01, 0.1, 1.0),
        current=0.7,
    )


def test_every_alpha_is_tried_with_the_one_in_force_and_refined_around_the_best(request_):
    """The grid, 0.7, and values between the best and its neighbours."""
    runs = replay_window(request_, core="interpreted").runs
    alphas = [run.alpha for run in runs]
    assert {0.0, 0.01, 0.1, 0.7, 1.0} < set(alphas)
    assert alphas == sorted(alphas)
    assert all(sum(run.shares.values()) == pytest.approx(1.0) for run in runs)


def test_a_replay_is_the_simulation_itself(request_):
    """The same queries under the same α take the same time as in a plain run."""
    answer = replay_window(request_, core="interpreted")
    plain = simulate(
        Scenario(queries=request_.queries, fleet=request_.fleet, alpha=0.7, shapes=request_.shapes),
        core="interpreted",
    )
    assert answer.as_it_was.latencies_s == tuple(plain.latency_s.tolist())


def test_other_expectations_in_the_window_get_a_run_of_their_own(request_):
    """The calibration compares with what the dispatcher believed then."""
    shape = request_.shapes["text2sql"]
    stages = {
        name: msgspec.structs.replace(stage, output_tokens=stage.output_tokens * factor)
        for (name, stage), factor in zip(shape.stages.items(), (4.0, 0.2) * 9, strict=False)
    }
    before = {"text2sql": msgspec.structs.replace(shape, stages=stages)}
    past = Past(alpha=0.7, shapes=before)
    answer = replay_window(msgspec.structs.replace(request_, past=past), core="interpreted")
    (now,) = [run for run in answer.runs if run.alpha == 0.7]
    assert answer.as_it_was.latencies_s != now.latencies_s


def test_the_window_as_it_was_has_the_speeds_beliefs_and_alpha_of_its_time(request_):
    """α 0.7, then 0.01; an instance that slowed down unnoticed: the run of exactly that."""
    slowed = Change(at_s=30.0, speed_factors={"a100-0": 3.0})
    said = Change(at_s=60.0, alpha=0.01, believed_factors={"a100-0": 3.0})
    request = msgspec.structs.replace(
        request_,
        current=0.01,
        believed_factors={"a100-0": 3.0},
        true_changes=(slowed,),
        past=Past(alpha=0.7, shapes=request_.shapes, changes=(said,)),
    )
    scenario = Scenario(
        queries=request.queries,
        fleet=request.fleet,
        alpha=0.7,
        shapes=request.shapes,
        believed_factors={},
        changes=(slowed, said),
    )
    plain = simulate(scenario, core="interpreted")
    answer = replay_window(request, core="interpreted")
    assert answer.as_it_was.latencies_s == tuple(plain.latency_s.tolist())


def test_what_had_not_ended_when_the_window_was_looked_at_counts_as_running(request_):
    """P95 as measured in the middle of an overload is not that of the whole run."""
    cut_s = (request_.queries[-1].arrival_s or 0.0) + 1.0
    past = Past(alpha=0.7, shapes=request_.shapes, seen_until_s=cut_s)
    whole = msgspec.structs.replace(past, seen_until_s=1e9)
    seen, ended = (
        replay_window(msgspec.structs.replace(request_, past=one), core="interpreted").as_it_was
        for one in (past, whole)
    )
    assert seen.latencies_s == ended.latencies_s
    assert seen.p95_s < ended.p95_s
    assert ended.p95_s == pytest.approx(
        np.percentile(ended.latencies_s[4:], 95, method="inverted_cdf")
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_tuning_a_stationary_workload_makes_it_no_worse_and_rarely_changes(seed):
    """`hexflow bench stationary` in small: P95 stays, α changes at most every third window."""
    result = run_stationary(random_workload(seed, 2_400), window_queries=400)
    assert not result.is_worse
    assert result.num_changes <= 2
