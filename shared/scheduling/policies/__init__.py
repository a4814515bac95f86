"""All policies: one file each, one line each in the registry below."""

from collections.abc import Callable

from shared.domain.near_names import did_you_mean
from shared.errors import ConfigError
from shared.scheduling.policies.earliest_finish import EarliestFinish
from shared.scheduling.policies.edf import EarliestDeadline
from shared.scheduling.policies.flow import FlowFcfs, HexgenFlow, RoundRobinUrgency
from shared.scheduling.policies.least_outstanding import LeastOutstanding
from shared.scheduling.policies.llf import LeastLaxity
from shared.scheduling.policies.power_of_two import PowerOfTwo
from shared.scheduling.policies.prefix_queue import PrefixQueue
from shared.scheduling.policies.qlm import RequestGroups
from shared.scheduling.policies.ratio import CumulativeRatio
from shared.scheduling.policies.round_robin import RoundRobinFcfs
from shared.scheduling.policies.vtc import VirtualTokenCounter
from shared.scheduling.policy import Policy

DEFAULT_POLICY = "hexgen-flow"
# α until a tuner knows better: near the best on every loaded fleet tried (docs/tuning.md).
DEFAULT_ALPHA = 0.01

REGISTRY: dict[str, Callable[[float], Policy]] = {
    "hexgen-flow": HexgenFlow,
    "wb+fcfs": FlowFcfs,
    "rr+pq": lambda _alpha: RoundRobinUrgency(),
    "vllm": lambda _alpha: RoundRobinFcfs(),
    "least-outstanding": lambda _alpha: LeastOutstanding(),
    "power-of-two": lambda _alpha: PowerOfTwo(),
    "prefix-queue": lambda _alpha: PrefixQueue(),
    "edf": lambda _alpha: EarliestDeadline(),
    "llf": lambda _alpha: LeastLaxity(),
    "vtc": lambda _alpha: VirtualTokenCounter(),
    "qlm": lambda _alpha: RequestGroups(),
    "ratio": CumulativeRatio,
    "earliest-finish": lambda _alpha: EarliestFinish(),
}


def unknown_policy(name: str) -> str:
    """Return what is said of a name that no policy has."""
    hint = did_you_mean(name, REGISTRY) or ";"
    return f"unknown policy {name!r}{hint} known: {', '.join(sorted(REGISTRY))}"


def make_policy(name: str, alpha: float) -> Policy:
    """Return a fresh policy.

    Args:
        name: Registry name.
        alpha: Initial α, in [0, 1]; ignored by policies without one.

    Raises:
        ConfigError: The name is unknown or α is outside [0, 1].
    """
    if name not in REGISTRY:
        raise ConfigError(unknown_policy(name))
    if not 0.0 <= alpha <= 1.0:
        msg = f"alpha {alpha} is outside [0, 1]"
        raise ConfigError(msg)
    return REGISTRY[name](alpha)
