"""Waiting times agree with queueing theory, within the confidence interval of replications.

A decode step takes 1 ms whatever the batch, so a call of n output tokens is a service of n ms,
and an instance of c places is a station of c servers.
"""

import math

import numpy as np
import pytest

from shared.simulation.simulator import simulate
from tests.support.simulated_queries import STEPS_PER_S, queueing_scenario

REPLICATIONS = 8
QUERIES = 4_000
WARM_UP = 500
MEAN_SERVICE_S = 1.0
# Student's t, 7 degrees of freedom, two-sided 99%.
T_99 = 3.499


def waits_s(load: float, servers: int, *, is_constant: bool) -> np.ndarray:
    """Mean waiting time of each replication, without the warm-up."""
    means = []
    for seed in range(REPLICATIONS):
        rng = np.random.default_rng(seed)
        steps = np.full(QUERIES, MEAN_SERVICE_S * STEPS_PER_S)
        if not is_constant:
            steps = np.maximum(1, np.rint(rng.exponential(steps)))
        rate_qps = load * servers / MEAN_SERVICE_S
        result = simulate(queueing_scenario(rate_qps, steps, servers, rng), core="compiled")
        result.check()
        waits = result.started_s - result.ready_s
        means.append(waits[WARM_UP:].mean())
    return np.array(means)


def assert_agrees(samples: np.ndarray, theory_s: float) -> None:
    """The theory's value lies in the interval, and the interval says something."""
    half = T_99 * samples.std(ddof=1) / math.sqrt(len(samples))
    # A call starts with the next step: half a step on average when others are being served.
    assert abs(samples.mean() - theory_s) <= half + 0.5 / STEPS_PER_S
    assert half < 0.35 * theory_s


@pytest.mark.parametrize("load", [0.5, 0.7])
def test_mm1(load: float) -> None:
    """M/M/1: mean wait is ρ/(1-ρ) mean service times."""
    assert_agrees(waits_s(load, 1, is_constant=False), load / (1 - load) * MEAN_SERVICE_S)


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_md1(load: float) -> None:
    """M/D/1: mean wait is half of that of M/M/1."""
    theory_s = load / (2 * (1 - load)) * MEAN_SERVICE_S
    assert_agrees(waits_s(load, 1, is_constant=True), theory_s)


@pytest.mark.parametrize(("servers", "load"), [(2, 0.7), (4, 0.8)])
def test_mmc(servers: int, load: float) -> None:
    """M/M/c: mean wait follows Erlang's C formula."""
    offered = servers * load
    busy = offered**servers / math.factorial(servers) / (1 - load)
    idle = sum(offered**count / math.factorial(count) for count in range(servers))
    delayed = busy / (idle + busy)
    theory_s = delayed / (servers * (1 - load)) * MEAN_SERVICE_S
    assert_agrees(waits_s(load, servers, is_constant=False), theory_s)
