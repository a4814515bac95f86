"""Replaying a window: what goes in, what comes out, and what tuning does to a steady load."""

import msgspec
import numpy as np
import pytest

from shared.scheduling.shapes import shape_from_trace
from shared.simulation.fleets import builtin_fleet
from shared.simulation.generator import generate
from shared.simulation.scenario import Scenario
from shared.simulation.simulator import simulate
from shared.simulation.stationary import random_workload, run_stationary
from shared.simulation.window_replay import ReplayRequest, replay_window
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
    answer = replay_window(
        msgspec.structs.replace(request_, shapes_before=before), core="interpreted"
    )
    (now,) = [run for run in answer.runs if run.alpha == 0.7]
    assert answer.as_it_was.latencies_s != now.latencies_s


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_tuning_a_stationary_workload_makes_it_no_worse_and_rarely_changes(seed):
    """`hexflow bench stationary` in small: P95 stays, α changes at most every third window."""
    result = run_stationary(random_workload(seed, 2_400), window_queries=400)
    assert not result.is_worse
    assert result.num_changes <= 2
