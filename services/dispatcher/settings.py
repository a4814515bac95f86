"""The dispatcher's own settings (prefix `DISPATCHER_`); see `DispatcherParams` for each."""

import secrets
import socket
from typing import Annotated, Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from services.dispatcher.params import MIB, DispatcherParams
from shared.contracts.topics import STAGE_RESULTS
from shared.scheduling.policies import DEFAULT_POLICY, REGISTRY

PositiveS = Annotated[float, Field(gt=0, le=1e9)]


def _unique_id() -> str:
    return f"{socket.gethostname()[:100]}-{secrets.token_hex(4)}"


class DispatcherSettings(BaseSettings):
    """How a dispatcher behaves; `_s` without another word are wall seconds."""

    model_config = SettingsConfigDict(
        env_prefix="DISPATCHER_", env_nested_delimiter="__", frozen=True, extra="forbid"
    )

    dispatcher_id: str = Field(default_factory=_unique_id, min_length=1, max_length=120)
    policy: str = DEFAULT_POLICY
    alpha: float = Field(default=0.1, ge=0, le=1)
    tenant_slo_s: dict[str, PositiveS] = {}
    slo_factor: float = Field(default=5.0, gt=0, le=1_000)
    slo_floor_s: float = Field(default=0.5, ge=0, le=86_400)
    live_s: float = Field(default=5.0, gt=0, le=3_600)
    no_instance_grace_s: float = Field(default=30.0, ge=0, le=86_400)
    pending_bound: int = Field(default=10_000, ge=0, le=10_000_000)
    pending_bytes: int = Field(default=256 * MIB, ge=MIB)
    max_in_flight: int = Field(default=1_000, ge=1, le=100_000)
    max_skew_s: float = Field(default=5.0, ge=0, le=3_600)
    max_query_age_s: float = Field(default=86_400.0, gt=0)
    reply_topics: tuple[str, ...] = Field(default=(STAGE_RESULTS,), min_length=1)
    remembered_calls: int = Field(default=200_000, ge=1_000, le=10_000_000)
    remembered_queries: int = Field(default=100_000, ge=1_000, le=10_000_000)
    fetch_records: int = Field(default=500, ge=1, le=10_000)
    commit_interval_s: float = Field(default=0.3, gt=0, le=60)
    recommit_s: float = Field(default=3_600.0, gt=0, le=86_400)
    tick_s: float = Field(default=0.5, gt=0, le=60)
    revoke_wait_s: float = Field(default=2.0, ge=0, le=60)
    probe_interval_s: float = Field(default=1.0, gt=0, le=60)
    dead_after_s: float = Field(default=6.0, gt=0, le=3_600)
    max_attempts: int = Field(default=5, ge=1, le=1_000)

    @model_validator(mode="after")
    def _agree(self) -> Self:
        """Refuse values that contradict each other."""
        if self.policy not in REGISTRY:
            known = ", ".join(sorted(REGISTRY))
            raise ValueError(f"unknown policy {self.policy!r}; known: {known}")
        if self.dead_after_s < self.live_s:
            raise ValueError(
                f"dead_after_s ({self.dead_after_s}) must not be below live_s ({self.live_s}): an "
                "instance would be declared dead while it still gets calls"
            )
        if self.dead_after_s < 3 * self.probe_interval_s:
            raise ValueError("dead_after_s must be at least three times probe_interval_s")
        return self

    def params(self) -> DispatcherParams:
        """Return these settings as the core takes them."""
        return DispatcherParams(**self.model_dump())
