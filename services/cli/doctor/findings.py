"""Rules: from what was seen to what is wrong and what to do. Pure."""

from collections.abc import Callable, Iterator, Sequence

import msgspec

from services.cli.console import counted
from services.cli.doctor.snapshot import InstanceView, PartitionView, Snapshot
from shared.scheduling.outliers import OutlierRules, is_failing, is_stalled

RULES = OutlierRules(stall_floor_s=60.0)
SILENT_S = 5.0
STARTING_S = 120.0
STUCK_S = 10.0
PATIENT_S = 45.0
"""A live dispatcher may keep a call for half a minute until an instance that can serve it comes."""
LONG_LAG_S = 60.0
SKEW_S = 2.0
OTHER_SCALE_S = 1e7
"""A clock that is off by months is right, and counts at another scale."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong.

    Attributes:
        problem: Constant word.
        subject: What it is about.
        detail: What was seen.
        advice: What to do.
    """

    problem: str
    subject: str
    detail: str
    advice: str


def diagnose(seen: Snapshot) -> list[Finding]:
    """Return what is wrong, the causes before the consequences; nothing when all is well."""
    if seen.kafka_error:
        return [*_kafka(seen), *_redis(seen)]
    missing = [one for one in seen.topics if one.state == "missing"]
    rules: Sequence[Callable[[Snapshot], Iterator[Finding]]] = (
        _redis,
        _topics,
        *(() if missing else (_fleet, _dispatchers, _readers, _clocks, _dead_letters)),
    )
    return [finding for rule in rules for finding in rule(seen)]


def _kafka(seen: Snapshot) -> Iterator[Finding]:
    yield Finding(
        problem="kafka-unreachable",
        subject=seen.address,
        detail=seen.kafka_error,
        advice="start it, or name the right one with --kafka or HEXFLOW_KAFKA__BOOTSTRAP_SERVERS",
    )


def _redis(seen: Snapshot) -> Iterator[Finding]:
    redis = seen.redis
    if redis.error:
        yield Finding(
            problem="redis-unreachable",
            subject="Redis",
            detail=redis.error,
            advice="start it, or name the right one with --redis or HEXFLOW_REDIS__URL; workers "
            "take up their calls by themselves once it answers",
        )
        return
    if redis.eviction not in ("", "noeviction"):
        yield Finding(
            problem="redis-evicts",
            subject="Redis",
            detail=f"maxmemory-policy is {redis.eviction}: it may drop queues to save memory",
            advice="redis-cli CONFIG SET maxmemory-policy noeviction, and set it in its file",
        )
    waiting = sum(view.last.num_waiting for view in seen.instances.values() if is_heard(view))
    if waiting and not redis.has_keys:
        yield Finding(
            problem="redis-mismatch",
            subject="Redis",
            detail=f"{counted(waiting, 'call')} in the queues of instances, yet no key begins with "
            f"{redis.prefix!r}",
            advice="the workers use another Redis, database or HEXFLOW_REDIS__KEY_PREFIX: give "
            "the doctor and every service the same",
        )


def _topics(seen: Snapshot) -> Iterator[Finding]:
    missing = [one.name for one in seen.topics if one.state == "missing"]
    if missing and len(missing) == len(seen.topics) and seen.other_prefixes:
        others = ", ".join(repr(prefix) for prefix in seen.other_prefixes[:5])
        yield Finding(
            problem="wrong-prefix",
            subject=repr(seen.prefix),
            detail=f"no topic has this prefix; meshes here have {others}",
            advice="set HEXFLOW_TOPICS__PREFIX to the mesh's prefix, in every service alike",
        )
    elif missing:
        yield Finding(
            problem="topic-missing",
            subject=", ".join(missing[:3]) + (", ..." if len(missing) > 3 else ""),
            detail=f"not there: {len(missing)} of {counted(len(seen.topics), 'topic')}",
            advice=f"run hexflow topics --kafka {seen.address}",
        )
    for one in seen.topics:
        for problem in one.problems if one.state == "wrong" else ():
            detail, _, advice = problem.partition(": ")
            yield Finding(
                problem="topic-wrong", subject=one.name, detail=detail, advice=advice or "fix it"
            )


