"""Filters of Parquet rows: which columns one looks at, and which rows it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

KEEP = "__recsdk_keep"
"""The column of a filter's answers."""


def check_filter(where: Any) -> None:
    """Raise TypeError for what is no filter."""
    if where is not None and not isinstance(where, ds.Expression):
        raise TypeError(
            "where must be a pyarrow.dataset expression, such as field('day') >= 20, got "
            f"{where!r:.100}"
        )


def check_answer(schema: pa.Schema, where: Any) -> None:
    """Raise TypeError for a filter that says something else of a row than whether it is kept."""
    if where is None:
        return
    kind = _answers(schema.empty_table(), where).projected_schema.field(0).type
    if not pa.types.is_boolean(kind):
        raise TypeError(f"where must be true or false of a row, got {where} of the type {kind}")


class Filter:
    """Answers of a filter beside rows. Memory: those of a record batch."""

    def __init__(self, schema: pa.Schema, columns: Sequence[str], where: Any) -> None:
        """For rows of which `columns` are in use; `schema` is the files'."""
        looked_at = [
            field.name
            for index, field in enumerate(schema)
            if not _is_bound(schema.remove(index), where)
        ]
        self._where, self._in_use = where, list(columns)
        # One at least, as a table without columns has no rows.
        self._schema = pa.schema([schema.field(name) for name in looked_at or columns[:1]])
        self.columns = list(dict.fromkeys([*columns, *looked_at]))
        """What is to be decoded."""

    def __call__(self, batch: pa.RecordBatch, path: str) -> pa.RecordBatch:
        """The columns in use and KEEP, of rows of the file at `path`, which a message names.

        Raises ValueError for what cannot be taken as the type that a column has elsewhere.
        """
        arrays = [_as(field, batch.column(field.name), path) for field in self._schema]
        table = pa.Table.from_arrays(arrays, schema=self._schema)
        answers = _answers(table, self._where).to_table().column(0).combine_chunks()
        return batch.select(self._in_use).append_column(KEEP, answers)


def _as(field: pa.Field, array: pa.Array, path: str) -> pa.Array:
    """The array in the field's type: that of a column that only a filter looks at may differ."""
    try:
        return array.cast(field.type)
    except pa.ArrowException as error:
        raise ValueError(
            f"{path}: column {field.name!r}, which the filter looks at, is {array.type}, and "
            f"cannot be taken as {field.type}, which it is in the first file: {error}; convert the "
            "files to one type"
        ) from error


def _answers(table: pa.Table, where: Any) -> Any:
    return ds.dataset(table).scanner(columns={KEEP: where}, use_threads=False)


def _is_bound(schema: pa.Schema, where: Any) -> bool:
    """Whether a filter has all columns that it looks at."""
    try:
        _answers(schema.empty_table(), where)
    except pa.ArrowInvalid:
        return False
    return True
