"""What is said about numbers whose time is scaled."""

from services.cli.caveats import scale_caveats
from services.cli.tally import Tally
from shared.contracts.messages import CallOutcome, CallTimes


def tally(*, late_s: float = 0.0, hops_s: float = 0.25) -> Tally:
    """Return a run of one call that travelled so long, and a query that arrived so late."""
    made = Tally()
    times = CallTimes(ready_at_s=10.0, queued_at_s=10.0 + hops_s, finished_at_s=20.0)
    outcome = CallOutcome(request_id="r", query_id="q", kind="completed", times=times)
    made.call_ended(outcome, now_s=20.0)
    made.arrived(late_s)
    return made


def test_real_time_needs_no_caveat():
    """At scale 1 a millisecond is a millisecond, however busy the machine."""
    assert scale_caveats({"": tally(late_s=99.0)}, 1.0) == []


def test_scaled_time_says_what_the_hops_cost():
    """The cost is named for each run, with the factor by which real time counts."""
    (line,) = scale_caveats({"edf": tally(), "vllm": tally(hops_s=0.5)}, 12.0)
    assert "(edf 0.25 s, vllm 0.50 s on average)" in line
    assert "12-fold" in line


def test_a_machine_too_busy_is_said_first():
    """From half a wall second of lateness on, the numbers are not only about the policy."""
    assert len(scale_caveats({"": tally(late_s=4.9)}, 10.0)) == 1
    first, _ = scale_caveats({"": tally(late_s=5.1)}, 10.0)
    assert "5.1 workload seconds late" in first


def test_a_busy_machine_gets_a_command_that_gives_it_time():
    """What is advised can be typed as it stands, and never asks for less than real time."""
    (first, _) = scale_caveats({"": tally(late_s=50.0)}, 12.0, "hexflow demo --time-scale")
    assert "hexflow demo --time-scale 6." in first
    (first, _) = scale_caveats({"": tally(late_s=50.0)}, 1.5)
    assert "--time-scale 1." in first


def test_a_run_without_outcomes_has_no_cost_to_tell():
    """Nothing travelled to the end: no sentence, and no number that is none."""
    assert scale_caveats({"": Tally()}, 10.0) == []
