"""Learns from the window, decides about α per pool, and publishes both on `control`."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import structlog

from services.tuner.advice import advice
from services.tuner.history import Truth, past_of
from services.tuner.params import TunerParams
from services.tuner.replay import Replay, ReplayLost
from services.tuner.tables import Tables, next_revision, pool_of
from shared.contracts.episodes import Episode, episode
from shared.contracts.messages import AlphaUpdate, ControlMessage, SpeedUpdate, WorkflowProfile
from shared.contracts.query_window import QueryRecord
from shared.contracts.topics import CONTROL
from shared.domain.instance import InstanceSpec
from shared.domain.trace import TraceQuery
from shared.errors import ConfigError
from shared.ports import Clock
from shared.runtime.believed_speeds import believed_speeds
from shared.runtime.metrics import Metrics
from shared.runtime.publishing import Publisher
from shared.runtime.tuning_journal import Decided, Journal
from shared.runtime.window_learning import (
    clipped,
    hit_factors,
    is_notable,
    learned_shapes,
    speed_requests,
    window_cut_s,
)
from shared.scheduling.judgement import Judgement, Observed, judge, warm_up_of
from shared.scheduling.tuning import ALPHA_GRID, TuningDecision, roll_back
from shared.simulation.speed_fit import SpeedFit
from shared.simulation.window_replay import Past, ReplayAnswer, ReplayRequest, shares_of

log = structlog.get_logger(__name__)

NOTABLE_SPEED = 0.07
NOTABLE_HITS = 0.25
OTHER_SPEED = 0.25
PRIOR_CALLS = 3.0
BAN_PERIODS = 3.0


class Material(NamedTuple):
    """What a decision rests on.

    Attributes:
        ended: Queries that ended.
        running: Queries that did not.
        lead_in: Earlier queries whose load was still there; simulated, not judged.
    """

    ended: Sequence[QueryRecord]
    running: Sequence[QueryRecord]
    lead_in: Sequence[QueryRecord] = ()

    def of_pool(self, pools: Mapping[str, str], pool: str) -> "Material":
        """Return what belongs to one pool."""
        return Material(*([r for r in part if pools[r.query_id] == pool] for part in self))


class Lesson(NamedTuple):
    """Since when things are as they are now, mesh clock; None: all along.

    Attributes:
        changed_at_s: The workload or an instance's speed changed.
        is_other: Whether a speed is quite another than calls were dispatched under so far.
    """

    changed_at_s: float | None = None
    is_other: bool = False


class Steering:
    """Does what is due.

    Args:
        replay: Predicts P95 per α and fits speeds.
        publisher: Where decisions go.
        clock: Mesh clock.
        tables: Fleet and what is in force.
        params: How to decide.
        metrics: What is counted.
        journal: Is told every decision.
    """

    def __init__(
        self,
        *,
        replay: Replay,
        publisher: Publisher,
        clock: Clock,
        tables: Tables,
        params: TunerParams,
        metrics: Metrics,
        journal: Journal,
    ) -> None:
        self._replay = replay
        self._journal = journal
        self._publisher = publisher
        self._clock = clock
        self._tables = tables
        self._params = params
        self._metrics = metrics
        self._truth = Truth()
        self._clipped: set[str] = set()
        self._banned_until_s: dict[tuple[str, float], float] = {}
        self._checked: dict[str, int] = {}

    async def learn(self, ended: Sequence[QueryRecord], running: Sequence[QueryRecord]) -> Lesson:
        """Learn shapes and speeds from the queries since the latest change known."""
        records = [*ended, *running]
        requests = speed_requests(records, self._tables.fleet, self._tables.speeds)
        try:
            fits = await self._replay.speeds(requests)
        except ReplayLost as exc:  # the next lesson has these queries too
            log.warning("lesson_given_up", error=str(exc))
            return Lesson()
        workload_s = window_cut_s(ended, running)
        recent = _since(records, workload_s) or records
        hits = hit_factors(recent)
        is_other = await self._publish_speeds(fits, hits)
        await self._publish_shapes(_since(ended, workload_s) or ended)
        self._truth.take_speeds(fits)
        self._truth.take_hits(hits, min((record.arrival_s for record in recent), default=0.0))
        cuts = [workload_s, *(fit.changed_at_s for fit in fits.values())]
        return Lesson(
            changed_at_s=max((cut for cut in cuts if cut is not None), default=None),
            is_other=is_other,
        )

    async def _publish_shapes(self, records: Sequence[QueryRecord]) -> None:
        expected = self._tables.shapes()
        queries = [record.trace() for record in records]
        learned = learned_shapes(queries, records, expected)
        self._count_clipped(queries)
        for workflow, shape in learned.items():
            known = self._tables.profiles.get(workflow)
            if known is not None and not is_notable(shape, known.shape):
                continue
            profile = WorkflowProfile(
                shape=shape,
                revision=next_revision(known),
                at_s=self._clock.now_s(),
                tuner_id=self._params.tuner_id,
            )
            await self._publish(profile, f"profile/{workflow}")

    def _count_clipped(self, queries: Sequence[TraceQuery]) -> None:
        """Count queries with calls of implausible length, each once while it is in the window."""
        found = set(clipped(queries))
        self._metrics.events_ignored.add(len(found - self._clipped), cause="clipped_length")
        self._clipped = found | (self._clipped & {query.query_id for query in queries})

    async def _publish_speeds(
        self, fits: Mapping[str, SpeedFit], hits: Mapping[str, float]
    ) -> bool:
        """Publish what differs notably; return whether a speed is quite another than believed."""
        is_other = False
        for instance_id, fit in fits.items():
            known = self._tables.speeds.get(instance_id)
            old, old_hits = (known.factor, known.hit_factor) if known else (1.0, 1.0)
            trust = fit.num_calls / (fit.num_calls + PRIOR_CALLS)
            new = math.exp(trust * math.log(fit.factor) + (1.0 - trust) * math.log(old))
            new_hits = hits.get(instance_id, old_hits)
            is_same = abs(math.log(new / old)) < NOTABLE_SPEED
            if is_same and abs(new_hits - old_hits) < NOTABLE_HITS:
                continue
            update = SpeedUpdate(
                instance_id=instance_id,
                factor=old if is_same else new,
                hit_factor=new_hits,
                revision=next_revision(known),
                at_s=self._clock.now_s(),
            )
            log.info("speed_learned", instance_id=instance_id, factor=new, hit_factor=new_hits)
            is_other |= abs(math.log(update.factor / old)) > OTHER_SPEED
            await self._publish(update, f"speed/{instance_id}")
        return is_other

    async def decide(self, material: Material, trigger: str) -> bool:
        """Decide about every pool in the window; return whether any α changed."""
        specs = self._tables.fleet.values()
        pools = {r.query_id: pool_of(r.model, specs) for part in material for r in part}
        is_changed = False
        for pool in sorted(set(pools.values())):
            fleet = self._tables.members_of(pool)
            own = material.of_pool(pools, pool)
            if fleet and own.ended:
                window = episode([*own.lead_in, *own.ended], own.running, now_s=self._clock.now_s())
                records = [record for part in own for record in part]
                believed = believed_speeds(records, self._tables.fleet)
                from_s = min(record.arrival_s for record in own.ended)
                before = sum(end.arrival_s < from_s for end in window.ends)
                warm_up = before or warm_up_of(len(window.queries))
                past = past_of(
                    self._tables.said,
                    believed,
                    pool,
                    self._params.initial_alpha,
                    window.origin_s,
                    self._clock.now_s(),
                )
                request = self._request(fleet, window, past, pool, warm_up)
                is_changed |= await self._decide_pool(pool, request, window, trigger)
        return is_changed

    async def _decide_pool(
        self,
        pool: str,
        request: ReplayRequest,
        window: Episode,
        trigger: str,
    ) -> bool:
        known = self._tables.alphas.get(pool)
        current, warm_up = request.current, request.warm_up or 0
        try:
            answer = await self._replay.sweep(request)
        except (ConfigError, ReplayLost) as exc:  # e.g. a recorded call that fits nowhere any more
            # Not tried again before the next decision is due: the window itself may be the cause.
            log.warning("replay_given_up", pool=pool, error=str(exc))
            self._metrics.decisions.add(result="not_replayed")
            return False
        judgement = judge(
            answer.runs,
            current=current,
            previous=known.previous_alpha if known is not None else None,
            observed=Observed(
                p95_s=window.percentile_s(95, start=warm_up),
                num_queries=len(window.queries) - sum(window.is_censored),
                shares=shares_of(window.generated_tokens),
            ),
            rules=self._params.rules,
            as_it_was=answer.as_it_was,
            warm_up=warm_up,
        )
        decision, undone = self._or_undo(known, window, warm_up, judgement)
        self._report(pool, trigger, current, window, warm_up, answer, judgement, decision)
        if decision.is_change:
            await self._publish_alpha(pool, current, decision, judgement, known, undone=undone)
        elif trigger == "schedule" and self._is_calibrated(judgement):
            await self._advise(pool, request, current)
        return decision.is_change

    def _is_calibrated(self, judgement: Judgement) -> bool:
        error = judgement.calibration_error
        return error is not None and error <= self._params.rules.max_calibration_error

    async def _advise(self, pool: str, request: ReplayRequest, alpha: float) -> None:
        """Say which engine setting would be better; people own those."""
        for one in await advice(self._replay, request, alpha, self._params.rules.margin):
            self._metrics.advised.set(one.value, pool=pool, setting=one.setting)
            log.info(
                "setting_advised",
                pool=pool,
                setting=one.setting,
                value=one.value,
                gain=one.gain,
                sure_gain=one.sure_gain,
            )

    def _request(
        self,
        fleet: tuple[InstanceSpec, ...],
        window: Episode,
        past: Past,
        pool: str,
        warm_up: int,
    ) -> ReplayRequest:
        speeds, known = self._tables.speeds, self._tables.alphas.get(pool)
        now_s = self._clock.now_s()
        banned = {
            alpha
            for (where, alpha), until_s in self._banned_until_s.items()
            if where == pool and until_s > now_s
        }
        said = [speeds[spec.instance_id] for spec in fleet if spec.instance_id in speeds]
        return ReplayRequest(
            queries=window.queries,
            fleet=fleet,
            policy=self._params.policy,
            shapes=self._tables.shapes(),
            past=past,
            alphas=tuple(alpha for alpha in ALPHA_GRID if alpha not in banned),
            current=known.alpha if known is not None else self._params.initial_alpha,
            speed_factors={one.instance_id: one.factor for one in said}
            | self._truth.speeds_at(window.origin_s),
            believed_factors={one.instance_id: one.factor for one in said},
            hit_factors={one.instance_id: one.hit_factor for one in said},
            cold=self._truth.cold_at(window.origin_s),
            true_changes=self._truth.changes(window.origin_s),
            hop_s=window.hop_s,
            warm_up=warm_up,
        )

    def _or_undo(
        self, known: AlphaUpdate | None, window: Episode, warm_up: int, judgement: Judgement
    ) -> tuple[TuningDecision, bool]:
        """Return the decision, or the one to undo the last change where reality broke it.

        P95 outside the promised interval undoes a change only where the simulator cannot
        explain it: where it does, the workload has changed and the sweep's decision stands.
        """
        if known is None or known.previous_alpha is None or known.predicted_p95_s is None:
            return judgement.decision, False
        pool = known.pool
        if self._is_calibrated(judgement) or self._checked.get(pool) == known.revision:
            return judgement.decision, False
        start = max(warm_up, sum(end.arrival_s < known.at_s for end in window.ends))
        if len(window.ends) - start < self._params.rules.min_queries:
            return judgement.decision, False
        self._checked[pool] = known.revision
        promised_s = known.predicted_high_s or known.predicted_p95_s
        undo = roll_back(
            known.alpha,
            known.previous_alpha,
            predicted_p95_s=promised_s,
            observed_p95_s=window.percentile_s(95, start=start),
            rules=self._params.rules,
        )
        if undo is None:
            return judgement.decision, False
        until_s = self._clock.now_s() + BAN_PERIODS * self._params.period_s
        self._banned_until_s[pool, known.alpha] = until_s
        return undo, True

    def _report(
        self,
        pool: str,
        trigger: str,
        before: float,
        window: Episode,
        warm_up: int,
        answer: ReplayAnswer,
        judgement: Judgement,
        decision: TuningDecision,
    ) -> None:
        error = judgement.calibration_error
        if error is not None:
            self._metrics.calibration.set(error, pool=pool)
        self._metrics.decisions.add(result="changed" if decision.is_change else "kept")
        decided = Decided(
            at_s=self._clock.now_s(),
            pool=pool,
            trigger=trigger,
            before=before,
            alpha=decision.alpha,
            is_change=decision.is_change,
            best_alpha=decision.best_alpha,
            reason=decision.reason,
            num_queries=len(window.queries) - warm_up,
            num_censored=sum(window.is_censored[warm_up:]),
            observed_p95_s=window.percentile_s(95, start=warm_up),
            simulated_p95_s=answer.as_it_was.p95_s,
            calibration_error=error,
            num_alphas=len(answer.runs),
            ineligible=judgement.ineligible,
        )
        log.info("tuning_decided", **msgspec.structs.asdict(decided))
        self._journal(decided)

    async def _publish_alpha(
        self,
        pool: str,
        current: float,
        decision: TuningDecision,
        judgement: Judgement,
        known: AlphaUpdate | None,
        *,
        undone: bool,
    ) -> None:
        low_s, high_s = judgement.interval_s
        is_promise = not undone and math.isfinite(low_s)
        update = AlphaUpdate(
            pool=pool,
            alpha=decision.alpha,
            revision=next_revision(known),
            reason=decision.reason,
            predicted_p95_s=decision.predicted_p95_s,
            predicted_low_s=low_s if is_promise else None,
            predicted_high_s=high_s if is_promise else None,
            previous_alpha=current,
            at_s=self._clock.now_s(),
            tuner_id=self._params.tuner_id,
        )
        await self._publish(update, f"alpha/{pool}")

    async def _publish(self, message: ControlMessage, key: str) -> None:
        await self._publisher.until_taken(CONTROL, message, key=key)
        self._tables.take(message)


def _since(records: Sequence[QueryRecord], at_s: float | None) -> list[QueryRecord]:
    return [record for record in records if at_s is None or record.arrival_s >= at_s]
