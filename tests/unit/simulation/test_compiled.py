"""The compiled simulator is made of the scheduling formulas themselves."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import shared
from shared.simulation import compiled
from shared.simulation.scenario import Scenario
from tests.support.simulated_queries import make_query, make_spec
from tests.support.simulation import lay_out

PACKAGE = Path(shared.__file__).parent

# Chooses an instance three times over: by the dispatcher's policy, by the interpreted rule and by
# the compiled rule (compiled alone: the whole event loop takes longer).
CHOOSE = """
import json
from numba import njit, types
from shared.domain.instance import InstanceSpec, LatencyModel
from shared.scheduling.policies.flow import HexgenFlow
from shared.scheduling.policy import Cost, InstanceView, WaitingCall
from shared.simulation import compiled, rules
from shared.simulation.interpreted import InterpretedCore
from tests.unit.simulation.test_compiled import BACKLOGS_S, COSTS_S, tables_for_choice

spec = InstanceSpec(
    instance_id="x", gpu="g", latency=LatencyModel(prefill_s_per_token=1, weights_s=1)
)
import msgspec
views = [
    InstanceView(spec=msgspec.structs.replace(spec, instance_id=f"i{n}"), backlog_s=backlog_s)
    for n, backlog_s in enumerate(BACKLOGS_S)
]
call = WaitingCall(
    request_id="r", query_id="q", input_tokens=1, output_tokens=1, ready_at_s=0, t_slo_s=1,
    deadline_s=1,
)
costs = {f"i{n}": Cost(t_comp_s=cost_s) for n, cost_s in enumerate(COSTS_S)}
by_policy = HexgenFlow(0.5).choose(call, views, costs, 0.0).instance_id
arrays = tables_for_choice()
tables = InterpretedCore(arrays)._tables
by_rule = rules.choose_by_flow(tables, tables.runs[0], 0, 0)

def choose_at(address):
    tables = compiled.tables_at(address)
    return rules.choose_by_flow(tables, tables.runs[0], 0, 0)

compiled.register_sources()
compiled_rule = njit(types.int64(types.int64), **compiled.OPTIONS)(choose_at)
by_compiled = compiled_rule(compiled.addresses_of(arrays).ctypes.data)
print(json.dumps([int(by_policy[1:]), by_rule, by_compiled]))
"""

BACKLOGS_S = (1.0, 8.0)
COSTS_S = (4.0, 1.0)


def tables_for_choice() -> dict[str, np.ndarray]:
    """Two instances: one with little work, one that would be fast."""
    fleet = (make_spec("i0"), make_spec("i1"))
    scenario = Scenario(queries=(make_query(0, [[(10, 2)]]),), fleet=fleet, alpha=0.5)
    _, arrays = lay_out(scenario)
    arrays["costs_s"][:] = COSTS_S
    arrays["views"]["backlog_s"] = BACKLOGS_S
    return arrays


def choices(root: Path) -> list[int]:
    """What a copy of the package chooses, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", CHOOSE], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    answer: list[int] = json.loads(done.stdout)
    return answer


def test_changed_term_changes_dispatcher_simulator_and_compiled_code(tmp_path: Path) -> None:
    """A mutation of one term of the score is seen everywhere, because there is one score."""
    shutil.copytree(PACKAGE, tmp_path / "shared", ignore=shutil.ignore_patterns("__pycache__"))
    tests = Path(__file__).parents[2]
    shutil.copytree(tests / "support", tmp_path / "tests/support")
    target = tmp_path / "tests/unit/simulation"
    target.mkdir(parents=True)
    shutil.copy(__file__, target)
    assert choices(tmp_path) == [0, 0, 0]
    source = tmp_path / "shared/scheduling/dispatch.py"
    text = source.read_text()
    term = "alpha * t_comp_s"
    assert text.count(f"- {term}") >= 1
    source.write_text(text.replace(f"- {term}", f"- 100.0 * {term}"))
    assert choices(tmp_path) == [1, 1, 1]


def test_digest_follows_every_source() -> None:
    """The disk cache's key names every file the machine code is made from."""
    names = {module.__name__ for module in compiled.SOURCES}
    for leaf in compiled.LEAVES:
        assert leaf.__module__ in names
    assert compiled.source_digest() == compiled.source_digest()


def test_wrong_layout_is_refused() -> None:
    """Machine code never gets records of another shape."""
    arrays = tables_for_choice()
    arrays["calls"] = np.zeros(3, np.int64)
    with pytest.raises(TypeError, match="calls"):
        compiled.addresses_of(arrays)
