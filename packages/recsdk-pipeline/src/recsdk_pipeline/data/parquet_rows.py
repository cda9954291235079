"""Rows of Parquet columns as arrays: ids, dense numbers, labels; and what is wrong with them.

Shapes: N rows, K ids of one feature, C dense columns, L label columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsdk_core import interleave
from recsdk_pipeline._internal.parquet_types import holds_bags
from recsdk_pipeline.data.examples import Float32s, offsets_of
from recsdk_pipeline.data.keys import Int64s, category_keys
from recsdk_pipeline.data.lines import BadLine
from recsdk_pipeline.data.memory import empty, taken
from recsdk_pipeline.data.parquet_columns import IdColumn, Mapping
from recsdk_pipeline.data.parquet_filter import KEEP
from recsdk_pipeline.data.rows import Bags, Rows

_FLOAT32 = pa.float32().id
_EIGHT_BYTES = frozenset((pa.int64().id, pa.uint64().id))
_MICROSECONDS = pa.timestamp("us")
_MISSING_DENSE = "the number is missing; missing_dense=0.0 of ParquetData reads it as 0"


Arrays: TypeAlias = "dict[str, Any] | pa.RecordBatch"
"""The columns of N rows, by name."""


def good_rows(
    batch: pa.RecordBatch, columns: Mapping, path: str, start: int, bad: list[BadLine]
) -> Rows:
    """The rows that pass the filter and have no problem; the others' errors go to `bad`."""
    numbers: Any = range(start, start + len(batch))
    arrays = _arrays(batch)
    if KEEP in arrays:
        keep = arrays[KEEP].fill_null(False)
        numbers = start + np.flatnonzero(keep.to_numpy(zero_copy_only=False))
        batch = batch.filter(keep)
        arrays = _arrays(batch)
    found = _Numbers.of(arrays, columns)
    problems = sorted(problems_of(arrays, columns, are_finite=found.are_finite))
    if problems:
        is_good = np.ones(len(batch), bool)
        is_good[[row for row, _, _ in problems]] = False
        bad += [
            BadLine(path, int(numbers[row]), column, problem, noun="row")
            for row, column, problem in problems
        ]
        arrays = _arrays(batch.filter(pa.array(is_good)))
        found = _Numbers.of(arrays, columns)
    bags = {each.name: bags_of(arrays, each) for each in columns.ids}
    return Rows(found.labels, found.dense, bags)


def _arrays(batch: pa.RecordBatch) -> dict[str, Any]:
    """Its columns, each of which is made but once: of many small batches that is felt."""
    return dict(zip(batch.schema.names, batch.columns, strict=True))


@dataclass(frozen=True)
class _Numbers:
    labels: Float32s
    """(N, L)"""
    dense: Float32s
    """(N, C)"""
    are_finite: bool
    """Whether all are; a null that is malformed is not."""

    @classmethod
    def of(cls, arrays: Arrays, mapping: Mapping) -> _Numbers:
        labels, labels_are_finite = _matrix(arrays, mapping.labels, None)
        if not mapping.dense:
            return cls(labels, np.empty((len(labels), 0), np.float32), labels_are_finite)
        dense, dense_is_finite = _matrix(arrays, mapping.dense, mapping.missing)
        return cls(labels, dense, labels_are_finite and dense_is_finite)


def problems_of(
    arrays: Arrays, mapping: Mapping, *, are_finite: bool = False
) -> Iterator[tuple[int, str, str]]:
    """Yield (row, column, problem) of each malformed row, by its first bad column.

    With `are_finite`, nobody looks at the labels and dense numbers.
    """
    seen: set[int] = set()
    beside = () if are_finite else _masks_of_numbers(arrays, mapping)
    for column, problem, mask in chain(beside, _masks_of_ids(arrays, mapping)):
        for row in np.flatnonzero(mask).tolist():
            if row not in seen:
                seen.add(row)
                yield row, column, problem


def _masks_of_numbers(arrays: Arrays, mapping: Mapping) -> Iterator[tuple[str, str, Any]]:
    """(column, problem, which rows (N,)) of all that may be wrong, only where some row is."""
    for name in (*mapping.labels, *mapping.dense):
        array = arrays[name]
        if name in mapping.labels and array.null_count:
            yield name, "the number is missing", _nulls(array)
        elif mapping.missing is None and array.null_count:
            yield name, _MISSING_DENSE, _nulls(array)
        yield from _infinite(name, array, lambda found: found)


def _masks_of_ids(arrays: Arrays, mapping: Mapping) -> Iterator[tuple[str, str, Any]]:
    """The same."""
    for each in mapping.ids:
        assert each.column is not None
        ids = arrays[each.column]
        if _is_plain(ids) and each.weight is None and each.timestamp is None:
            continue
        yield from _null_items(each.column, ids)
        for beside in (name_ for name_ in (each.weight, each.timestamp) if name_):
            yield from _beside_masks(arrays, ids, each.column, beside, beside == each.weight)


