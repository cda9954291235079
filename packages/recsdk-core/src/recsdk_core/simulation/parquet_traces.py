"""Traces in Parquet files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from recsdk_core.simulation.traces import Block, Trace, blocks_of


def open_parquet(path: str, choose: Callable[[list[str]], str], time: str | None) -> Trace:
    """The ids of a column of all files at `path`, row by row; `choose` is given the columns."""
    try:
        files = ds.dataset(path, format="parquet")
    except (pa.ArrowException, OSError) as error:
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
        raise kind(f"{path}: cannot be read as Parquet: {error}") from error
    ids = choose([name for name in files.schema.names if name != time])
    if not pa.types.is_integer(_inner(files.schema.field(ids).type)):
        raise TypeError(
            f"{path}: column {ids!r} holds {files.schema.field(ids).type}, not integers"
        )
    if time is not None:
        _check_time(files.schema, time, path)
    columns = [ids] if time is None else [ids, time]

    def blocks(size: int) -> Iterator[Block]:
        batches = files.to_batches(columns=columns)
        return blocks_of((_arrays(batch, time) for batch in batches), size)

    return Trace(_most_values(files, ids), time is not None, blocks)


def _check_time(schema: pa.Schema, time: str, path: str) -> None:
    if time not in schema.names:
        raise ValueError(f"{path}: there is no {time!r}; there are {', '.join(schema.names)}")
    kind = schema.field(time).type
    if not (pa.types.is_integer(kind) or pa.types.is_timestamp(kind)):
        raise TypeError(f"{path}: column {time!r} holds {kind}, not integers or timestamps")


def _most_values(files: Any, column: str) -> int:
    """Those of all rows; nulls and empty lists too where files do not say how many they have."""
    total = 0
    for fragment in files.get_fragments():
        for number in range(fragment.metadata.num_row_groups):
            group = fragment.metadata.row_group(number)
            for chunk in (group.column(index) for index in range(group.num_columns)):
                if chunk.path_in_schema.split(".")[0] == column:
                    total += chunk.num_values - _num_nulls(chunk)
    return total


def _num_nulls(chunk: Any) -> int:
    """Empty lists are nulls among the values of a column of lists."""
    statistics = chunk.statistics
    return statistics.null_count if statistics is not None and statistics.has_null_count else 0


def _inner(kind: Any) -> Any:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return kind.value_type if is_list else kind


def _arrays(batch: Any, time: str | None) -> tuple[Any, Any]:
    """Ids and times; nulls are left out."""
    column = batch.column(0)
    rows = np.arange(len(batch))
    if column.type != _inner(column.type):
        rows = pc.list_parent_indices(column).to_numpy(zero_copy_only=False)
        column = column.flatten()
    keep = column.is_valid().to_numpy(zero_copy_only=False)
    keys = column.drop_null().to_numpy(zero_copy_only=False)
    keys = np.ascontiguousarray(keys if keys.itemsize == 8 else keys.astype(np.int64))
    times = None
    if time is not None:
        when = batch.column(1)
        if when.null_count:
            raise ValueError(f"column {time!r} has a row without a time; leave such rows out")
        if pa.types.is_timestamp(when.type):
            when = when.cast(pa.timestamp("us"), safe=False)
        times = when.cast(pa.int64()).to_numpy(zero_copy_only=False)[rows[keep]]
    return keys.view(np.int64), times
