"""The tuner's own settings (prefix `TUNER_`); mesh-wide ones are in `shared.runtime.settings`."""

import socket

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from shared.scheduling.policies import (
    DEFAULT_ALPHA,
    DEFAULT_POLICY,
    REGISTRY,
    unknown_policy,
)


class TunerSettings(BaseSettings):
    """When and how the tuner acts. Durations without another word are mesh seconds."""

    model_config = SettingsConfigDict(
        env_prefix="TUNER_",
        env_nested_delimiter="__",
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
    )

    tuner_id: str = Field(default_factory=socket.gethostname, min_length=1, max_length=128)
    """Names this tuner in what it publishes; the host name unless set."""
    policy: str = DEFAULT_POLICY
    """Registry name of the policy that is tuned."""
    initial_alpha: float = Field(default=DEFAULT_ALPHA, ge=0, le=1)
    """α before the first decision."""
    window_queries: int = Field(default=600, ge=10, le=100_000)
    """Most queries a decision rests on."""
    lead_in: int = Field(default=300, ge=0, le=100_000)
    """Most queries before those that are remembered and replayed for the load they left."""
    min_queries: int = Field(default=100, ge=10, le=100_000)
    """Fewest ended queries for a decision."""
    period_s: float = Field(default=300.0, gt=0)
    """Time between scheduled decisions, mesh seconds."""
    degradation: float = Field(default=1.2, ge=1)
    """P95 now divided by P95 at the last decision that triggers one at once."""
    quiet_s: float = Field(default=120.0, gt=0)
    """Silence after which a query counts as ended, mesh seconds."""
    margin: float = Field(default=0.03, ge=0, lt=1)
    """Least relative gain in P95 for any change."""
    reversal_margin: float = Field(default=0.08, ge=0, lt=1)
    """Least relative gain for going back towards the α before."""
    max_calibration_error: float = Field(default=0.2, gt=0)
    """Largest |simulated / observed P95 - 1| at which the replay is believed."""
    enabled: bool = True
    """Whether α is published at all."""

    @field_validator("policy")
    @classmethod
    def _is_known(cls, policy: str) -> str:
        """Refuse a policy that no replay could run."""
        if policy not in REGISTRY:
            raise ValueError(unknown_policy(policy))
        return policy
