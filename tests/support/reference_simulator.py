"""A slow, obviously correct simulator of a fleet, to compare the fast one with.

It imports nothing from `shared`. Every iteration is a step of its own, every quantity is counted
anew from the calls themselves whenever it is needed, and nothing is skipped or kept in closed
form. Inputs are plain dataclasses; predictions are given, not made.
"""

import math
from dataclasses import dataclass

from tests.support.reference_instance import Call, Instance, Speed

__all__ = ["Call", "Change", "Fleet", "Instance", "Query", "Speed", "Stage"]


@dataclass
class Stage:
    """One stage."""

    query: int
    calls: list[int]
    parents: tuple[int, ...]
    think: float
    expected: float
    remaining: float
    budget: float = math.nan
    ready: float = math.nan


@dataclass
class Change:
    """Something that changes during the run; None stays as it is. Lists are per record."""

    at: float
    alpha: float | None = None
    expected: list[float] | None = None
    remaining: list[float] | None = None
    predicted: list[float] | None = None
    believed: list[Speed] | None = None
    hits: list[float] | None = None
    speeds: list[Speed] | None = None
    reuses: list[bool] | None = None


@dataclass
class Query:
    """One query; stages are numbered over the whole run."""

    arrival: float
    slo: float
    stages: list[int]
    end: float = math.nan


