"""Simulates a workload on a fleet under a policy.

Runs are deterministic: the same scenario gives the same bytes, compiled or interpreted. Compiled
code costs a second to load (much more the first time on a machine, when it is compiled), so small
runs are interpreted.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from shared.simulation.asking import Core, PolicyDesk
from shared.simulation.changes import Changer
from shared.simulation.fleet_kernel import DONE, PAUSES
from shared.simulation.interpreted import InterpretedCore
from shared.simulation.layout import Arrays, Layout
from shared.simulation.results import RunResult
from shared.simulation.rules import ASK_POLICY, BY_ANSWER, COMPILED_RULES
from shared.simulation.scenario import Scenario, check_scenario

CoreName = Literal["auto", "compiled", "interpreted"]

# Interpreted runs take about 50 µs a call; compiled code is worth loading above this many.
CALLS_WORTH_COMPILING = 60_000

_ASKING_RULES = (ASK_POLICY, BY_ANSWER)


def simulate(scenario: Scenario, *, core: CoreName = "auto", ask_policy: bool = False) -> RunResult:
    """Run one scenario.

    Args:
        scenario: The run.
        core: `compiled`, `interpreted`, or `auto`, which decides by the number of calls.
        ask_policy: Ask the policy object even where its rule is compiled.

    Raises:
        ConfigError: The scenario makes no run; names the place.
    """
    return sweep([scenario], core=core, ask_policy=ask_policy)[0]


def sweep_alpha(
    scenario: Scenario, alphas: Sequence[float], *, core: CoreName = "auto"
) -> list[RunResult]:
    """Run one scenario under several α, with the same arrivals.

    Args:
        scenario: The run.
        alphas: The α to try, each in [0, 1].
        core: See `simulate`.

    Raises:
        ConfigError: The scenario makes no run; names the place.
    """
    runs = [msgspec.structs.replace(scenario, alpha=alpha) for alpha in alphas]
    return sweep(runs, core=core)


def sweep(
    scenarios: Sequence[Scenario], *, core: CoreName = "auto", ask_policy: bool = False
) -> list[RunResult]:
    """Run scenarios one after the other.

    Neighbours that differ only in policy, α, dispatchers, delays, changes or looking past share
    the work of laying the workload out.

    Args:
        scenarios: The runs.
        core: See `simulate`.
        ask_policy: See `simulate`.

    Raises:
        ConfigError: A scenario makes no run; names the place.
    """
    num_calls = sum(query.num_calls for scenario in scenarios for query in scenario.queries)
    is_compiled = core == "compiled" or (core == "auto" and num_calls >= CALLS_WORTH_COMPILING)
    results = []
    layout: Layout | None = None
    for index, scenario in enumerate(scenarios):
        layout = layout or Layout(scenario)
        check_scenario(scenario)
        following = scenarios[index + 1 : index + 2]
        is_last = not (following and _share_layout(scenario, following[0]))
        results.append(_run(layout, scenario, is_compiled, ask_policy, is_last=is_last))
        layout = None if is_last else layout
    return results


def warm_up() -> None:
    """Load the compiled core, compiling it first where this machine has not done so yet."""
    from shared.simulation.compiled import compiled_run  # noqa: PLC0415 - imports numba

    compiled_run()


def _share_layout(one: Scenario, other: Scenario) -> bool:
    return (
        one.queries is other.queries
        and one.fleet == other.fleet
        and one.shapes == other.shapes
        and one.oracle == other.oracle
        and one.admission == other.admission
        and one.speed_factors == other.speed_factors
        and one.believed_factors == other.believed_factors
        and one.hit_factors == other.hit_factors
        and one.cold == other.cold
    )


def _run(
    layout: Layout, scenario: Scenario, is_compiled: bool, ask_policy: bool, *, is_last: bool
) -> RunResult:
    choose_rule, order_rule = (
        _ASKING_RULES if ask_policy else COMPILED_RULES.get(scenario.policy, _ASKING_RULES)
    )
    tables = layout.tables_for(scenario, choose_rule, order_rule, is_last=is_last)
    core = _core(tables, is_compiled)
    desk = PolicyDesk(layout, scenario, core) if choose_rule == ASK_POLICY else None
    changer = Changer(layout, scenario, core, desk) if scenario.changes else None
    while (status := core.proceed()) != DONE:
        if status == PAUSES and changer is not None:
            changer.make_next()
        elif desk is not None:
            desk.answer_pending()
    return RunResult(
        policy=scenario.policy,
        alpha=scenario.alpha,
        fleet=scenario.fleet,
        place_of=layout.place_of,
        tables=tables,
        query_of_call=layout.query_of_call,
        stage_of_call=layout.stage_of_call,
    )


def _core(tables: Arrays, is_compiled: bool) -> Core:
    if is_compiled:
        # Numba takes a second to import, which small runs and the live services do not need.
        from shared.simulation.compiled import CompiledCore  # noqa: PLC0415

        return CompiledCore(tables)
    return InterpretedCore(tables)
