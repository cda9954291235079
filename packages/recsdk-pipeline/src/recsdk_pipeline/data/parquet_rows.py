"""Rows of Parquet columns as arrays: ids, dense numbers, labels; and what is wrong with them.

Shapes: N rows, K ids of one feature, C dense columns, L label columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsdk_pipeline.data.batch import ClickBatch
from recsdk_pipeline.data.examples import Float32s, IdBags
from recsdk_pipeline.data.keys import Int64s, category_keys
from recsdk_pipeline.data.parquet_columns import IdColumn, Mapping

_TEXT = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
_NUMBERS = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_decimal)
_TIMES = (pa.types.is_integer, pa.types.is_timestamp)
_MICROSECONDS = pa.timestamp("us")


@dataclass(frozen=True)
class Bags:
    """The ids of one feature, and what stands beside each."""

    values: Int64s
    """(K,)"""
    offsets: Int64s | None = None
    """(N + 1,) bag n is values[offsets[n]:offsets[n + 1]]; None: each row has one id."""
    weights: Float32s | None = None
    """(K,)"""
    timestamps: Int64s | None = None
    """(K,)"""

    def take(self, rows: Int64s) -> Bags:
        """The bags of the rows `rows`, in that order."""
        if self.offsets is None:
            return self._of(lambda items: items.take(rows), None)
        places = IdBags(values=np.arange(len(self.values)), offsets=self.offsets).take(rows)
        return self._of(lambda items: items.take(places.values), places.offsets)

    def part(self, start: int, stop: int) -> Bags:
        """The bags of the rows start..stop, without a copy of the ids."""
        if self.offsets is None:
            return self._of(lambda items: items[start:stop], None)
        offsets = self.offsets[start : stop + 1]
        first, last = int(offsets[0]), int(offsets[-1])
        return self._of(lambda items: items[first:last], offsets - first)

    def lengths(self, num_rows: int) -> Int64s:
        """(N,)"""
        return np.ones(num_rows, np.int64) if self.offsets is None else np.diff(self.offsets)

    def _of(self, pick: Callable[[Any], Any], offsets: Int64s | None) -> Bags:
        weights = None if self.weights is None else pick(self.weights)
        times = None if self.timestamps is None else pick(self.timestamps)
        return Bags(pick(self.values), offsets, weights, times)


@dataclass(frozen=True)
class Rows:
    """N rows in columns."""

    labels: Float32s
    """(N, L)"""
    dense: Float32s
    """(N, C)"""
    bags: dict[str, Bags]

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Int64s) -> Rows:
        """The rows `rows`, in that order."""
        bags = {name: each.take(rows) for name, each in self.bags.items()}
        return Rows(self.labels.take(rows, axis=0), self.dense.take(rows, axis=0), bags)

    def part(self, start: int, stop: int) -> Rows:
        """The rows start..stop, without a copy of the ids."""
        bags = {name: each.part(start, stop) for name, each in self.bags.items()}
        return Rows(self.labels[start:stop], self.dense[start:stop], bags)

    def batch(self) -> ClickBatch:
        """The same rows as a batch of tensors."""
        bags = list(self.bags.values())
        has_weights = any(each.weights is not None for each in bags)
        has_times = any(each.timestamps is not None for each in bags)
        sparse = KeyedJaggedTensor(
            keys=list(self.bags),
            values=_tensor([each.values for each in bags], np.int64),
            lengths=_tensor([each.lengths(len(self)) for each in bags], np.int64),
            weights=_tensor([_or(b, b.weights, 1.0) for b in bags], np.float32)
            if has_weights
            else None,
        )
        times = _tensor([_or(b, b.timestamps, 0) for b in bags], np.int64) if has_times else None
        labels = self.labels[:, 0] if self.labels.shape[1] == 1 else self.labels
        return ClickBatch(
            dense=torch.from_numpy(self.dense.copy()),
            sparse=sparse,
            labels=torch.from_numpy(labels.copy()),
            timestamps=times,
        )


def joined(parts: Sequence[Rows]) -> Rows:
    """The rows of all parts, at least one, one part after the other."""
    if len(parts) == 1:
        return parts[0]
    return Rows(
        np.concatenate([part.labels for part in parts]),
        np.concatenate([part.dense for part in parts]),
        {name: _joined(parts, name) for name in parts[0].bags},
    )


def rows_of(batch: pa.RecordBatch, mapping: Mapping) -> Rows:
    """The rows of a record batch in which nothing is wrong."""
    return Rows(
        _matrix(batch, mapping.labels, None),
        _matrix(batch, mapping.dense, mapping.missing),
        {each.name: _bags(batch, each) for each in mapping.ids},
    )


def problems_of(batch: pa.RecordBatch, mapping: Mapping) -> Iterator[tuple[int, str, str]]:
    """Yield (row, column, problem) of each malformed row, by its first bad column."""
    seen: set[int] = set()
    for column, problem, mask in _masks(batch, mapping):
        for row in np.flatnonzero(mask).tolist():
            if row not in seen:
                seen.add(row)
                yield row, column, problem


def check_types(schema: pa.Schema, mapping: Mapping) -> None:
    """Raise ValueError for a column that is not there, TypeError for one of another type."""
    for column in mapping.columns():
        if column not in schema.names:
            found = ", ".join(schema.names)
            raise ValueError(f"there is no column {column!r}; the files have {found}")
    for column in (*mapping.labels, *mapping.dense):
        _require(schema, column, _is(_NUMBERS), "numbers")
    for each in mapping.ids:
        _check_ids(schema, each)


def _check_ids(schema: pa.Schema, ids: IdColumn) -> None:
    column = str(ids.column)
    _require(schema, column, _is_ids, "integers, strings, bytes, or lists of them")
    is_bag = _is_list(schema.field(column).type)
    for beside, kinds, what in (
        (ids.weight, _NUMBERS, "numbers"),
        (ids.timestamp, _TIMES, "integers or timestamps"),
    ):
        if beside is None:
            continue
        fits = _is(kinds)
        _require(schema, beside, lambda kind, fits=fits: fits(_inner(kind)), what)  # type: ignore[misc]
        if _is_list(schema.field(beside).type) != is_bag:
            raise TypeError(f"columns {column!r} and {beside!r} must both be lists or neither")


def _require(schema: pa.Schema, column: str, fits: Callable[[Any], bool], what: str) -> None:
    kind = schema.field(column).type
    if not fits(kind):
        raise TypeError(f"column {column!r} has the type {kind}; it must hold {what}")


def _is(tests: Sequence[Callable[[Any], bool]]) -> Callable[[Any], bool]:
    return lambda kind: any(test(kind) for test in tests)


def _is_list(kind: Any) -> bool:
    return _is(_LISTS)(kind)


def _inner(kind: Any) -> Any:
    return kind.value_type if _is_list(kind) else kind


def _is_ids(kind: Any) -> bool:
    inner = _inner(kind)
    inner = inner.value_type if pa.types.is_dictionary(inner) else inner
    return _is((pa.types.is_integer, *_TEXT))(inner)


def _masks(batch: pa.RecordBatch, mapping: Mapping) -> Iterator[tuple[str, str, Any]]:
    """(column, problem, which rows (N,)) of all that may be wrong, only where some row is."""
    for name in (*mapping.labels, *mapping.dense):
        array = batch.column(name)
        if array.null_count and (name in mapping.labels or mapping.missing is None):
            yield name, "the number is missing", _nulls(array)
        yield from _infinite(name, array, lambda found: found)
    for each in mapping.ids:
        assert each.column is not None
        ids = batch.column(each.column)
        yield from _null_items(each.column, ids)
        for beside in (name_ for name_ in (each.weight, each.timestamp) if name_):
            yield from _beside_masks(batch, ids, each.column, beside, beside == each.weight)


def _beside_masks(
    batch: pa.RecordBatch, ids: Any, ids_name: Any, name: str, is_weight: bool
) -> Iterator[tuple[str, str, Any]]:
    array = batch.column(name)
    differs = _lengths(array) != _lengths(ids)
    if differs.any():
        yield name, f"its length is not that of {ids_name}", differs
    yield from _null_items(name, array)
    if is_weight:
        yield from _infinite(name, _items(array), lambda found: _owners(array, found))


def _infinite(name: str, items: Any, rows: Callable[[Any], Any]) -> Iterator[tuple[str, str, Any]]:
    if not pa.types.is_floating(items.type) and not pa.types.is_decimal(items.type):
        return
    found = ~np.isfinite(_floats(items, 0.0))
    if found.any():
        yield name, "the number is not finite as float32", rows(found)


def _null_items(name: Any, array: Any) -> Iterator[tuple[str, str, Any]]:
    if _is_list(array.type) and (items := array.flatten()).null_count:
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
    if array.null_count and missing is not None:
        array = pc.fill_null(array, pa.scalar(missing).cast(array.type, safe=False))
    values: Float32s = pc.cast(array, pa.float32(), safe=False).to_numpy(zero_copy_only=False)
    return values


def _matrix(batch: pa.RecordBatch, names: Sequence[str], missing: float | None) -> Float32s:
    matrix = np.empty((batch.num_rows, len(names)), np.float32)
    for index, name in enumerate(names):
        matrix[:, index] = _floats(batch.column(name), missing)
    return matrix


def _lengths(array: Any) -> Int64s:
    """Items of each row (N,); a null is an empty bag."""
    if not _is_list(array.type):
        return array.is_valid().to_numpy(zero_copy_only=False).astype(np.int64)  # type: ignore[no-any-return]
    lengths = pc.fill_null(pc.list_value_length(array), 0)
    return lengths.to_numpy(zero_copy_only=False).astype(np.int64)  # type: ignore[no-any-return]


def _items(array: Any) -> Any:
    """The items of all rows (K,)."""
    if _is_list(array.type):
        return array.flatten()
    return array.drop_null() if array.null_count else array


def _bags(batch: pa.RecordBatch, spec: IdColumn) -> Bags:
    array = batch.column(spec.column)
    ids = _keys(_items(array), spec.space or spec.name)
    is_single = not _is_list(array.type) and not array.null_count
    offsets = None if is_single else IdBags.of_lengths(ids, _lengths(array)).offsets
    weights = None if spec.weight is None else _floats(_items(batch.column(spec.weight)), None)
    times = None if spec.timestamp is None else _times(_items(batch.column(spec.timestamp)))
    return Bags(ids, offsets, weights, times)


def _times(array: Any) -> Int64s:
    if pa.types.is_timestamp(array.type):
        array = array.cast(_MICROSECONDS, safe=False)
    return array.cast(pa.int64()).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _keys(array: Any, space: str) -> Int64s:
    """Ids (K,): integers as they are, the rest hashed as `category_keys` does."""
    if pa.types.is_dictionary(array.type):
        which: Int64s = array.indices.to_numpy(zero_copy_only=False)
        return _keys(array.dictionary, space)[which]
    if pa.types.is_integer(array.type):
        numbers = array.to_numpy(zero_copy_only=False)
        ids: Int64s = numbers.view(np.int64) if numbers.itemsize == 8 else numbers.astype(np.int64)
        return ids
    return category_keys(space, array)


def _joined(parts: Sequence[Rows], name: str) -> Bags:
    bags = [part.bags[name] for part in parts]
    offsets = None
    if any(each.offsets is not None for each in bags):
        lengths = [each.lengths(len(part)) for each, part in zip(bags, parts, strict=True)]
        offsets = IdBags.of_lengths(bags[0].values, np.concatenate(lengths)).offsets
    return Bags(
        np.concatenate([each.values for each in bags]),
        offsets,
        _concatenated([each.weights for each in bags]),
        _concatenated([each.timestamps for each in bags]),
    )


def _concatenated(arrays: list[Any]) -> Any:
    return None if arrays[0] is None else np.concatenate(arrays)


def _or(bags: Bags, values: Any, default: float) -> Any:
    return np.full(len(bags.values), default) if values is None else values


def _tensor(parts: Sequence[Any], dtype: Any) -> torch.Tensor:
    whole = np.concatenate(parts) if parts else np.empty(0)
    return torch.from_numpy(whole.astype(dtype, copy=False))
