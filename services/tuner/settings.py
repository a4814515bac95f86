"""The tuner's own settings (prefix `TUNER_`); mesh-wide ones are in `shared.runtime.settings`."""

import socket

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from shared.scheduling.policies import DEFAULT_POLICY


class TunerSettings(BaseSettings):
    """When and how the tuner acts. Durations without another word are mesh seconds."""

    model_config = SettingsConfigDict(
        env_prefix="TUNER_", env_nested_delimiter="__", frozen=True, extra="forbid"
    )

    tuner_id: str = Field(default_factory=socket.gethostname, min_length=1, max_length=128)
    policy: str = DEFAULT_POLICY
    initial_alpha: float = Field(default=0.1, ge=0, le=1)
    window_queries: int = Field(default=600, ge=10, le=100_000)
    min_queries: int = Field(default=100, ge=10, le=100_000)
    period_s: float = Field(default=300.0, gt=0)
    degradation: float = Field(default=1.2, ge=1)
    quiet_s: float = Field(default=120.0, gt=0)
    margin: float = Field(default=0.03, ge=0, lt=1)
    reversal_margin: float = Field(default=0.08, ge=0, lt=1)
    max_calibration_error: float = Field(default=0.2, gt=0)
    enabled: bool = True
