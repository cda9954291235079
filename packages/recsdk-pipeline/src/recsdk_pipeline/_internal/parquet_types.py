"""Types of Parquet columns: which may be ids, numbers, times and bags."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from recsdk_pipeline.data.parquet_columns import IdColumn, Mapping
from recsdk_pipeline.data.parquet_filter import KEEP

__all__ = ["check_types", "holds_bags", "holds_floats", "holds_ids", "holds_times"]

_TEXT = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_fixed_size_binary,
)
_LISTS = frozenset(
    each.id for each in (pa.list_(pa.int8()), pa.large_list(pa.int8()), pa.list_(pa.int8(), 1))
)
_NUMBERS = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_decimal)
_TIMES = (pa.types.is_integer, pa.types.is_timestamp)


def check_types(schema: pa.Schema, mapping: Mapping) -> None:
    """Raise ValueError for a column that is not there, TypeError for one of another type."""
    for column in mapping.columns():
        if column == KEEP:
            raise ValueError(f"column {KEEP!r} has the name of the filter's answer; rename it")
        if column not in schema.names:
            found = ", ".join(schema.names)
            raise ValueError(f"there is no column {column!r}; the files have {found}")
    for column in (*mapping.labels, *mapping.dense):
        _require(schema, column, _is(_NUMBERS), "numbers")
    for each in mapping.ids:
        _check_ids(schema, each)


def _check_ids(schema: pa.Schema, ids: IdColumn) -> None:
    column = str(ids.column)
    _require(schema, column, holds_ids, "integers, strings, bytes, or lists of them")
    is_bag = holds_bags(schema.field(column).type)
    for beside, kinds, what in (
        (ids.weight, _NUMBERS, "numbers"),
        (ids.timestamp, _TIMES, "integers or timestamps"),
    ):
        if beside is None:
            continue
        fits = _is(kinds)
        _require(schema, beside, lambda kind, fits=fits: fits(_inner(kind)), what)  # type: ignore[misc]
        if holds_bags(schema.field(beside).type) != is_bag:
            raise TypeError(f"columns {column!r} and {beside!r} must both be lists or neither")


def holds_floats(kind: Any) -> bool:
    """Whether a column of this type holds floating or decimal numbers."""
    return bool(pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def holds_ids(kind: Any) -> bool:
    """Whether a column of this type may be ids: integers, strings, bytes, or lists of them."""
    inner = _inner(kind)
    inner = inner.value_type if pa.types.is_dictionary(inner) else inner
    return _is((pa.types.is_integer, *_TEXT))(inner)


def holds_times(kind: Any) -> bool:
    """Whether a column of this type may be times: integers or timestamps, one a row."""
    return _is(_TIMES)(kind)


def holds_bags(kind: Any) -> bool:
    """Whether a row of a column of this type has any number of items."""
    return bool(kind.id in _LISTS)


def _require(schema: pa.Schema, column: str, fits: Callable[[Any], bool], what: str) -> None:
    kind = schema.field(column).type
    if not fits(kind):
        raise TypeError(f"column {column!r} has the type {kind}; it must hold {what}")


def _is(tests: Sequence[Callable[[Any], bool]]) -> Callable[[Any], bool]:
    return lambda kind: any(test(kind) for test in tests)


def _inner(kind: Any) -> Any:
    return kind.value_type if holds_bags(kind) else kind