def is_heard(view: InstanceView) -> bool:
    """Return whether an instance is alive and at work."""
    return view.last.phase != "gone" and view.age_s <= SILENT_S


def _fleet(seen: Snapshot) -> Iterator[Finding]:
    if not any(is_heard(view) and view.last.phase == "serving" for view in seen.instances.values()):
        yield Finding(
            problem="no-instance",
            subject="the fleet",
            detail="no instance serves: every call waits, then is rejected",
            advice="start workers (python -m services.worker, hexflow up --kafka ... --redis ...)",
        )
    for instance_id, view in sorted(seen.instances.items()):
        yield from _instance(instance_id, view)


def _instance(instance_id: str, view: InstanceView) -> Iterator[Finding]:
    state, subject = view.last, f"instance {instance_id}"
    if state.phase == "gone":
        return
    if not is_heard(view):
        yield Finding(
            problem="instance-silent",
            subject=subject,
            detail=f"last heard {view.age_s:.0f} s ago ({state.phase}), never said goodbye",
            advice="look at its worker's log and restart it; a dispatcher gives its calls to "
            "others meanwhile",
        )
    elif state.phase == "begin" and view.phase_age_s > STARTING_S:
        yield Finding(
            problem="engine-unready",
            subject=subject,
            detail=f"has been starting for {view.phase_age_s:.0f} s",
            advice="look at its worker's log: the engine does not become ready",
        )
    elif _is_idle_with_work(view):
        yield Finding(
            problem="engine-unready",
            subject=subject,
            detail=f"{counted(state.num_waiting, 'call')} in its queue, and its engine runs none",
            advice="its engine is dead, hangs or refuses calls: look at its worker's log, at its "
            "metrics, and whether the worker reaches Redis; restart the worker",
        )
    if is_heard(view):
        yield from _engine(subject, view)
    if is_heard(view) and state.num_waiting >= state.queue_bound:
        yield Finding(
            problem="queue-full",
            subject=subject,
            detail=f"its queue is at its bound of {state.queue_bound}",
            advice="add instances, or let producers ask for less",
        )


def _engine(subject: str, view: InstanceView) -> Iterator[Finding]:
    """Tell what the worker says of its engine: it fails, or hangs."""
    state = view.last
    mean_s = state.backlog_s / max(1, state.num_waiting + state.num_running)
    if is_failing(state.failures_in_a_row, RULES):
        yield Finding(
            problem="engine-failing",
            subject=subject,
            detail=f"its engine failed {counted(state.failures_in_a_row, 'call')} in a row",
            advice="look at its worker's log for what the engine says; until a call succeeds there "
            "it gets one at a time, to be tried",
        )
    elif is_stalled(view.first.stalled_s, mean_s, RULES) and is_stalled(
        state.stalled_s, mean_s, RULES
    ):
        yield Finding(
            problem="engine-stalled",
            subject=subject,
            detail=f"no token for {state.stalled_s:.0f} s of workload time, with "
            f"{counted(state.num_running, 'call')} in its engine",
            advice="its engine hangs: restart the worker; what it holds goes to others, and it "
            "gets nothing new meanwhile",
        )


def _is_idle_with_work(view: InstanceView) -> bool:
    return all(
        state.num_waiting > 0 and state.num_running == 0 for state in (view.first, view.last)
    )


def _dispatchers(seen: Snapshot) -> Iterator[Finding]:
    age_s = seen.dispatcher_age_s
    if age_s is None or age_s > SILENT_S:
        ago = "never heard of" if age_s is None else f"last heard {age_s:.0f} s ago"
        yield Finding(
            problem="no-dispatcher",
            subject="dispatchers",
            detail=f"{ago}: calls stay on stage-requests and nobody watches the instances",
            advice="start one (python -m services.dispatcher); if one runs, compare its Kafka "
            f"address and HEXFLOW_TOPICS__PREFIX ({seen.prefix!r} here)",
        )


