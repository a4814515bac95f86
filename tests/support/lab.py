"""Small settings for the policy lab."""

from collections.abc import Callable, Sequence

import msgspec

from services.cli.console import stderr_console
from services.cli.lab.setting import Cell, Job, Row, Setting, Setup, Variant
from services.cli.lab.steady import InstanceUse, Measured
from services.cli.progress import JobProgress
from services.cli.workload import generated, load_fleet

FLEETS = {"hetero-1": load_fleet("hetero-1"), "homogeneous": load_fleet("homogeneous")}
TRACE = generated(12, "natural", 0)
SETTING = Setting(trace="natural", fleet="hetero-1")
QUIET = JobProgress(stderr_console(), quiet=True)


def setup(**changes: object) -> Setup:
    """Twelve generated queries on two fleets."""
    fields = {"traces": {"natural": TRACE}, "fleets": FLEETS, "num_queries": 30, **changes}
    return Setup(**fields)  # type: ignore[arg-type]


def cell(rate_qps: float = 0.2, **changes: str) -> Cell:
    """The setting above under a load."""
    return Cell(setting=msgspec.structs.replace(SETTING, **changes), rate_qps=rate_qps)


def job(*variants: Variant, seed: int = 0, slo_scale: float | None = None, **of: object) -> Job:
    """A job in that cell; by default of the paper's policy."""
    return Job(
        cell=cell(**of),  # type: ignore[arg-type]
        seed=seed,
        variants=variants or (Variant(policy="hexgen-flow", alpha=0.1),),
        slo_scale=slo_scale,
    )


def measured(**changes: object) -> Measured:
    """What a run came to, with defaults."""
    use = InstanceUse(
        gpu="A100",
        utilisation=0.5,
        batch=2.0,
        calls=10,
        output_tokens=100,
        cached_share=0.5,
        preemptions=0,
    )
    fields = {
        "num_queries": 100,
        "completed": 1.0,
        "p50_s": 50.0,
        "p95_s": 90.0,
        "p99_s": 99.0,
        "mean_s": 50.0,
        "attainment": 1.0,
        "goodput_qps": 0.2,
        "scale95": 2.0,
        "scale99": 3.0,
        "instances": {"a100-0": use, "a6000-0": use},
        **changes,
    }
    return Measured(**fields)  # type: ignore[arg-type]


class ScriptedRunner:
    """Answers jobs with what a function says.

    Args:
        answer: (job, variant) -> what its run comes to.
    """

    def __init__(self, answer: Callable[[Job, Variant], Measured]) -> None:
        self._answer = answer
        self.labels: list[str] = []
        self.jobs: list[Job] = []

    def run(self, label: str, jobs: Sequence[Job]) -> list[Row]:
        """Answer every job."""
        self.labels.append(label)
        self.jobs += jobs
        return [
            Row(
                cell=one.cell,
                seed=one.seed,
                variant=variant,
                slo_scale=one.slo_scale,
                measured=self._answer(one, variant),
            )
            for one in jobs
            for variant in one.variants
        ]
