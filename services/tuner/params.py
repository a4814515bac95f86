"""When and how the tuner acts."""

import msgspec

from shared.scheduling.policies import DEFAULT_ALPHA
from shared.scheduling.tuning import TuningRules


class TunerParams(msgspec.Struct, frozen=True, kw_only=True):
    """When and how the tuner acts.

    Attributes:
        tuner_id: Name in messages and logs.
        policy: Policy replayed.
        initial_alpha: α in force before anything is published.
        window_queries: Most queries a decision rests on.
        lead_in: Most queries before those that are remembered and replayed for their load.
        min_queries: Fewest ended queries for a decision.
        period_s: Time between scheduled decisions, mesh seconds.
        degradation: P95 now divided by P95 at the last decision that triggers one at once.
        quiet_s: Silence after which a query counts as ended, mesh seconds.
        rules: When a better α is worth a change.
        check_wall_s: Time between looks at the window, wall seconds.
        enabled: Whether it publishes α at all.
    """

    tuner_id: str = "tuner"
    policy: str = "hexgen-flow"
    initial_alpha: float = DEFAULT_ALPHA
    window_queries: int = 600
    lead_in: int = 300
    min_queries: int = 100
    period_s: float = 300.0
    degradation: float = 1.2
    quiet_s: float = 120.0
    rules: TuningRules = TuningRules()
    check_wall_s: float = 0.5
    enabled: bool = True
