"""Windows: memory stays within what they promise, and nobody waits for one that nobody wants."""

from __future__ import annotations

import itertools
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsdk_pipeline.data import CriteoData, FileData, ParquetData
from recsdk_pipeline.data.dealing import Piece
from sampling import crossed

WINDOW = 4 << 20
GROUP_ROWS = 10_000
COLUMNS = [f"c{n}" for n in range(10)]
GROUP = 8 * GROUP_ROWS * (len(COLUMNS) + 1)  # bytes, decoded
BATCH = 1000


def parquet(folder: Path, num_groups: int, num_threads: int | None = None) -> FileData:
    path = folder / f"{num_groups}.parquet"
    generator = np.random.default_rng(0)
    schema = pa.schema([*((name, pa.int64()) for name in COLUMNS), ("label", pa.float64())])
    with pq.ParquetWriter(path, schema) as writer:
        for _ in range(num_groups):
            columns = [pa.array(generator.integers(0, 1 << 60, GROUP_ROWS)) for _ in COLUMNS]
            labels = pa.array(np.zeros(GROUP_ROWS))
            writer.write_table(pa.table([*columns, labels], schema=schema))
    return ParquetData(
        str(path),
        ids=COLUMNS,
        labels="label",
        batch_size=BATCH,
        window_bytes=WINDOW,
        num_threads=num_threads,
    )


def criteo(folder: Path, num_groups: int, num_threads: int | None = None) -> FileData:
    path = folder / f"{num_groups}.tsv"
    line = "\t".join(["1", *["31"] * 13, *["0a1b2c3d"] * 26]) + "\n"
    path.write_text(line * (num_groups * GROUP // len(line)))
    return CriteoData(path, batch_size=BATCH, window_bytes=WINDOW, num_threads=num_threads)


@pytest.fixture
def arrow() -> Iterator[pa.MemoryPool]:
    """A pool that Arrow takes its memory from meanwhile, so that its peak is the test's."""
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(pa.system_memory_pool())
    pa.set_memory_pool(pool)
    yield pool
    pa.set_memory_pool(before)


@pytest.mark.parametrize(("make", "num_threads"), crossed((parquet, criteo), (None, 1, 3), size=3))
def test_memory_stays_within_the_windows_of_all_threads(
    tmp_path: Path,
    arrow: pa.MemoryPool,
    make: Callable[[Path, int, int | None], FileData],
    num_threads: int | None,
) -> None:
    windows = 3 if num_threads is None else 1 + 2 * num_threads
    data = make(tmp_path, 20 + 20 * (num_threads or 1), num_threads)
    sizes = []
    tracemalloc.start()
    try:
        sizes = [len(batch) for batch in data]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    row = 8 * (len(data.features) + 1)
    assert sum(sizes) * row > (windows + 2) * WINDOW  # else it fitted without windows
    batch = 2 * BATCH * 8 * 60
    assert peak + arrow.max_memory() <= windows * WINDOW + batch


def test_an_iterator_left_behind_waits_for_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = parquet(tmp_path, 10)
    is_wanted, is_let_go = threading.Event(), threading.Event()
    source = type(data._source)
    reader = source.reader
    [windows] = data._plan(0).streams(data._layers, data._here()[0])
    begun = itertools.count(1)  # pieces, over all threads; each has a reader of its own

    def slow(self: Any, *, threads: bool) -> Callable[[Piece], Any]:
        read = reader(self, threads=threads)

        def wait(piece: Piece) -> Any:
            if next(begun) > len(windows[0].pieces):
                is_wanted.set()
                is_let_go.wait()
            return read(piece)

        return wait

    monkeypatch.setattr(source, "reader", slow)
    batches: Any = iter(data)
    next(batches)
    assert is_wanted.wait(60)  # the window ahead is being read, and does not end
    left: list[Any] = [batches]
    del batches
    letting_go = threading.Thread(target=left.clear, daemon=True)
    letting_go.start()
    letting_go.join(60)
    is_blocked = letting_go.is_alive()
    is_let_go.set()
    assert not is_blocked
