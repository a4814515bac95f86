"""Asks a policy that is not compiled for every call of a run.

The policy sees what it sees live: predictions, and views of the instances as its dispatcher
believes them to be; an engine's memory is seen as of its last change of batch. Each dispatcher has
a policy object of its own.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from shared.scheduling.policies import make_policy
from shared.scheduling.policy import Cost, InstanceView, WaitingCall
from shared.simulation.fleet_state import REFUSED, UNASSIGNED
from shared.simulation.layout import Layout
from shared.simulation.scenario import Scenario


class Core(Protocol):
    """The event loop, interpreted or compiled."""

    def proceed(self) -> int:
        """Run until done or asked."""
        ...

    def read(self, table: str, index: int, field: str) -> Any:
        """Return a field of a record."""
        ...

    def number(self, table: str, index: int) -> float:
        """Return an entry of a table of numbers."""
        ...

    def answer(self, chosen: int, score: float) -> None:
        """Answer a question about a call."""
        ...

    def write(self, table: str, field: str, values: Sequence[float]) -> None:
        """Set a field of every record of a table."""
        ...


class PolicyDesk:
    """Answers the event loop's questions by asking a policy.

    Args:
        layout: The workload and the fleet.
        scenario: The run.
        core: The event loop.
    """

    def __init__(self, layout: Layout, scenario: Scenario, core: Core) -> None:
        self._layout = layout
        self._scenario = scenario
        self._core = core
        self._policies = [
            make_policy(scenario.policy, scenario.alpha) for _ in range(scenario.num_dispatchers)
        ]
        self._believed, self._hits = scenario.believed, scenario.hit_factors

    def believe(
        self, alpha: float | None, believed: Mapping[str, float], hits: Mapping[str, float]
    ) -> None:
        """Answer with another α (None: the same), and other beliefs, from now on."""
        self._believed, self._hits = believed, hits
        if alpha is not None:
            for policy in self._policies:
                policy.set_alpha(alpha)

    def answer_pending(self) -> None:
        """Ask the policy about the pending call and pass its answer on."""
        index = self._core.read("runs", 0, "pending_call")
        query_index = int(self._layout.query_of_call[index])
        dispatcher = self._core.read("queries", query_index, "dispatcher")
        policy = self._policies[dispatcher]
        call = self._waiting_call(index, query_index)
        views, costs = self._views(dispatcher)
        now_s = self._core.read("runs", 0, "now_s")
        if policy.admit(call, views, now_s) is not None:
            self._core.answer(REFUSED, 0.0)
            return
        choice = policy.choose(call, views, costs, now_s)
        if choice is None:
            self._core.answer(UNASSIGNED, 0.0)
            return
        ids = [spec.instance_id for spec in self._layout.fleet]
        score = policy.queue_score(call, costs[choice.instance_id].t_comp_s)
        self._core.answer(ids.index(choice.instance_id), score)

    def _waiting_call(self, index: int, query_index: int) -> WaitingCall:
        core = self._core
        query = self._scenario.queries[query_index]
        stage_index = int(self._layout.stage_of_call[index])
        record = core.read("plans", index, "stage")
        sibling = index - core.read("stages", record, "first_call")
        traced = query.stages[stage_index].calls[sibling]
        arrival_s = core.read("queries", query_index, "arrival_s")
        return WaitingCall(
            request_id=f"{query.query_id}/{stage_index}/{sibling}",
            query_id=query.query_id,
            tenant=query.tenant,
            model=query.model,
            input_tokens=traced.input_tokens,
            output_tokens=core.read("plans", index, "predicted_tokens"),
            context_tokens=traced.input_tokens + traced.output_tokens,
            prefix=traced.prefix,
            ready_at_s=core.read("stages", record, "ready_s"),
            t_slo_s=core.read("stages", record, "t_slo_s"),
            deadline_s=arrival_s + core.read("queries", query_index, "slo_s"),
        )

    def _views(self, dispatcher: int) -> tuple[list[InstanceView], dict[str, Cost]]:
        core, fleet = self._core, self._layout.fleet
        views, costs = [], {}
        for place, spec in enumerate(fleet):
            cost_s = core.number("costs_s", place)
            if cost_s < 0.0:
                continue
            view = dispatcher * len(fleet) + place
            outstanding = core.read("views", view, "outstanding")
            running = min(outstanding, core.read("lines", place, "inside"))
            cached_tokens = int(core.number("cached_tokens", place))
            costs[spec.instance_id] = Cost(t_comp_s=cost_s, cached_tokens=cached_tokens)
            views.append(
                InstanceView(
                    spec=spec,
                    backlog_s=core.read("views", view, "backlog_s"),
                    num_waiting=outstanding - running,
                    num_running=running,
                    capacity=core.read("lines", place, "admission"),
                    kv_used_tokens=self._kv_used_tokens(place),
                    head_score=self._head_score(place),
                    speed_factor=self._believed.get(spec.instance_id, 1.0),
                    hit_factor=self._hits.get(spec.instance_id, 1.0),
                )
            )
        return views, costs

    def _kv_used_tokens(self, place: int) -> int:
        def of_engine(field: str) -> int:
            count: int = self._core.read("engines", place, field)
            return count

        unused = of_engine("free_blocks") + of_engine("evictable_blocks")
        return (of_engine("total_blocks") - unused) * of_engine("block_tokens")

    def _head_score(self, place: int) -> float | None:
        if self._core.read("lines", place, "size") == 0:
            return None
        first = self._core.number("line_heap", self._core.read("lines", place, "heap_base"))
        score: float = self._core.read("calls", int(first), "priority")
        return score
