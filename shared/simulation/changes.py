"""Changes something while a run stands still: α, what policies believe, how fast instances are."""

from collections.abc import Sequence

from shared.domain.instance import TIMES
from shared.simulation.asking import Core, PolicyDesk
from shared.simulation.kernel_state import NOWHERE
from shared.simulation.layout import Array, Layout, belief_table, engine_table
from shared.simulation.scenario import Scenario


class Changer:
    """Makes a scenario's changes, one after the other.

    Args:
        layout: The workload and the fleet.
        scenario: The run.
        core: The event loop.
        desk: Answers for policies that are not compiled, where there is one.
    """

    def __init__(
        self, layout: Layout, scenario: Scenario, core: Core, desk: PolicyDesk | None
    ) -> None:
        self._layout = layout
        self._core = core
        self._desk = desk
        self._left = list(scenario.changes)
        self._shapes = scenario.shapes
        self._believed = dict(scenario.believed)
        self._hits = dict(scenario.hit_factors)
        self._plan_pause()

    def make_next(self) -> None:
        """Make the change that the run has stopped for."""
        change = self._left.pop(0)
        if change.alpha is not None:
            self._core.write("runs", "alpha", [change.alpha])
        if change.shapes is not None:
            self._shapes = change.shapes
        self._believed |= change.believed_factors or {}
        self._hits |= change.hit_factors or {}
        fleet = self._layout.fleet
        if change.believed_factors is not None or change.hit_factors is not None:
            self._write("beliefs", belief_table(fleet, self._believed, self._hits))
        if change.shapes is not None or change.believed_factors is not None:
            for (table, field), values in self._layout.expected(
                self._shapes, self._believed
            ).items():
                self._core.write(table, field, values.tolist())
        if change.speed_factors is not None:
            changed = engine_table(fleet, change.speed_factors)
            for name in TIMES:
                self._core.write("engines", name, changed[name].tolist())
        if change.cold is not None:
            self._cool(change.cold)
        if self._desk is not None:
            self._desk.believe(change.alpha, self._believed, self._hits)
        self._plan_pause()

    def _cool(self, cold: Sequence[str]) -> None:
        """Let instances find nothing in their cache; calls on their way there know no prefix."""
        core, reuses = self._core, self._layout.reuses(cold)
        core.write("lines", "reuses", [int(one) for one in reuses])
        num_calls = len(self._layout.query_of_call)
        chains = [core.read("calls", index, "chain") for index in range(num_calls)]
        for index in range(num_calls):
            place = core.read("plans", index, "instance")
            if place >= 0 and not reuses[place] and core.read("calls", index, "place") == NOWHERE:
                chains[index] = -1
        core.write("calls", "chain", chains)

    def _plan_pause(self) -> None:
        if not self._left:
            self._core.write("runs", "pause_s", [float("inf")])
            return
        self._core.write("runs", "pause_s", [self._left[0].at_s])
        cuts = self._left[0].speed_factors is not None
        self._core.write("runs", "cuts_at_pause", [int(cuts)])

    def _write(self, table: str, records: Array) -> None:
        for name in records.dtype.names or ():
            self._core.write(table, name, records[name].tolist())
