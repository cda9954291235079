"""Reading Parquet: ParquetData beside pyarrow alone, which decodes the same columns and no more.

The files are Criteo's in shape: 26 ids, 13 numbers and a label a row, packed by snappy, ids drawn
by power law. Both read all rows; ours also hashes strings, shuffles and makes batches of tensors.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from torch.utils.data import DataLoader

from benchmarks import records
from recsdk_pipeline.data import ParquetData

NUM_IDS, NUM_DENSE = 26, 13
IDS = [f"C{n}" for n in range(1, NUM_IDS + 1)]
DENSE = [f"I{n}" for n in range(1, NUM_DENSE + 1)]
ROWS_A_GROUP = 100_000
BATCH_SIZE = 4096
REPETITIONS = 7


def write(folder: Path, num_rows: int, *, as_text: bool) -> str:
    """Two files of `num_rows` rows together."""
    generator = np.random.default_rng(0)
    for number in range(2):
        size = num_rows // 2
        columns: dict[str, Any] = {"label": generator.integers(0, 2, size).astype(np.float32)}
        for name in DENSE:
            columns[name] = generator.normal(size=size).astype(np.float32)
        for name in IDS:
            ids = generator.zipf(1.2, size).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            columns[name] = [f"{i >> 32:08x}" for i in ids.tolist()] if as_text else ids
        path = folder / f"{number}.parquet"
        pq.write_table(pa.table(columns), path, row_group_size=ROWS_A_GROUP)
    return str(folder)


def ours(source: str, **options: Any) -> ParquetData:
    return ParquetData(
        source, ids=IDS, dense=DENSE, labels="label", batch_size=BATCH_SIZE, **options
    )


def pyarrow_alone(source: str) -> Callable[[], None]:
    def run() -> None:
        for _ in ds.dataset(source).to_batches(columns=["label", *DENSE, *IDS]):
            pass

    return run


def read(batches: Any) -> Callable[[], None]:
    def run() -> None:
        for _ in batches:
            pass

    return run


def loader(source: str, num_workers: int) -> Any:
    """Its workers are started once, before the repetitions that count."""
    return DataLoader(
        ours(source), batch_size=None, num_workers=num_workers, persistent_workers=True
    )


def run(quick: bool) -> list[records.Record]:
    num_rows = 400_000 if quick else 2_000_000
    found = []
    for kind, as_text in (("int64", False), ("text", True)):
        with tempfile.TemporaryDirectory() as folder:
            source = write(Path(folder), num_rows, as_text=as_text)
            workload = f"criteo_like_{kind}_{num_rows}"
            contestants = {
                "ours": read(ours(source)),
                "ours, in order": read(ours(source, shuffle=False)),
                "pyarrow alone": pyarrow_alone(source),
            }
            times = records.race(contestants, 3 if quick else REPETITIONS)
            found.append(records.record_of(workload, "read", "ms", "ours", times))
            workers = {f"{n} workers": read(loader(source, n)) for n in (2, 1)}
            times = records.race(workers, 3 if quick else REPETITIONS)
            found.append(records.record_of(workload, "workers", "ms", "2 workers", times))
    return found
