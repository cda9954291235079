"""Traces in Parquet files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from recsdk_core.columns import hash_strings
from recsdk_core.simulation.traces import Block, Trace, as_companion, blocks_of


def open_parquet(path: str, choose: Callable[[list[str]], str], wanted: Mapping[str, str]) -> Trace:
    """The ids of a column of all files at `path`, row by row; `choose` is given the columns.

    Text is hashed to ids.
    `wanted` names the columns of what comes with them.
    """
    try:
        files = ds.dataset(path, format="parquet")
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{path}: there is no such file; look at the path for mistakes"
        ) from error
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{path}: must be a .npz file, a .json file of recsdk data describe, or Parquet, and "
            f"cannot be read as Parquet: {error}"
        ) from error
    ids = choose([name for name in files.schema.names if name not in wanted.values()])
    kind = files.schema.field(ids).type
    if not (pa.types.is_integer(_inner(kind)) or _is_text(_inner(kind))):
        raise TypeError(f"{path}: column {ids!r} holds {kind}, not integers or text")
    for what, name in wanted.items():
        _check_companion(files.schema, what, name, path)
    columns = list(dict.fromkeys([ids, *wanted.values()]))

    def blocks(size: int) -> Iterator[Block]:
        batches = _batches(files, columns, path)
        return blocks_of((_arrays(batch, wanted, path) for batch in batches), size)

    return Trace(_most_values(files, ids), frozenset(wanted), blocks)


def _batches(files: Any, columns: Sequence[str], path: str) -> Iterator[Any]:
    try:
        yield from files.to_batches(columns=columns)
    except (pa.ArrowException, OSError) as error:
        raise OSError(f"{path}: cannot be read; was it changed or cut off? {error}") from error


def _check_companion(schema: pa.Schema, what: str, name: str, path: str) -> None:
    if name not in schema.names:
        raise ValueError(f"{path}: there is no {name!r}; there are {', '.join(schema.names)}")
    kind = schema.field(name).type
    also = {
        "times": (pa.types.is_timestamp, "integers or timestamps"),
        "scores": (pa.types.is_floating, "numbers"),
        "clicks": (pa.types.is_boolean, "integers or truth values"),
    }
    is_other, taken = also[what]
    if not (pa.types.is_integer(kind) or is_other(kind)):
        raise TypeError(f"{path}: column {name!r} holds {kind}, not {taken}")


def _most_values(files: Any, column: str) -> int:
    """Those of all rows; nulls and empty lists too where files do not say how many they have."""
    total = 0
    # Names may have dots: only the path of a list's values begins with its own and goes on.
    is_list = files.schema.field(column).type != _inner(files.schema.field(column).type)
    for fragment in files.get_fragments():
        for number in range(fragment.metadata.num_row_groups):
            group = fragment.metadata.row_group(number)
            for chunk in (group.column(index) for index in range(group.num_columns)):
                path = chunk.path_in_schema
                if path.startswith(f"{column}.") if is_list else path == column:
                    total += chunk.num_values - _num_nulls(chunk)
    return total


def _num_nulls(chunk: Any) -> int:
    """Empty lists are nulls among the values of a column of lists."""
    statistics = chunk.statistics
    return statistics.null_count if statistics is not None and statistics.has_null_count else 0


def _inner(kind: Any) -> Any:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return kind.value_type if is_list else kind


def _is_text(kind: Any) -> bool:
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary)
    return any(test(kind) for test in (*tests, pa.types.is_large_binary))


def _keys(column: Any) -> Any:
    """The ids int64 (N,) of a column without nulls: integers as they are, text hashed."""
    if _is_text(column.type):
        column = column.cast(pa.large_binary())
        _, offsets, text = column.buffers()
        count = len(column) + 1 if len(column) else 0
        return hash_strings(
            np.frombuffer(text or b"", np.uint8),
            np.frombuffer(offsets, np.int64, count, 8 * column.offset)
            if count
            else np.zeros(1, int),
        )
    keys = column.to_numpy(zero_copy_only=False)
    return np.ascontiguousarray(keys if keys.itemsize == 8 else keys.astype(np.int64))


def _arrays(batch: Any, wanted: Mapping[str, str], path: str) -> Block:
    """Ids and what comes with them; nulls are left out."""
    column = batch.column(0)
    rows = np.arange(len(batch))
    if column.type != _inner(column.type):
        rows = pc.list_parent_indices(column).to_numpy(zero_copy_only=False)
        column = column.flatten()
    keep = column.is_valid().to_numpy(zero_copy_only=False)
    keys = _keys(column.drop_null())
    data = {what: _of_rows(batch, what, name, path)[rows[keep]] for what, name in wanted.items()}
    return keys.view(np.int64), data


def _of_rows(batch: Any, what: str, name: str, path: str) -> Any:
    values = batch.column(name)
    if values.null_count:
        raise ValueError(f"{path}: column {name!r} has a row without {what}; leave such rows out")
    if pa.types.is_timestamp(values.type):
        values = values.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
    return as_companion(what, values.to_numpy(zero_copy_only=False))