def _beside_masks(
    arrays: Arrays, ids: Any, ids_name: Any, name: str, is_weight: bool
) -> Iterator[tuple[str, str, Any]]:
    array = arrays[name]
    differs = _lengths(array) != _lengths(ids)
    if differs.any():
        yield name, f"its length is not that of {ids_name}", differs
    yield from _null_items(name, array)
    if is_weight:
        yield from _infinite(name, _items(array), lambda found: _owners(array, found))


def _infinite(name: str, items: Any, rows: Callable[[Any], Any]) -> Iterator[tuple[str, str, Any]]:
    if not pa.types.is_floating(items.type) and not pa.types.is_decimal(items.type):
        return
    floats = _floats(items, 0.0)
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(floats.sum()):  # then there is no null, at a third of the cost
            return
    found = ~np.isfinite(floats)
    if found.any():
        yield name, "the number is not finite as float32", rows(found)


def _null_items(name: Any, array: Any) -> Iterator[tuple[str, str, Any]]:
    if holds_bags(array.type) and (items := array.flatten()).null_count:
        yield name, "a bag has a null", _owners(array, _nulls(items))


def _owners(array: Any, found: Any) -> Any:
    """Which rows (N,) the items in `found` (K,) belong to."""
    lengths = _lengths(array)
    mask = np.zeros(len(lengths), bool)
    mask[np.repeat(np.arange(len(lengths)), lengths)[found]] = True
    return mask


def _nulls(array: Any) -> Any:
    return array.is_null().to_numpy(zero_copy_only=False)


def _floats(array: Any, missing: float | None) -> Float32s:
    floats = array if array.type.id == _FLOAT32 else pc.cast(array, pa.float32(), safe=False)
    if floats.null_count and missing is not None:
        floats = pc.fill_null(floats, pa.scalar(missing, pa.float32()))
    values: Float32s = floats.to_numpy(zero_copy_only=False)
    return values


def _matrix(arrays: Arrays, names: Sequence[str], missing: float | None) -> tuple[Float32s, bool]:
    """The columns (N, C), at least one, and whether all numbers are finite."""
    columns = [_floats(arrays[name], missing) for name in names]
    matrix = empty((len(columns[0]), len(columns)), np.float32)
    return matrix, interleave(columns, matrix)


def _lengths(array: Any) -> Int64s:
    """Items of each row (N,); a null is an empty bag."""
    if not holds_bags(array.type):
        return array.is_valid().to_numpy(zero_copy_only=False).astype(np.int64)  # type: ignore[no-any-return]
    lengths = pc.fill_null(pc.list_value_length(array), 0)
    return lengths.to_numpy(zero_copy_only=False).astype(np.int64)  # type: ignore[no-any-return]


def _items(array: Any) -> Any:
    """The items of all rows (K,)."""
    if holds_bags(array.type):
        return array.flatten()
    return array.drop_null() if array.null_count else array


def bags_of(arrays: Arrays, spec: IdColumn) -> Bags:
    """The ids of a feature, whose `column` is given; a bag has no null."""
    assert spec.column is not None
    array = arrays[spec.column]
    if _is_plain(array) and spec.weight is None and spec.timestamp is None:
        return Bags(array.to_numpy().view(np.int64))
    ids = _keys(_items(array), spec.space or spec.name)
    weights = None if spec.weight is None else _floats(_items(arrays[spec.weight]), None)
    times = None if spec.timestamp is None else times_of(_items(arrays[spec.timestamp]))
    if holds_bags(array.type):
        return Bags(ids, offsets_of(_lengths(array)), weights, times)
    if not array.null_count:
        return Bags(ids, None, weights, times)
    there = array.is_valid().to_numpy(zero_copy_only=False)
    ids, weights, times = (_spread(each, there) for each in (ids, weights, times))
    return Bags(ids, None, weights, times, there)


def _is_plain(array: Any) -> bool:
    """Whether the ids lie as they are in batches. It is asked of every column and batch."""
    return array.type.id in _EIGHT_BYTES and not array.null_count


def _spread(items: Any, there: Any) -> Any:
    """A place for each row (N,), of items of those that are there."""
    if items is None:
        return None
    places = np.zeros(len(there), items.dtype)
    places[there] = items
    return places


def times_of(array: Any) -> Int64s:
    """Integers as they are, timestamps in microseconds."""
    if pa.types.is_timestamp(array.type):
        array = array.cast(_MICROSECONDS, safe=False)
    return array.cast(pa.int64()).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _keys(array: Any, space: str) -> Int64s:
    """Ids (K,): integers as they are, the rest hashed as `category_keys` does."""
    if pa.types.is_dictionary(array.type):
        values, which = array.dictionary, array.indices
        if len(values) > len(which):
            return _keys(values.take(which), space)
        rows = which.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
        return taken(_keys(values, space), rows)  # type: ignore[no-any-return]
    if pa.types.is_integer(array.type):
        numbers = array.to_numpy(zero_copy_only=False)
        ids: Int64s = numbers.view(np.int64) if numbers.itemsize == 8 else numbers.astype(np.int64)
        return ids
    return category_keys(space, array)
