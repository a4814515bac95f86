"""The gate: asks `shared.scheduling.admission` about new queries, and tells it what happened.

What happened is read from `latency-events`, which tell of every dispatcher's calls: so each
dispatcher knows the demand of the whole mesh but for the calls that are under way at others.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence

from services.dispatcher.control import Control, pool_of
from services.dispatcher.params import DispatcherParams
from services.dispatcher.preparation import Prepared
from shared.contracts.messages import LatencyEvent, StageRequest
from shared.errors import QueueFull
from shared.ports import Clock
from shared.scheduling.admission import Admission, AdmissionRules, Asked
from shared.scheduling.latency import service_s
from shared.scheduling.policy import InstanceView
from shared.scheduling.pool_rate import pool_rate
from shared.scheduling.profiles import FleetTimes
from shared.scheduling.throughput import Finished, Throughput

SAME_INSTANT_S = 0.001
NOTHING_LEFT = 0.05
WAITING_SHARE = 0.2
PATIENCE = 0.5
MAX_PAST = 10_000


class _Pool:
    def __init__(self, rules: AdmissionRules) -> None:
        self.admission = Admission(rules)
        self.throughput = Throughput(rules.window_s)
        self.members: Sequence[InstanceView] = ()
        self.asked_for = ("", "")  # workflow and first stage
        self.prior = 0.0
        self.prior_key: object = None


class Gate:
    """Admission of one dispatcher.

    Args:
        control: Predictions.
        clock: Mesh time.
        params: Whether and when to say no.
    """

    def __init__(self, control: Control, clock: Clock, params: DispatcherParams) -> None:
        self._control = control
        self._clock = clock
        self._params = params
        self._rules = AdmissionRules(margin=params.admission_margin, weights=params.tenant_weights)
        self._pools: dict[str, _Pool] = {}
        self._models: dict[str, str] = {}
        self._past: deque[LatencyEvent] = deque(maxlen=MAX_PAST)
        self._decided: OrderedDict[str, tuple[str, str | None]] = OrderedDict()

    def judge(self, prepared: Prepared, views: Sequence[InstanceView]) -> str | None:
        """Return why a call's query is turned away, or None; only first calls are turned away.

        Args:
            prepared: The call with its predictions.
            views: The live instances that offer its model and needs, at least one.
        """
        request = prepared.request
        pool = self._pool(request.model, views)
        query_id, now_s = request.effective_query_id, self._clock.now_s()
        first_id, reason = self._decided.get(query_id, ("", None))
        if first_id and first_id != request.request_id and not request.parents:
            return reason  # a sibling of the first call
        if is_new_query(request):
            return self._decide(pool, prepared, now_s)
        key = (request.stage, request.iteration)
        if query_id not in pool.admission.demand and request.attempt == 0:
            times = self._times(pool)
            left_s = _work_s(times, request)
            if not request.is_alone:
                left_s += times.work_after_s(request.workflow, *key)
            self._join(pool, query_id, prepared.call.deadline_s, left_s, now_s)
        pool.admission.demand.stage_begins(query_id, key, now_s)
        return None

    def turned_away(self, request: StageRequest) -> None:
        """Forget a query one of whose calls was refused: no event will tell its end."""
        name = self._models.get(request.model)
        if name is not None:
            self._pools[name].admission.demand.remove(request.effective_query_id)

    def see(self, event: LatencyEvent) -> None:
        """Take a latency event."""
        pool = self._pools.get(self._models.get(event.model, ""))
        if pool is None:
            self._past.append(event)
        else:
            self._learn(pool, event, is_news=True)

    def _learn(self, pool: _Pool, event: LatencyEvent, *, is_news: bool) -> None:
        now_s, times = self._clock.now_s(), self._times(pool)
        lengths = (event.usage.input_tokens, event.predicted_output_tokens)
        work_s = _call_s(pool.members, times.call_s(event.workflow, event.stage), *lengths)
        if event.kind != "completed":
            pool.admission.demand.remove(event.query_id)
            return
        ended_s = min(now_s, event.times.finished_at_s or now_s)
        is_full = _is_full(pool.members) if is_news else _has_waited(event)
        pool.throughput.finished(_finished(event, work_s, ended_s, is_full), self._prior(pool))
        is_alone = event.query_id == event.request_id  # a call that named no query is one itself
        after_s = (
            0.0 if is_alone else times.work_after_s(event.workflow, event.stage, event.iteration)
        )
        deadline_s = event.arrival_s + event.slo_s
        key = (event.stage, event.iteration)
        is_last = after_s <= NOTHING_LEFT * work_s
        demand = pool.admission.demand
        if event.query_id not in demand:
            if not is_last:
                self._join(pool, event.query_id, deadline_s, after_s, now_s)
        elif demand.call_ended(event.query_id, key, event.siblings, now_s, is_last=is_last):
            pool.admission.ended(in_time=(event.times.finished_at_s or now_s) <= deadline_s)

    def tidy(self) -> None:
        """Forget what is over."""
        for pool in self._pools.values():
            pool.admission.tidy(self._clock.now_s())

    def _decide(self, pool: _Pool, prepared: Prepared, now_s: float) -> str | None:
        request = prepared.request
        query_id = request.effective_query_id
        pool.asked_for = (request.workflow, request.stage)
        if not any(view.num_outstanding for view in pool.members):
            pool.admission.demand.forget_resting(now_s)
        times = self._times(pool)
        path_s, work_s = times.stage_s(request.workflow, request.stage), _work_s(times, request)
        if request.siblings == 1:
            lengths = (prepared.call.input_tokens, prepared.call.output_tokens)
            path_s = _call_s(pool.members, path_s, *lengths)
            work_s = _call_s(pool.members, work_s, *lengths)
        if not request.is_alone:
            place = (request.workflow, request.stage, request.iteration)
            path_s += times.remaining_s(*place)
            work_s += times.work_after_s(*place)
        asked = Asked(
            query_id=query_id,
            tenant=request.tenant,
            deadline_s=prepared.call.deadline_s,
            work_s=work_s,
            path_s=path_s,
        )
        rate = pool.throughput.rate(self._prior(pool))
        reason = pool.admission.offer(asked, now_s, rate, pool.throughput.stretch)
        if reason is None and self._is_mesh_full(pool):
            reason = QueueFull.reason
        if reason is not None:
            pool.admission.demand.remove(query_id)
            pool.throughput.refused()
        self._decided[query_id] = (request.request_id, reason)
        if len(self._decided) > self._params.remembered_queries:
            self._decided.popitem(last=False)
        return reason

    def _is_mesh_full(self, pool: _Pool) -> bool:
        waiting = sum(view.num_waiting for view in pool.members)
        return waiting >= self._params.mesh_bound

    def _join(
        self, pool: _Pool, query_id: str, deadline_s: float, left_s: float, now_s: float
    ) -> None:
        """Count a query that another dispatcher let in, or this one in an earlier life."""
        if left_s > 0.0 and deadline_s > now_s:
            pool.admission.demand.add(query_id, deadline_s, left_s, now_s)

    def _pool(self, model: str, views: Sequence[InstanceView]) -> _Pool:
        is_new = model not in self._models
        name = self._models[model] = pool_of(model, (view.spec for view in views))
        pool = self._pools.setdefault(name, _Pool(self._rules))
        pool.members = views
        if is_new:
            past = [event for event in self._past if event.model == model]
            for event in sorted(past, key=_ended_s):
                self._learn(pool, event, is_news=False)
        return pool

    def _times(self, pool: _Pool) -> FleetTimes:
        return self._control.predictor.fleet_times(pool.members)

    def _prior(self, pool: _Pool) -> float:
        """Return the rate believed before calls have ended, seconds of work per second."""
        shapes = self._control.predictor.shapes
        members = tuple((id(view.spec), view.capacity, view.speed_factor) for view in pool.members)
        key = (pool.asked_for, id(shapes), members)
        if pool.prior_key != key:
            pool.prior_key = key
            pool.prior = pool_rate(shapes, *pool.asked_for, pool.members)
        return pool.prior


def is_new_query(request: StageRequest) -> bool:
    """Return whether a call begins its query: nothing was done for it yet.

    A query whose arrival lies before its first call has waited elsewhere, or lost its first calls
    to us with a dispatcher; both are let in.
    """
    if request.attempt > 0 or request.parents or request.iteration > 0:
        return False
    ready_s, arrival_s = request.ready_at_s or 0.0, request.arrival_s
    return arrival_s is None or ready_s - arrival_s <= SAME_INSTANT_S


def _work_s(times: FleetTimes, request: StageRequest) -> float:
    return request.siblings * times.call_s(request.workflow, request.stage)


def _call_s(
    views: Sequence[InstanceView], expected_s: float, input_tokens: int, output_tokens: float
) -> float:
    """Return the expected time of a call of its stage, or of these lengths where that is less.

    A call with a short limit is not what its stage usually is. No output tokens: not known.
    """
    if output_tokens <= 0:
        return expected_s
    times_s = [
        service_s(
            view.spec,
            input_tokens=max(1, input_tokens),
            cached_tokens=0,
            output_tokens=output_tokens,
            speed_factor=view.speed_factor,
        )
        for view in views
    ]
    return min(expected_s, sum(times_s) / len(times_s)) if times_s else expected_s


def _ended_s(event: LatencyEvent) -> float:
    return event.times.finished_at_s or 0.0


def _is_full(views: Sequence[InstanceView]) -> bool:
    """Return whether more waits than a passing jam: at each instance, and beside what runs."""
    waiting = sum(view.num_waiting for view in views)
    return waiting >= max(len(views), WAITING_SHARE * sum(view.num_running for view in views))


def _has_waited(event: LatencyEvent) -> bool:
    times = event.times
    if times.started_at_s is None or times.queued_at_s is None:
        return False
    return times.started_at_s - times.queued_at_s > PATIENCE * event.t_comp_s


def _finished(event: LatencyEvent, work_s: float, ended_s: float, is_full: bool) -> Finished:
    times = event.times
    started_s, finished_s = times.started_at_s, times.finished_at_s
    service_s = finished_s - started_s if started_s is not None and finished_s is not None else 0.0
    return Finished(
        work_s=work_s,
        t_comp_s=event.t_comp_s,
        is_full=is_full,
        service_s=max(0.0, service_s),
        ended_s=ended_s,
    )
