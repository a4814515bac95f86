"""The dispatcher's own settings (prefix `DISPATCHER_`); see `DispatcherParams` for each."""

import secrets
import socket
from typing import Annotated, Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from services.dispatcher.params import MIB, DispatcherParams
from shared.contracts.topics import STAGE_RESULTS
from shared.runtime.settings import MAX_ATTEMPTS
from shared.scheduling.policies import (
    DEFAULT_ALPHA,
    DEFAULT_POLICY,
    REGISTRY,
    unknown_policy,
)

PositiveS = Annotated[float, Field(gt=0, le=1e9)]


def _unique_id() -> str:
    return f"{socket.gethostname()[:100]}-{secrets.token_hex(4)}"


class DispatcherSettings(BaseSettings):
    """How a dispatcher behaves; `_s` without another word are wall seconds."""

    model_config = SettingsConfigDict(
        env_prefix="DISPATCHER_",
        env_nested_delimiter="__",
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
    )

    dispatcher_id: str = Field(default_factory=_unique_id, min_length=1, max_length=120)
    """Unique per process; host name and random digits unless set."""
    policy: str = DEFAULT_POLICY
    """Registry name of the scheduling policy."""
    alpha: float = Field(default=DEFAULT_ALPHA, ge=0, le=1)
    """α until `control` says otherwise."""
    tenant_slo_s: dict[str, PositiveS] = {}
    """Tenant -> SLO of its queries that name none, mesh seconds."""
    slo_factor: float = Field(default=5.0, gt=0, le=1_000)
    """SLO of other queries that name none, as a multiple of their isolated time."""
    default_slo_floor_s: float = Field(default=5.0, ge=0, le=86_400)
    """Shortest SLO that is chosen for a query that names none, mesh seconds."""
    slo_floor_s: float = Field(default=0.5, ge=0, le=86_400)
    """Shortest SLO that is granted, mesh seconds."""
    live_s: float = Field(default=2.5, gt=0, le=3_600)
    """Longest silence of an instance that still gets calls, wall seconds."""
    suspect_s: PositiveS = 5.0
    """Time without progress after which an instance gets no calls for now, wall seconds."""
    no_instance_grace_s: float = Field(default=30.0, ge=0, le=86_400)
    """How long a call waits for an eligible instance, wall seconds."""
    admission: bool = True
    """Turn queries away that cannot be done in time; hopeless calls go behind the others."""
    admission_margin: float = Field(default=0.6, gt=0, le=1)
    """Work per second promised to queries let in, as a share of what the fleet does."""
    tenant_weights: dict[str, Annotated[float, Field(gt=0, le=1e6)]] = {}
    """Tenant -> weight of its share under overload; 1 for others."""
    pending_bound: int = Field(default=10_000, ge=0, le=10_000_000)
    """Most calls that wait here unassigned."""
    tenant_pending_bound: int = Field(default=5_000, ge=0, le=10_000_000)
    """Most calls of one tenant that wait here unassigned."""
    mesh_bound: int = Field(default=100_000, ge=1, le=100_000_000)
    """Calls waiting in the whole mesh from which new queries are turned away."""
    pending_bytes: int = Field(default=256 * MIB, ge=MIB)
    """Most bytes of calls that wait here unassigned."""
    max_in_flight: int = Field(default=1_000, ge=1, le=100_000)
    """Most unacknowledged records before fetching pauses."""
    max_skew_s: float = Field(default=5.0, ge=0, le=3_600)
    """How far in the future a claimed query arrival may lie, wall seconds."""
    max_query_age_s: float = Field(default=86_400.0, gt=0)
    """How old a claimed query arrival may be, mesh seconds."""
    reply_topics: tuple[str, ...] = Field(default=(STAGE_RESULTS,), min_length=1)
    """Topics, without prefix, that outcomes may be asked for on."""
    remembered_calls: int = Field(default=200_000, ge=1_000, le=10_000_000)
    """Ended deliveries that are remembered to drop duplicates."""
    remembered_queries: int = Field(default=100_000, ge=1_000, le=10_000_000)
    """Queries whose arrival and SLO are remembered."""
    fetch_records: int = Field(default=500, ge=1, le=10_000)
    """Most records per fetch."""
    commit_interval_s: float = Field(default=0.3, gt=0, le=60)
    """Time between commits while positions move, wall seconds."""
    recommit_s: float = Field(default=3_600.0, gt=0, le=86_400)
    """Time between commits while they do not, wall seconds; groups' offsets expire."""
    tick_s: float = Field(default=0.5, gt=0, le=60)
    """Time between checks of what only time changes, wall seconds."""
    revoke_wait_s: float = Field(default=2.0, ge=0, le=60)
    """How long a partition's move waits for publishes under way, wall seconds."""
    probe_interval_s: float = Field(default=0.25, gt=0, le=60)
    """Time between recovery probes, wall seconds."""
    peer_silence_s: float = Field(default=1.5, gt=0, le=3_600)
    """Silence after which another dispatcher's partitions are taken over, wall seconds."""
    dead_after_s: float = Field(default=6.0, gt=0, le=3_600)
    """Silence, covered by probes, after which an instance is dead, wall seconds."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        """Refuse values that contradict each other."""
        if self.policy not in REGISTRY:
            raise ValueError(unknown_policy(self.policy))
        if self.dead_after_s < self.live_s:
            raise ValueError(
                f"dead_after_s ({self.dead_after_s}) must not be below live_s ({self.live_s}): an "
                "instance would be declared dead while it still gets calls"
            )
        if self.dead_after_s < 3 * self.probe_interval_s:
            raise ValueError("dead_after_s must be at least three times probe_interval_s")
        if self.peer_silence_s < 3 * self.probe_interval_s:
            raise ValueError("peer_silence_s must be at least three times probe_interval_s")
        return self

    def params(self, max_attempts: int = MAX_ATTEMPTS) -> DispatcherParams:
        """Return these settings as the core takes them, with the mesh's number of attempts."""
        return DispatcherParams(**self.model_dump(), max_attempts=max_attempts)