class Fleet:
    """The whole run."""

    def __init__(
        self,
        *,
        queries: list[Query],
        stages: list[Stage],
        calls: list[Call],
        instances: list[Instance],
        policy: str,
        alpha: float,
        num_dispatchers: int,
        hop: float,
        delay: float,
        changes: list[Change],
        one_by_one: bool,
    ) -> None:
        self.queries = queries
        self.stages = stages
        self.calls = calls
        self.instances = instances
        self.policy = policy
        self.alpha = alpha
        self.num_dispatchers = num_dispatchers
        self.hop = hop
        self.delay = delay
        self.changes = list(changes)
        self.one_by_one = one_by_one
        self.timers: list[tuple[float, int, str, tuple[int, ...]]] = []
        self.timers_set = 0
        self.pool: list[Call] = []
        self.deliveries = 0
        self.turns = [0] * num_dispatchers
        # Per dispatcher and instance: the calls believed to be bound and not ended.
        self.views: list[list[list[int]]] = [
            [[] for _ in instances] for _ in range(num_dispatchers)
        ]
        self.news: set[int] = set()
        self.freed: set[int] = set()
        self.touched: list[int] = []
        self.known: set[int] = set()
        self.now = 0.0

    def run(self) -> None:
        """Run until nothing more happens."""
        arrivals = sorted(range(len(self.queries)), key=lambda q: (self.queries[q].arrival, q))
        while True:
            instants = [instance.end for instance in self.instances]
            instants += [timer[0] for timer in self.timers]
            instants += [self.queries[q].arrival for q in arrivals]
            self.now = min(instants, default=math.inf)
            if self.now == math.inf:
                return
            if self.changes and self.changes[0].at <= self.now:
                self.change(self.changes.pop(0))
                continue
            self.news, self.freed, self.touched = set(), set(), []
            self.happen(arrivals)
            pool, self.pool = self.pool, []
            for call in pool:
                self.assign(call)
            self.start_iterations()

    def change(self, change: Change) -> None:
        """Change something; iterations in flight stay as they are."""
        if change.alpha is not None:
            self.alpha = change.alpha
        for records, name, values in (
            (self.stages, "expected", change.expected),
            (self.stages, "remaining", change.remaining),
            (self.calls, "predicted", change.predicted),
            (self.instances, "believed", change.believed),
            (self.instances, "hits", change.hits),
            (self.instances, "speed", change.speeds),
            (self.instances, "reuses", change.reuses),
        ):
            if values is not None:
                for record, value in zip(records, values, strict=True):
                    setattr(record, name, value)
        for call in self.calls:
            instance = self.instances[call.instance]
            inside = instance.waiting + instance.prefill + instance.decode
            if call.instance >= 0 and not instance.reuses and call not in inside:
                call.warm = call.warm and not math.isnan(call.end)

    def happen(self, arrivals: list[int]) -> None:
        """Let everything of this instant happen, up to the assignment of calls."""
        for instance in self.instances:
            if instance.end == self.now:
                self.end_iteration(instance)
        while self.timers and min(self.timers)[0] == self.now:
            timer = min(self.timers)
            self.timers.remove(timer)
            self.run_timer(timer[2], timer[3])
        while arrivals and self.queries[arrivals[0]].arrival == self.now:
            for stage in self.queries[arrivals.pop(0)].stages:
                if not self.stages[stage].parents:
                    self.later("ready", (stage,), self.stages[stage].think)

    def start_iterations(self) -> None:
        """Let the instances whose state changed take calls and start iterations."""
        for number in self.touched:
            instance = self.instances[number]
            admissions = instance.num_admissions
            if self.one_by_one and number in self.freed and not instance.is_empty():
                instance.start(self.now)
            if number in self.news:
                alone = self.one_by_one and instance.is_empty()
                instance.feed(in_flight=instance.end != math.inf, most=1 if alone else None)
            if instance.end == math.inf:
                instance.start(self.now)
            if instance.num_admissions > admissions:
                instance.feed(in_flight=True)

    def touch(self, instance: Instance) -> None:
        """Remember that an instance's state changed at this instant."""
        if instance.number not in self.touched:
            self.touched.append(instance.number)

    def later(self, kind: str, what: tuple[int, ...], delay: float) -> None:
        """Let something happen after a delay, or at once when there is none."""
        if delay > 0:
            self.timers.append((self.now + delay, self.timers_set, kind, what))
            self.timers_set += 1
        else:
            self.run_timer(kind, what)

    def run_timer(self, kind: str, what: tuple[int, ...]) -> None:
        """Let something happen."""
        if kind == "ready":
            self.make_ready(self.stages[what[0]])
        elif kind == "dispatcher":
            self.pool.append(self.calls[what[0]])
        elif kind == "instance":
            self.deliver(self.calls[what[0]])
        elif kind == "stage":
            self.end_stage(what[0])
        elif kind == "bound":
            for dispatcher, view in enumerate(self.views):
                if dispatcher != what[1]:
                    view[self.calls[what[0]].instance].append(what[0])
        else:
            for view in self.views:
                view[self.calls[what[0]].instance].remove(what[0])

    def end_iteration(self, instance: Instance) -> None:
        """Take in what an iteration brought."""
        ended, visible = instance.finish_iteration()
        self.touch(instance)
        if visible:
            self.news.add(instance.number)
        if ended:
            self.freed.add(instance.number)
        for call in ended:
            self.later("ended", (call.number,), self.delay)
            stage = self.stages[call.stage]
            if all(not math.isnan(self.calls[number].end) for number in stage.calls):
                last = [c for c in ended if c.stage == call.stage][-1]
                if last is call:
                    self.later("stage", (call.stage,), self.hop)

    def make_ready(self, stage: Stage) -> None:
        """Fix the stage's budget and send its calls to their dispatcher."""
        query = self.queries[stage.query]
        stage.ready = self.now
        left = query.slo - (self.now - query.arrival)
        total = stage.expected + stage.remaining
        if left <= 0 or total <= 0:
            stage.budget = left
        else:
            stage.budget = left * (stage.expected / total)
        for number in stage.calls:
            self.calls[number].ready = self.now
            self.later("dispatcher", (number,), self.hop)

    def end_stage(self, number: int) -> None:
        """The producer knows all results of a stage: let those that waited for it begin."""
        self.known.add(number)
        query = self.queries[self.stages[number].query]
        if self.known.issuperset(query.stages):
            query.end = self.now
        for child in query.stages:
            parents = self.stages[child].parents
            if number in parents and self.known.issuperset(parents):
                self.later("ready", (child,), self.stages[child].think)

    # The dispatcher

    def cost(self, instance: Instance, call: Call) -> float:
        """Expected service time of a call."""
        cached = int(self.expected_cached(instance, call) * instance.hits)
        speed = instance.believed
        tokens = max(call.tokens_in - cached, 1)
        prefill = tokens * (cached + tokens / 2) * speed.attention
        while tokens > 0:
            chunk = min(tokens, instance.budget)
            prefill += speed.overhead + speed.batched
            prefill += max(speed.weights, (chunk + speed.waste) * speed.prefill)
            tokens -= chunk
        steps = call.predicted - 1
        if steps <= 0:
            return prefill
        context = call.tokens_in + call.predicted / 2
        step = speed.overhead + speed.weights + (speed.seq + context * speed.kv)
        return prefill + steps * step

    def expected_cached(self, instance: Instance, call: Call) -> int:
        """Prompt tokens in memory, or in the prompts of calls bound to the instance.

        A call that reused nothing shows nothing: its prompt is believed cached ever after.
        """
        held = instance.resident_blocks(call, believed=True)
        bound = [
            c
            for c in self.calls
            if c.instance == instance.number and (math.isnan(c.end) or not c.warm)
        ]
        for key in instance.believed_chain(call):
            if any(key in instance.believed_chain(other) for other in bound):
                held = max(held, instance.part(key).end)
        return min(held, (call.tokens_in - 1) // instance.block) * instance.block

    def assign(self, call: Call) -> None:
        """Bind a call to an instance."""
        stage = self.stages[call.stage]
        eligible = [
            instance
            for instance in self.instances
            if instance.model == call.model and call.tokens_in + call.tokens_out <= instance.limit
        ]
        costs = {instance.number: self.cost(instance, call) for instance in eligible}
        dispatcher = stage.query % self.num_dispatchers
        if self.policy in {"hexgen-flow", "wb+fcfs"}:
            mean = sum(costs.values()) / len(costs)
            chosen = max(
                eligible,
                key=lambda m: (
                    self.score(dispatcher, m, mean, costs[m.number]),
                    tie_order(call.tie_key, m.tie_key),
                ),
            )
        elif self.policy in {"least-outstanding", "edf", "llf"}:
            chosen = min(
                eligible,
                key=lambda m: (
                    len(self.views[dispatcher][m.number]),
                    -tie_order(call.tie_key, m.tie_key),
                ),
            )
        else:
            chosen = eligible[self.turns[dispatcher] % len(eligible)]
            self.turns[dispatcher] += 1
        call.instance = chosen.number
        call.warm = chosen.reuses
        call.assigned = self.now
        call.cost = costs[chosen.number]
        if self.policy in {"hexgen-flow", "rr+pq"}:
            call.score = stage.ready + stage.budget - call.cost
        elif self.policy in {"edf", "llf"}:
            query = self.queries[stage.query]
            call.score = query.arrival + query.slo - (call.cost if self.policy == "llf" else 0)
        else:
            call.score = stage.ready
        self.views[dispatcher][chosen.number].append(call.number)
        self.later("instance", (call.number,), self.hop)

    def score(self, dispatcher: int, instance: Instance, mean: float, cost: float) -> float:
        """The paper's score."""
        backlog = sum(self.calls[n].cost for n in self.views[dispatcher][instance.number])
        return (1 - self.alpha) * (mean * mean) / max(backlog, 0.05) - self.alpha * cost

    def deliver(self, call: Call) -> None:
        """A call reaches its instance."""
        if self.num_dispatchers > 1:
            dispatcher = self.stages[call.stage].query % self.num_dispatchers
            self.later("bound", (call.number, dispatcher), self.delay)
        instance = self.instances[call.instance]
        call.order = self.deliveries
        self.deliveries += 1
        instance.line.append(call)
        instance.line.sort(key=lambda c: (c.score, c.order))
        self.news.add(instance.number)
        self.touch(instance)


def tie_order(call_key: int, instance_key: int) -> int:
    """Order of equal scores."""
    mixed = (call_key ^ instance_key) % 2**31
    mixed = (mixed * 0x2C1B3C6D) % 2**31
    mixed ^= mixed >> 13
    mixed = (mixed * 0x297A2D39) % 2**31
    return mixed ^ (mixed >> 15)