def _readers(seen: Snapshot) -> Iterator[Finding]:
    for service in dict.fromkeys(view.service for view in seen.partitions):
        views = [view for view in seen.partitions if view.service == service]
        yield from _forgotten(service, views)
        stuck = [view for view in views if _is_stuck(view, seen)]
        if stuck:
            yield _stuck(service, stuck, seen.watched_s)
            continue
        late = [view for view in views if view.oldest_s > LONG_LAG_S and _grows(view)]
        if late:
            yield Finding(
                problem="lag-grows",
                subject=service,
                detail=f"{counted(sum(view.last_lag for view in late), 'record')} of "
                f"{late[0].topic} behind, the oldest for "
                f"{max(view.oldest_s for view in late):.0f} s, and growing",
                advice="more is asked for than is done: add instances (or dispatchers), or let "
                "producers ask for less",
            )


def _is_stuck(view: PartitionView, seen: Snapshot) -> bool:
    """Return whether a reader stands still, rather than works on something long."""
    if view.first_lag == 0 or view.moved or view.oldest_s <= STUCK_S:
        return False
    instance = seen.instances.get(view.instance_id)
    if instance is not None and is_heard(instance):
        # A call may take minutes; what matters is whether the worker knows of it.
        return instance.last.accounted_offset < view.first_end - 1
    age_s = seen.dispatcher_age_s
    is_patient = not view.instance_id and age_s is not None and age_s <= SILENT_S
    return view.oldest_s > (PATIENT_S if is_patient else STUCK_S)


def _grows(view: PartitionView) -> bool:
    return view.last_lag > view.first_lag


def _stuck(service: str, stuck: Sequence[PartitionView], watched_s: float) -> Finding:
    numbers = ", ".join(str(view.partition) for view in stuck[:8])
    return Finding(
        problem="reader-stuck",
        subject=service,
        detail=f"{counted(sum(view.last_lag for view in stuck), 'record')} unread on "
        f"{stuck[0].topic} (partition {numbers}), the oldest for "
        f"{max(view.oldest_s for view in stuck):.0f} s, and nothing was committed for "
        f"{watched_s:g} s",
        advice="is it running, on this Kafka and prefix? If so, look at its /live probe and log, "
        "and restart it: nothing is lost by that",
    )


def _forgotten(service: str, views: Sequence[PartitionView]) -> Iterator[Finding]:
    lost = [view for view in views if view.num_forgotten]
    if lost:
        yield Finding(
            problem="retention-too-short",
            subject=lost[0].topic,
            detail=f"deleted before {service} had handed them on: "
            f"{counted(sum(view.num_forgotten for view in lost), 'record')}",
            advice="raise HEXFLOW_TOPICS__RETENTION_S above the longest SLO plus an outage, then "
            "run hexflow topics for what to alter; producers must submit those calls again",
        )


def _clocks(seen: Snapshot) -> Iterator[Finding]:
    skew_s = seen.host_clock_s
    if skew_s is not None and abs(skew_s) > SKEW_S:
        yield Finding(
            problem="clock-skew",
            subject="this host",
            detail=f"its clock differs from the broker's by {skew_s:+.1f} s",
            advice="synchronise both with NTP (chronyc tracking, timedatectl)",
        )
    for instance_id, view in sorted(seen.instances.items()):
        if not is_heard(view):
            continue
        if abs(view.clock_s) > OTHER_SCALE_S:
            yield Finding(
                problem="time-scale",
                subject=f"instance {instance_id}",
                detail=f"its worker does not run at time scale {seen.time_scale:g}",
                advice="set HEXFLOW_TIME_SCALE alike in every service and for the doctor",
            )
        elif abs(view.clock_s) > SKEW_S:
            yield Finding(
                problem="clock-skew",
                subject=f"instance {instance_id}",
                detail=f"its worker's clock differs from the broker's by {view.clock_s:+.1f} s",
                advice="synchronise its host with NTP (chronyc tracking, timedatectl)",
            )


def _dead_letters(seen: Snapshot) -> Iterator[Finding]:
    letters = seen.dead_letters
    if not letters.recent:
        return
    last = letters.last
    what = f"; the last: {last.error} on {last.topic} by {last.service}" if last else ""
    grows = letters.last_end - letters.first_end
    yield Finding(
        problem="dead-letters",
        subject=f"{seen.prefix}dead-letters",
        detail=f"{letters.recent} in the last 10 minutes, {grows} while looking{what}",
        advice="fix the producer that writes them; each record names its topic, partition and "
        "offset, and holds the original bytes",
    )
