"""Teaches numba what `Tables` are: a pointer to pointers to records.

Compiled functions then take one machine word for all records of a run; `tables.calls[i]` is a
load and a multiplication, without bounds or wrap-around checks, and no reference is counted.
Indices must therefore be valid; the interpreted twin of every function checks that.
"""

# ruff: noqa: ARG001 - numba calls these hooks with its own objects
# mypy: allow-untyped-calls, allow-untyped-decorators, disable-error-code="misc, override"

import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.core.typing.templates import AttributeTemplate
from numba.extending import (
    infer_getattr,
    intrinsic,
    lower_builtin,
    lower_getattr_generic,
    lower_setattr_generic,
    models,
    register_model,
    type_callable,
)
from numba.np.numpy_support import from_dtype

_BYTE = ir.IntType(8)


class _Pointer(types.Type):
    """A machine word that points at something of a known layout."""


class RecordPointer(_Pointer):
    """Points at one record.

    Args:
        name: Short unique name of the layout.
        dtype: The layout, an aligned NumPy record type.
    """

    def __init__(self, name: str, dtype: np.dtype[Any]) -> None:
        super().__init__(name=name)
        self.dtype = dtype
        layout: Mapping[str, Any] = dtype.fields or {}
        self.fields: dict[str, tuple[Any, int]] = {
            key: (from_dtype(entry[0]), entry[1]) for key, entry in layout.items()
        }


class Rows(_Pointer):
    """Points at the first of many elements.

    Args:
        element: Type of one element: a `RecordPointer` or a number.
        size_bytes: Distance from one to the next.
    """

    def __init__(self, element: types.Type, size_bytes: int) -> None:
        super().__init__(name=f"Rows({element.name})")
        self.element = element
        self.size_bytes = size_bytes


class TablesPointer(_Pointer):
    """Points at an array of addresses, one per table, in the order of `tables`."""

    def __init__(self, tables: Mapping[str, Rows]) -> None:
        super().__init__(name="Tables")
        self.tables = dict(tables)
        self.places = {key: place for place, key in enumerate(tables)}


@register_model(RecordPointer)
@register_model(Rows)
@register_model(TablesPointer)
class _PointerModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, _BYTE.as_pointer())


@infer_getattr
class _RecordAttribute(AttributeTemplate):
    key = RecordPointer

    def generic_resolve(self, pointer: Any, attribute: Any) -> Any:
        found = pointer.fields.get(attribute)
        return None if found is None else found[0]


@infer_getattr
class _TablesAttribute(AttributeTemplate):
    key = TablesPointer

    def generic_resolve(self, pointer: Any, attribute: Any) -> Any:
        return pointer.tables.get(attribute)


def _at(builder: Any, pointer: Any, offset_bytes: Any, value_type: Any) -> Any:
    """Return a typed pointer so many bytes further on."""
    return cgutils.pointer_add(builder, pointer, offset_bytes, value_type.as_pointer())


@lower_getattr_generic(RecordPointer)
def _read_field(context: Any, builder: Any, pointer: Any, value: Any, attribute: Any) -> Any:
    field, offset = pointer.fields[attribute]
    return builder.load(_at(builder, value, offset, context.get_value_type(field)))


@lower_setattr_generic(RecordPointer)
def _write_field(context: Any, builder: Any, sig: Any, args: Any, attribute: Any) -> None:
    pointer, given = sig.args
    field, offset = pointer.fields[attribute]
    converted = context.cast(builder, args[1], given, field)
    builder.store(converted, _at(builder, args[0], offset, context.get_value_type(field)))


@lower_getattr_generic(TablesPointer)
def _read_table(context: Any, builder: Any, pointer: Any, value: Any, attribute: Any) -> Any:
    offset = 8 * pointer.places[attribute]
    return builder.load(_at(builder, value, offset, _BYTE.as_pointer()))


@type_callable(operator.getitem)
def _type_getitem(context: Any) -> Callable[..., Any]:
    def typer(rows: Any, index: Any) -> Any:
        if isinstance(rows, Rows) and isinstance(index, types.Integer):
            return rows.element
        return None

    return typer


@type_callable(operator.setitem)
def _type_setitem(context: Any) -> Callable[..., Any]:
    def typer(rows: Any, index: Any, value: Any) -> Any:
        if isinstance(rows, Rows) and isinstance(index, types.Integer):
            return types.void
        return None

    return typer


def _element(
    context: Any, builder: Any, rows: Rows, pointer: Any, index: Any, index_type: Any
) -> Any:
    word = context.cast(builder, index, index_type, types.intp)
    offset = builder.mul(word, ir.Constant(word.type, rows.size_bytes))
    return cgutils.pointer_add(builder, pointer, offset)


@lower_builtin(operator.getitem, Rows, types.Integer)
def _read_element(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    rows, index_type = sig.args
    place = _element(context, builder, rows, args[0], args[1], index_type)
    if isinstance(rows.element, RecordPointer):
        return place
    return builder.load(_at(builder, place, 0, context.get_value_type(rows.element)))


@lower_builtin(operator.setitem, Rows, types.Integer, types.Any)
def _write_element(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    rows, index_type, given = sig.args
    place = _element(context, builder, rows, args[0], args[1], index_type)
    converted = context.cast(builder, args[2], given, rows.element)
    builder.store(converted, _at(builder, place, 0, context.get_value_type(rows.element)))
    return context.get_dummy_value()


def tables_reader(pointer: TablesPointer) -> Any:
    """Return a compiled function that turns an address (int64) into `Tables`."""

    @intrinsic
    def tables_at(typing_context: Any, address: Any) -> Any:
        def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], _BYTE.as_pointer())

        return pointer(types.int64), lower

    return tables_at
