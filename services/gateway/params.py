"""How the gateway behaves."""

from pathlib import Path

import msgspec


class GatewayParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the gateway behaves; what each field means is said in `GatewaySettings`.

    Attributes:
        gateway_id: Name in logs.
        reply_partition: Partition of `stage-results` and `query-results` that it reads.
        keys_file: Tenants and hashed keys; None: anybody may call.
        keys_check_s: Time between looks at the keys file, wall seconds.
        max_body_bytes: Largest request body.
        body_timeout_s: Longest time for a request's body to arrive, wall seconds.
        header_timeout_s: Longest time for a request's head to arrive, wall seconds.
        max_open: Most calls open at the same time.
        max_waiting: Most calls of one tenant that wait for a place.
        retry_after_s: Advice to a client that finds no place, wall seconds.
        submit_timeout_s: Longest wait for the broker to take a call, wall seconds.
        late_s: How long after its deadline an answer is still waited for, mesh seconds.
        longest_wait_s: Longest wait for a call whose deadline is not known, wall seconds.
        max_event_clients: Most open event streams of the dashboard.
        event_period_s: Time between events of the dashboard, wall seconds.
        max_queries: Most queries that the dashboard remembers.
        quiet_s: Silence after which the dashboard takes a query as ended, mesh seconds.
        shows_text: Whether administrators may see the text of dead letters.
        asks_unannounced: Whether questions go to agents that do not say that they are there.
        target_s: P95 that the dashboard compares with, mesh seconds; None: none.
    """

    gateway_id: str = "gateway"
    reply_partition: int = 0
    keys_file: Path | None = None
    keys_check_s: float = 2.0
    max_body_bytes: int = 4 * 1024 * 1024
    body_timeout_s: float = 30.0
    header_timeout_s: float = 10.0
    max_open: int = 2_000
    max_waiting: int = 200
    retry_after_s: float = 2.0
    submit_timeout_s: float = 10.0
    late_s: float = 30.0
    longest_wait_s: float = 600.0
    max_event_clients: int = 5_000
    event_period_s: float = 1.0
    max_queries: int = 2_000
    quiet_s: float = 30.0
    shows_text: bool = False
    asks_unannounced: bool = False
    target_s: float | None = None
