"""What the dispatcher's core is told: plain values, no environment."""

import msgspec

from shared.contracts.topics import STAGE_RESULTS
from shared.runtime.settings import MAX_ATTEMPTS
from shared.scheduling.policies import DEFAULT_ALPHA, DEFAULT_POLICY

MIB = 1024 * 1024


class DispatcherParams(msgspec.Struct, frozen=True, kw_only=True):
    """How a dispatcher behaves. `_s` without another word are wall seconds.

    Attributes:
        dispatcher_id: Unique per process; names its probes.
        policy: Registry name of the policy.
        alpha: α until `control` says otherwise, in [0, 1].
        tenant_slo_s: tenant -> SLO of its queries that name none, mesh seconds.
        slo_factor: SLO of any other query that names none, multiple of its isolated time.
        slo_floor_s: Shortest SLO that is granted, mesh seconds: a tenant cannot jump the queue by
            asking for the impossible.
        default_slo_floor_s: Shortest SLO that is chosen for a query that names none, mesh seconds.
        live_s: Longest silence of an instance that still gets calls.
        suspect_s: Time without progress, and several expected service times, after which an
            instance gets no further calls until one of its calls moves.
        no_instance_grace_s: How long a call waits for an eligible instance to come back.
        admission: Whether queries that cannot be done in time are turned away at their first call,
            and hopeless calls go behind the others.
        admission_margin: Work per second that may be promised to queries that are let in, as a
            share of what the fleet does per second.
        tenant_weights: tenant -> weight of its share under overload; 1 for others.
        pending_bound: Most calls that wait here unassigned.
        tenant_pending_bound: Most calls of one tenant that wait here unassigned.
        mesh_bound: Calls waiting in the whole mesh from which new queries are turned away.
        pending_bytes: Most bytes of calls that wait here unassigned.
        max_in_flight: Most records published and not acknowledged before fetching pauses.
        max_skew_s: How far in the future a claimed query arrival may lie.
        max_query_age_s: How old a claimed query arrival may be, mesh seconds.
        reply_topics: Topics that outcomes may be asked for on.
        remembered_calls: How many ended deliveries are remembered for dropping duplicates.
        remembered_queries: How many queries' arrival and SLO are remembered.
        fetch_records: Most records per fetch.
        commit_interval_s: Time between commits.
        recommit_s: Time after which unchanged positions are committed again, so that the group's
            offsets never expire.
        tick_s: Time between checks of what only time changes.
        revoke_wait_s: How long a partition's move waits for publishes under way.
        probe_interval_s: Time between recovery probes.
        peer_silence_s: Time without a probe after which another dispatcher is taken for dead and
            its partitions of `stage-requests` are taken over; safe, should it live.
        dead_after_s: Silence, in the broker's time and covered by probes, after which an instance
            is dead.
        max_attempts: Attempts of a call that may fail or lose their instance until it is given up.
    """

    dispatcher_id: str
    policy: str = DEFAULT_POLICY
    alpha: float = DEFAULT_ALPHA
    tenant_slo_s: dict[str, float] = {}
    slo_factor: float = 5.0
    slo_floor_s: float = 0.5
    default_slo_floor_s: float = 5.0
    live_s: float = 2.5
    suspect_s: float = 5.0
    no_instance_grace_s: float = 30.0
    admission: bool = True
    admission_margin: float = 0.6
    tenant_weights: dict[str, float] = {}
    pending_bound: int = 10_000
    tenant_pending_bound: int = 5_000
    mesh_bound: int = 100_000
    pending_bytes: int = 256 * MIB
    max_in_flight: int = 1_000
    max_skew_s: float = 5.0
    max_query_age_s: float = 86_400.0
    reply_topics: tuple[str, ...] = (STAGE_RESULTS,)
    remembered_calls: int = 200_000
    remembered_queries: int = 100_000
    fetch_records: int = 500
    commit_interval_s: float = 0.3
    recommit_s: float = 3_600.0
    tick_s: float = 0.5
    revoke_wait_s: float = 2.0
    probe_interval_s: float = 0.25
    peer_silence_s: float = 1.5
    dead_after_s: float = 6.0
    max_attempts: int = MAX_ATTEMPTS
