"""Small Parquet files, and ParquetData read as some rank and worker would."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq

from recsdk_pipeline.data import ParquetData

WORKER = "recsdk_pipeline.data.stream.get_worker_info"


def write(folder: Path, columns: dict[str, Any], row_groups: Sequence[Sequence[int]]) -> str:
    """Files of row groups of these sizes, the rows in order; returns the folder."""
    table = pa.table(columns)
    folder.mkdir(parents=True, exist_ok=True)
    start = 0
    for number, sizes in enumerate(row_groups):
        with pq.ParquetWriter(folder / f"{number:03}.parquet", table.schema) as writer:
            for size in sizes:
                writer.write_table(table.slice(start, size), row_group_size=max(1, size))
                start += size
    assert start == table.num_rows
    return str(folder)


@contextmanager
def as_worker(worker: int, num_workers: int) -> Iterator[None]:
    """What is called inside believes to run in this worker."""
    info = types.SimpleNamespace(id=worker, num_workers=num_workers)
    with mock.patch(WORKER, return_value=info):
        yield


def streams_of(
    source: str, world_size: int, num_workers: int, **options: Any
) -> Iterator[tuple[ParquetData, Any]]:
    """Yield the data of each rank and worker, with a context in which it is read."""
    for rank in range(world_size):
        for worker in range(num_workers):
            data = ParquetData(source, rank=rank, world_size=world_size, **options)
            yield data, as_worker(worker, num_workers)
