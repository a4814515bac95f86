"""The fleet simulator, compiled: the very functions of `fleet_kernel`, `iteration`, ... in numba.

Nothing is written twice: every function is handed to numba as it stands, the scheduling formulas
(`flow_score`, `prefill_s`, ...) included. Machine code is kept on disk beside this file (or in
numba's user-wide cache) under a digest of all sources it was made from, so that a change of one
formula never meets stale code.

Importing this module imports numba (a fraction of a second), the first run loads the machine code
or compiles it (some ten seconds, once); `simulator` does it when a run is worth it.
"""

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import FunctionType, ModuleType
from typing import Any, get_args, get_type_hints

import numpy as np
from numba import njit, types
from numba.extending import register_jitable

from shared.scheduling import budget, dispatch, latency, urgency
from shared.scheduling.policies import (
    earliest_finish,
    least_outstanding,
    llf,
    power_of_two,
    prefix_queue,
    qlm,
    ratio,
)
from shared.simulation import (
    baseline_rules,
    batch_lists,
    choosing,
    fleet_kernel,
    fleet_state,
    gate,
    heaps,
    iteration,
    kernel_state,
    kv_blocks,
    rules,
    segments,
    tables,
)
from shared.simulation.fleet_kernel import run_fleet
from shared.simulation.kernel_state import dtype_of
from shared.simulation.record_types import RecordPointer, Rows, TablesPointer, tables_reader

LEAVES: tuple[Callable[..., Any], ...] = (
    budget.stage_budget_s,
    dispatch.beta_s2,
    dispatch.floored_queue_s,
    dispatch.flow_score,
    dispatch.tie_order,
    latency.batch_extra_s,
    latency.decode_s,
    latency.prefill_s,
    urgency.latest_start_s,
    earliest_finish.decode_slowdown,
    earliest_finish.stretch,
    earliest_finish.time_to_start_s,
    least_outstanding.outstanding_score,
    llf.laxity_s,
    power_of_two.two_candidates,
    prefix_queue.kv_share,
    prefix_queue.prefix_share,
    prefix_queue.queue_share,
    prefix_queue.scorer_sum,
    qlm.group_deadline_s,
    qlm.token_throughput,
    qlm.waiting_time_s,
    ratio.ratio_score,
)
KERNELS: tuple[ModuleType, ...] = (
    kv_blocks,
    batch_lists,
    iteration,
    segments,
    gate,
    heaps,
    choosing,
    baseline_rules,
    rules,
    fleet_kernel,
)
SOURCES: tuple[ModuleType, ...] = (
    *KERNELS,
    budget,
    dispatch,
    latency,
    urgency,
    earliest_finish,
    least_outstanding,
    llf,
    power_of_two,
    prefix_queue,
    qlm,
    ratio,
    fleet_state,
    kernel_state,
    tables,
)
OPTIONS: dict[str, Any] = {"error_model": "numpy"}


def table_types() -> dict[str, Rows]:
    """Return the numba type of every table, in the order of their addresses."""
    numbers = {int: types.int64, float: types.float64}
    found = {}
    for name, hint in get_type_hints(tables.Tables).items():
        element = get_args(hint)[0]
        if element in numbers:
            found[name] = Rows(numbers[element], 8)
        else:
            dtype = dtype_of(element)
            found[name] = Rows(RecordPointer(element.__name__, dtype), dtype.itemsize)
    return found


TABLES = TablesPointer(table_types())
tables_at = tables_reader(TABLES)


@cache
def register_sources() -> None:
    """Let compiled code call the plain functions of the kernel and of the scheduling formulas."""
    for function in LEAVES:
        register_jitable(**OPTIONS)(function)
    for module in KERNELS:
        for function in vars(module).values():
            if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                register_jitable(**OPTIONS)(function)


def source_digest() -> int:
    """Return a number that changes with any source the machine code depends on."""
    digest = hashlib.blake2b(digest_size=7)
    for module in SOURCES:
        digest.update(inspect.getsource(module).encode())
    return int.from_bytes(digest.digest(), "big")


@cache
def compiled_run() -> Callable[[int], int]:
    """Return the compiled event loop, which takes the address of the tables' addresses."""
    register_sources()
    return _compile_run(source_digest())


def _compile_run(digest: int) -> Callable[[int], int]:
    # A closure's values are part of the key under which numba keeps machine code on disk.
    def run_at(address: int) -> int:
        if digest == 0:
            return -1
        return run_fleet(tables_at(address))

    signature = types.int64(types.int64)
    try:
        compiled = njit(signature, cache=True, **OPTIONS)(run_at)
    except RuntimeError:  # nowhere to write: read-only installation without a home directory
        compiled = njit(signature, **OPTIONS)(run_at)
    found: Callable[[int], int] = compiled
    return found


class CompiledCore:
    """One run in machine code.

    Args:
        arrays: Table name -> contiguous array of its records, changed in place.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        self._arrays = arrays
        self._addresses = addresses_of(arrays)
        self._run = compiled_run()

    def proceed(self) -> int:
        """Run until done or asked, see `run_fleet`."""
        return self._run(self._addresses.ctypes.data)

    def read(self, table: str, index: int, field: str) -> Any:
        """Return a field of a record."""
        return self._arrays[table][field][index].item()

    def number(self, table: str, index: int) -> float:
        """Return an entry of a table of numbers."""
        entry: float = self._arrays[table][index].item()
        return entry

    def answer(self, chosen: int, score: float) -> None:
        """Answer a question about a call."""
        self._arrays["runs"]["chosen"] = chosen
        self._arrays["runs"]["chosen_score"] = score

    def write(self, table: str, field: str, values: Sequence[float]) -> None:
        """Set a field of every record of a table."""
        self._arrays[table][field] = values


def addresses_of(arrays: Mapping[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Return the addresses of the tables; valid while the arrays live.

    Raises:
        TypeError: An array has not the layout that the compiled code expects.
    """
    addresses = np.empty(len(TABLES.tables), np.int64)
    for place, (name, rows) in enumerate(TABLES.tables.items()):
        array = arrays[name]
        if array.dtype.itemsize != rows.size_bytes or not array.flags.c_contiguous:
            msg = f"table {name} has the wrong layout"
            raise TypeError(msg)
        addresses[place] = array.ctypes.data
    return addresses
