"""What admission costs, as `hexflow bench admission` counts it."""

import msgspec
import pytest

from services.cli.bench_admission import (
    AdmissionResult,
    Arm,
    Unlimited,
    admission_json,
    admission_table,
)
from shared.adapters.clock import SystemClock
from shared.adapters.simulated_engine import SimulatedEngine
from shared.contracts.messages import BoundCall
from shared.ports import Finished
from tests.support.scheduling import make_spec
from tests.support.worker_bench import bound_call


def result() -> AdmissionResult:
    """Return two runs with admission, and two without."""
    return AdmissionResult(
        spec=msgspec.structs.replace(make_spec("a"), max_num_seqs=3),
        admitted=Arm(tokens_per_s=[9.0, 10.0], call_p50_s=[1.0, 1.0], num_waiting=[0] * 99 + [1]),
        unlimited=Arm(tokens_per_s=[10.0, 10.0], call_p50_s=[2.0, 2.0]),
    )


def test_the_ratio_is_of_mean_throughputs():
    """9.5 tokens per second with admission against 10 without are a ratio of 0.95."""
    told = admission_json(result())
    assert told["throughput_ratio"] == pytest.approx(0.95)
    assert told["calls_at_a_time"] == 3
    assert told["admitted"]["repeat_noise"] == pytest.approx(0.5 / 9.5, abs=1e-4)
    assert told["admitted"]["waiting_inside_p99"] <= 1


def test_an_engine_that_does_not_tell_is_not_said_to_have_no_queue():
    """Without a count there is no P99, in JSON and for people."""
    assert admission_json(result())["unlimited"]["waiting_inside_p99"] is None
    shown = list(admission_table(result()).columns[-1].cells)
    assert shown[1] == "not told"


class Full(SimulatedEngine):
    """An engine whose batch is full."""

    def has_room_for(self, call: BoundCall) -> bool:
        """Return False."""
        del call
        return False


async def test_without_admission_there_is_always_room():
    """The wrapped engine says that it has room when the engine itself has none, and runs calls."""
    spec = make_spec("a")
    async with Full.open(spec, SystemClock(time_scale=100.0)) as engine:
        unlimited = Unlimited(engine, spec)
        assert not engine.has_room_for(bound_call("y"))
        assert unlimited.has_room_for(bound_call("y"))
        *_, last = [event async for event in unlimited.generate(bound_call("y"), "y:0")]
        assert isinstance(last, Finished)
