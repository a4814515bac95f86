"""The worker's own settings (prefix `WORKER_`); see `WorkerParams` for each."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from services.worker.engines import EngineKind, OpenAISettings, VllmSettings
from services.worker.params import LOOK_PAST, MIB, WorkerParams
from shared.domain.instance import InstanceSpec
from shared.domain.near_names import did_you_mean
from shared.errors import ConfigError
from shared.runtime.settings import MAX_ATTEMPTS
from shared.simulation.fleets import BUILTIN_GPUS, INSTANCE_ID, builtin_fleet, parse_fleet

NOT_PARAMS = frozenset({"engine", "fleet", "fleet_file", "fault_file", "openai", "vllm"})
WallS = Annotated[float, Field(gt=0, le=3_600)]


class WorkerSettings(BaseSettings):
    """Which instance this is and how its worker behaves; `_s` are wall seconds unless noted."""

    model_config = SettingsConfigDict(
        env_prefix="WORKER_",
        env_nested_delimiter="__",
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
    )

    instance_id: str = Field(pattern=f"^{INSTANCE_ID.pattern}$")
    """The instance this worker serves; must be in the fleet."""
    engine: EngineKind = "simulated"
    """What runs the calls."""
    openai: OpenAISettings = OpenAISettings()
    vllm: VllmSettings = VllmSettings()
    fleet: str = "hetero-1"
    """Built-in fleet that describes the instance."""
    fleet_file: Path | None = None
    """Fleet file (TOML) that describes the instance; wins over the built-in fleet."""
    fault_file: Path | None = None
    """File whose word, `hang` or `fail`, the simulated engine obeys; for chaos runs."""
    capacity: int | None = Field(default=None, ge=1, le=100_000)
    """Most calls the engine is given at a time; unset: the instance's `max_num_seqs`."""
    queue_bound: int = Field(default=10_000, ge=1, le=1_000_000)
    """Most calls held waiting; at the bound the worker stops reading its topic."""
    queue_bytes: int = Field(default=256 * MIB, ge=MIB)
    """Most bytes of calls held waiting; likewise."""
    look_past: int = Field(default=LOOK_PAST, ge=0, le=64)
    """Calls the engine has no room for that are looked past to find one that fits."""
    evict_after_s: float = Field(default=3_600.0, ge=0, le=30 * 86_400)
    """Time after its query's deadline when a call is given up, mesh seconds."""
    stall_floor_s: float = Field(default=600.0, gt=0, le=86_400)
    """Time without a result before a generation may count as failed, mesh seconds."""
    stall_factor: float = Field(default=30.0, ge=1, le=10_000)
    """... but never before this multiple of its expected service time."""
    suspect_s: WallS = 5.0
    """Time without progress after which waiting calls may move to others, wall seconds."""
    stall_wall_s: WallS = 30.0
    """... and never before so many wall seconds."""
    failure_threshold: int = Field(default=3, ge=1, le=10_000)
    """Failed generations in a row from which one call at a time is tried."""
    failure_pause_s: WallS = 0.5
    """First pause between these tries, wall seconds; each failure doubles it."""
    longest_failure_pause_s: WallS = 5.0
    """Longest of these pauses, wall seconds."""
    heartbeat_s: Annotated[float, Field(ge=0.05, le=60)] = 1.0
    """Longest time between two state reports, wall seconds."""
    coalesce_s: Annotated[float, Field(ge=0.001, le=10)] = 0.05
    """Shortest time between two state reports, wall seconds."""
    commit_s: WallS = 0.5
    """Time between commits while offsets move, wall seconds."""
    recommit_s: float = Field(default=3_600.0, gt=0, le=86_400)
    """Time between commits while they do not, wall seconds; groups' offsets expire."""
    heal_s: WallS = 1.0
    """Time between comparisons of memory and state store, wall seconds."""
    recheck_s: Annotated[float, Field(ge=0.001, le=10)] = 0.25
    """Time between questions to an engine that had no room, wall seconds."""
    drain_s: float | None = Field(default=None, ge=0, le=3_600)
    """Time that running calls get on drain, wall seconds; unset: the mesh's, less 2 aborts."""
    linger_s: float = Field(default=0.5, ge=0, le=60)
    """How long a draining worker still forwards late arrivals, wall seconds."""
    abort_s: WallS = 4.0
    """Longest time to hand back what a drain or a dead engine cut off, wall seconds."""
    standby_s: WallS = 3.0
    """Silence of the other life after which a fenced worker begins anew, wall seconds."""
    num_remembered: int = Field(default=50_000, ge=0, le=10_000_000)
    """Ended calls whose later deliveries are recognised."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        """Refuse values that contradict each other."""
        if self.coalesce_s > self.heartbeat_s:
            raise ValueError("coalesce_s must not be above heartbeat_s")
        return self

    def spec(self) -> InstanceSpec:
        """Return the instance's description from the fleet (`fleet_file` wins over `fleet`).

        Raises:
            ConfigError: The fleet cannot be read or has no such instance.
        """
        if self.fleet_file is None:
            name, specs = self.fleet, builtin_fleet(self.fleet)
        else:
            name = str(self.fleet_file)
            try:
                text = self.fleet_file.read_bytes()
            except OSError as exc:
                raise ConfigError(f"WORKER_FLEET_FILE={name}: {exc.strerror}") from exc
            specs = parse_fleet(text, self.fleet_file.name)
        by_id = {spec.instance_id: spec for spec in specs}
        if self.instance_id not in by_id:
            hint = did_you_mean(self.instance_id, by_id) or "."
            raise ConfigError(
                f"WORKER_INSTANCE_ID={self.instance_id} is not in fleet {name} (it has "
                f"{', '.join(by_id)}){hint} Other built-in fleets: {', '.join(BUILTIN_GPUS)}; "
                "or give your own with WORKER_FLEET_FILE"
            )
        return by_id[self.instance_id]

    def params(
        self, spec: InstanceSpec, mesh_drain_s: float, max_attempts: int = MAX_ATTEMPTS
    ) -> WorkerParams:
        """Return these settings as the core takes them.

        Args:
            spec: The instance; its batch size is the capacity unless one is set.
            mesh_drain_s: Wall seconds until the process is cut off after a signal; running calls
                get what is left when the time to hand back and say goodbye is taken off.
            max_attempts: The mesh's.
        """
        own = self.model_dump(exclude=set(NOT_PARAMS))
        drain_s = own.pop("drain_s")
        if drain_s is None:
            drain_s = max(0.0, mesh_drain_s - 2 * self.abort_s)
        capacity = own.pop("capacity") or spec.max_num_seqs
        return WorkerParams(**own, drain_s=drain_s, capacity=capacity, max_attempts=max_attempts)
