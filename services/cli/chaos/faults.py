"""What can happen to a mesh, and a seeded plan of it."""

from collections.abc import Collection, Iterable, Sequence
from random import Random
from typing import Literal, get_args

import msgspec

from shared.errors import ConfigError

FaultKind = Literal[
    "kill-worker",
    "kill-dispatcher",
    "kill-tuner",
    "pause-worker",
    "hang-engine",
    "fail-engine",
    "partition-worker",
    "jump-clock",
    "stop-broker",
    "kill-broker",
    "restart-redis",
    "flush-redis",
    "lose-aof-second",
    "rolling-restart",
    "kill-producer",
]
KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
SERVER_FAULTS = frozenset(
    {
        *("partition-worker", "stop-broker", "kill-broker"),
        *("restart-redis", "flush-redis", "lose-aof-second"),
    }
)
"""Not done to servers of somebody else; the far worker's proxies stand before our own only."""
PRODUCER = "producer"
SHORT = ("kill-worker", "kill-dispatcher", "flush-redis")

QUIET_S = (1.0, 3.0)
"""Bounds of the time before a fault, wall seconds."""
QUICK_S = 0.5
BROKER_DOWN_S = 10.0
REDIS_DOWN_S = 2.0
PAUSE_S = 10.0
"""Above the dispatchers' `dead_after_s`: the paused worker's calls are given to others."""
PARTITION_S = 12.0
"""Likewise: whoever is cut off for so long has lost its calls."""
FAIL_S = 60.0
ENGINE_S = 20.0
"""Above what a generation may take without a result in a chaos run's workers."""
PRODUCER_DOWN_S = 2.0
"""Outcomes come meanwhile that the producer's next life has to find."""
ON_A_WORKER = ("pause-worker", "hang-engine", "fail-engine")
REPAIRS_S = {
    "rolling-restart": 30.0,
    "pause-worker": 3.0,
    "partition-worker": 3.0,
    "stop-broker": 6.0,
    "kill-broker": 6.0,
}
REPAIR_S = 4.0


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happens.

    Attributes:
        kind: What.
        victim: Process it happens to; empty for servers and for all of them.
        quiet_s: Time before it, wall seconds.
        down_s: How long the victim is gone, wall seconds.
    """

    kind: FaultKind
    victim: str = ""
    quiet_s: float = 0.0
    down_s: float = 0.0

    @property
    def name(self) -> str:
        """What and to whom, for people."""
        return f"{self.kind} {self.victim}".strip()


def parse_kinds(text: str) -> tuple[FaultKind, ...]:
    """Return the kinds of `kill-worker,flush-redis`; all for an empty text.

    Raises:
        ConfigError: One is unknown.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    unknown = sorted(set(words) - set(KINDS))
    if unknown:
        raise ConfigError(f"unknown faults {', '.join(unknown)}; known: {', '.join(KINDS)}")
    return tuple(kind for kind in KINDS if kind in words or not words)


def make_plan(
    seed: int,
    kinds: Collection[FaultKind],
    processes: Sequence[str],
    *,
    short: bool = False,
    least_s: float = 0.0,
) -> tuple[Fault, ...]:
    """Return the faults of a run in order: the same seed gives the same plan.

    Args:
        seed: Of victims, order and times.
        kinds: Which kinds happen.
        processes: Names of the mesh's processes, the service first.
        short: One victim per kind instead of every process in turn.
        least_s: After a round of everything follow others until the plan takes so long, wall
            seconds.
    """
    rng = Random(seed)  # noqa: S311 - a plan that can be repeated
    plan = _round(kinds, processes, rng, short=short)
    again = [kind for kind in kinds if kind != "kill-producer"]  # it asks its queries only once
    while duration_s(plan) < least_s and (more := _round(again, processes, rng, short=short)):
        plan += more
    return tuple(plan)


def _round(
    kinds: Collection[FaultKind], processes: Sequence[str], rng: Random, *, short: bool
) -> list[Fault]:
    plan: list[Fault] = []
    for kind in KINDS:
        if kind in kinds:
            plan += _of_kind(kind, processes, rng, short=short)
    rng.shuffle(plan)
    return plan


def duration_s(plan: Iterable[Fault]) -> float:
    """Return about how long a plan takes, wall seconds."""
    return sum(fault.quiet_s + fault.down_s + REPAIRS_S.get(fault.kind, REPAIR_S) for fault in plan)


def _of_kind(kind: FaultKind, processes: Sequence[str], rng: Random, *, short: bool) -> list[Fault]:
    if kind == "kill-producer":
        victims = [PRODUCER]
    elif kind.startswith("kill-") and kind not in SERVER_FAULTS:
        service = kind.removeprefix("kill-")
        victims = [name for name in processes if name.startswith(service)]
        if short:
            victims = [rng.choice(victims)]
    elif kind == "partition-worker":
        victims = [[name for name in processes if name.startswith("worker")][-1]]
    elif kind == "jump-clock":
        victims = [rng.choice([name for name in processes if not name.startswith("tuner")])]
    elif kind in ON_A_WORKER:
        victims = [rng.choice([name for name in processes if name.startswith("worker")])]
    else:
        victims = [""]
    return [
        Fault(
            kind=kind,
            victim=victim,
            quiet_s=round(rng.uniform(*QUIET_S), 2),
            down_s=_down_s(kind, index + rng.randrange(2), short=short),
        )
        for index, victim in enumerate(victims)
    ]


def _down_s(kind: FaultKind, turn: int, *, short: bool) -> float:
    """Return how long; workers come back at once and after their calls were given away, in turn."""
    if kind == "kill-worker":
        return QUICK_S if turn % 2 else PAUSE_S
    if kind == "kill-dispatcher":
        return QUICK_S if turn % 2 and not short else 4.0
    times = {
        "kill-tuner": QUICK_S,
        "pause-worker": PAUSE_S,
        "hang-engine": ENGINE_S,
        "fail-engine": ENGINE_S if short else FAIL_S,
        "partition-worker": PARTITION_S,
        "jump-clock": QUICK_S,
        "stop-broker": BROKER_DOWN_S,
        "kill-broker": REDIS_DOWN_S,
        "lose-aof-second": REDIS_DOWN_S,
        "restart-redis": REDIS_DOWN_S,
        "kill-producer": PRODUCER_DOWN_S,
    }
    return times.get(kind, 0.0)
