"""Runs the event loop without compiling it: slower, but ready at once.

Records become plain objects in lists, the functions run as they are written, and what they leave
behind is written back to the arrays at the end.
"""

from collections.abc import MutableSequence, Sequence
from typing import Any, get_args, get_type_hints

import numpy as np

from shared.simulation.fleet_kernel import DONE, run_fleet
from shared.simulation.kernel_state import dtype_of
from shared.simulation.tables import Tables


class InterpretedCore:
    """One run on plain objects.

    Args:
        arrays: Table name -> records, see `Tables`; up to date again when the run is done.
    """

    def __init__(self, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        self._arrays = arrays
        self._kinds = {name: get_args(hint)[0] for name, hint in get_type_hints(Tables).items()}
        self._tables = Tables()
        for name, kind in self._kinds.items():
            setattr(self._tables, name, _objects(kind, arrays[name]))

    def proceed(self) -> int:
        """Run until done or asked, see `run_fleet`."""
        status = run_fleet(self._tables)
        if status == DONE:
            for name, kind in self._kinds.items():
                _write_back(kind, getattr(self._tables, name), self._arrays[name])
        return status

    def read(self, table: str, index: int, field: str) -> Any:
        """Return a field of a record."""
        return getattr(getattr(self._tables, table)[index], field)

    def number(self, table: str, index: int) -> float:
        """Return an entry of a table of numbers."""
        entry: float = getattr(self._tables, table)[index]
        return entry

    def answer(self, chosen: int, score: float) -> None:
        """Answer a question about a call."""
        run = self._tables.runs[0]
        run.chosen = chosen
        run.chosen_score = score

    def write(self, table: str, field: str, values: Sequence[float]) -> None:
        """Set a field of every record of a table."""
        for record, value in zip(getattr(self._tables, table), values, strict=True):
            setattr(record, field, value)


def _objects(kind: type, array: np.ndarray[Any, Any]) -> MutableSequence[Any]:
    if kind in (int, float):
        numbers: list[Any] = array.tolist()
        return numbers
    names = dtype_of(kind).names or ()
    columns = [array[name].tolist() for name in names]
    made = []
    for values in zip(*columns, strict=True):
        record = kind()
        for name, value in zip(names, values, strict=True):
            setattr(record, name, value)
        made.append(record)
    return made


def _write_back(kind: type, records: MutableSequence[Any], array: np.ndarray[Any, Any]) -> None:
    if kind in (int, float):
        array[:] = records
        return
    for name in dtype_of(kind).names or ():
        array[name] = [getattr(record, name) for record in records]
