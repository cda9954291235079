"""What windows take of memory, as the footers of Parquet files tell it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given
from hypothesis import strategies as st

from recsdk_pipeline.data import ParquetData
from recsdk_pipeline.data.dealing import Piece
from recsdk_pipeline.data.parquet_files import find_files

NUM_ROWS = 5
OF_EACH_KIND: list[Any] = [
    pa.array(range(NUM_ROWS)),
    pa.array([[n] * n for n in range(NUM_ROWS)]),
    pa.array([{"b": n, "b.c": [n] * n, "c": {"d": "x"}} for n in range(NUM_ROWS)]),
    pa.array([[("key", n)] for n in range(NUM_ROWS)], pa.map_(pa.string(), pa.int64())),
    pa.array(["x", "y", "x", None, "y"]).dictionary_encode(),
    pa.array([bytes([n] * 16) for n in range(NUM_ROWS)], pa.uuid()),
    pa.FixedShapeTensorArray.from_numpy_ndarray(np.zeros((NUM_ROWS, 2, 2), np.float32)),
    pa.nulls(NUM_ROWS),
]


def bytes_of(columns: dict[str, Any], used: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "a.parquet")
        pq.write_table(pa.table(columns), path)
        (group,) = find_files(path, used, None, {}).groups
        return group.bytes


@given(
    columns=st.dictionaries(
        st.sampled_from(["a", "a.b", "a.b.c", "a.c.d", "b", "b.c"]),
        st.sampled_from(OF_EACH_KIND),
        min_size=1,
    ),
    data=st.data(),
)
def test_each_column_in_use_counts_and_no_other(columns: dict[str, Any], data: Any) -> None:
    used = data.draw(st.lists(st.sampled_from(sorted(columns)), unique=True))
    alone = [bytes_of({"x": columns[name]}, ["x"]) for name in used]
    assert bytes_of(columns, used) == sum(alone)


def test_windows_of_columns_with_dots_in_their_names_keep_to_their_size(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    columns = {"f.y": np.zeros(2000), "f.a": np.arange(2000), "f.b": np.arange(2000)}
    pq.write_table(pa.table(columns), path, row_group_size=10)
    data = ParquetData(
        str(path), ids=["f.a", "f.b"], labels="f.y", batch_size=100, window_bytes=4800
    )
    # Shuffled together are the rows of a window, which is a hundred: ten row groups.
    for batch in data:
        assert len({id_ // 10 for id_ in batch.sparse["f.a"].values().tolist()}) == 10


def test_a_row_group_that_was_read_leaves_no_memory_of_its_decoder(tmp_path: Path) -> None:
    path, num_rows = tmp_path / "a.parquet", 20_000
    ids = np.random.default_rng(0).integers(0, 1 << 60, num_rows)
    pq.write_table(pa.table({"id": ids, "y": np.zeros(num_rows, np.float32)}), path)
    data = ParquetData(str(path), ids=["id"], labels="y", batch_size=100)
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(pa.system_memory_pool())
    pa.set_memory_pool(pool)
    try:
        read = data._source.reader(threads=False)
        assert sum(len(rows) for rows, _ in read(Piece(0, 0, num_rows))) == num_rows
        assert pool.max_memory() > 8 * num_rows
        assert pool.bytes_allocated() < 8 * num_rows / 10
    finally:
        pa.set_memory_pool(before)
