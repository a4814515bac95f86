"""The invariants catch what they are there to catch."""

from collections.abc import Callable

import numpy as np
import pytest

from shared.simulation.invariants import SimulationFault, union_s
from shared.simulation.results import RunResult
from shared.simulation.scenario import Scenario
from shared.simulation.simulator import simulate
from tests.support.simulated_queries import make_query, make_spec


@pytest.fixture
def result() -> RunResult:
    """A small run with a queue."""
    queries = tuple(make_query(n, [[(3_000, 20)], [(100, 5)]], arrival_s=0.3 * n) for n in range(6))
    return simulate(Scenario(queries=queries, fleet=(make_spec("a"), make_spec("b"))))


def lose_a_call(run: RunResult) -> None:
    """A bound call never ends."""
    run.call_end_s[3] = np.nan


def forget_a_query(run: RunResult) -> None:
    """A query never ends."""
    run.end_s[2] = np.nan


def start_too_early(run: RunResult) -> None:
    """A call starts before it is ready."""
    run.started_s[4] = run.ready_s[4] - 1.0


def end_query_too_early(run: RunResult) -> None:
    """A query ends before its last call."""
    run.end_s[1] -= 0.5


def work_too_little(run: RunResult) -> None:
    """An instance was idle with work in its line."""
    run.busy_s[0] -= 0.1


def miscount(run: RunResult) -> None:
    """The count of calls present disagrees with their times."""
    run.present_s[1] += 0.1


def find_too_much(run: RunResult) -> None:
    """A prompt was found in the cache as a whole."""
    run.cached_tokens[0] = run.input_tokens[0]


def test_sound_run_passes(result: RunResult) -> None:
    """A run as it is breaks nothing."""
    result.check()


@pytest.mark.parametrize(
    "damage",
    [
        lose_a_call,
        forget_a_query,
        start_too_early,
        end_query_too_early,
        work_too_little,
        miscount,
        find_too_much,
    ],
)
def test_damaged_run_is_caught(result: RunResult, damage: Callable[[RunResult], None]) -> None:
    """Each kind of damage breaks an invariant."""
    damage(result)
    with pytest.raises(SimulationFault):
        result.check()


def test_union_of_intervals() -> None:
    """Overlaps count once, gaps not at all."""
    starts, ends = np.array([5.0, 0.0, 1.0, 5.5]), np.array([6.0, 2.0, 3.0, 5.7])
    assert union_s(starts, ends) == pytest.approx(4.0)
    assert union_s(np.array([]), np.array([])) == 0.0


def test_summary_is_that_of_the_definition(result: RunResult) -> None:
    """Percentiles and attainment follow from the queries' times."""
    result.slo_s[:] = np.median(result.latency_s)
    summary = result.summary()
    assert summary.p50_s == pytest.approx(np.median(result.latency_s))
    assert summary.attainment == pytest.approx(np.mean(result.latency_s <= result.slo_s))
    span_s = result.end_s.max() - result.arrival_s.min()
    assert summary.goodput_qps == pytest.approx(6 * summary.attainment / span_s)
    assert ((result.utilisation > 0) & (result.utilisation <= 1)).all()
