"""What is read of Parquet files and held in memory: by footers, of filters, of large row groups."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsdk_pipeline._internal import parquet_opening
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


FILTERS = [
    ds.field("day") >= 2,
    ~(ds.field("day") == 2),
    ds.field("day").is_null() | (ds.field("id") < 3),
    ds.field("day").isin([1, 3]) & (ds.field("place", "city") == "A"),
    ds.field("place", "city") != "A",
    pc.is_in(ds.field("tag"), pa.array(["x", None])),
    pc.bit_wise_and(ds.field("id"), 1) == 0,
    pc.greater(pc.add(ds.field("day"), ds.field("id")), 5),
    ds.scalar(True),
    ds.scalar(False),
]
PLACE = pa.struct([("city", pa.string())])
looked_at = st.lists(
    st.tuples(
        st.none() | st.integers(0, 4),
        st.none() | st.fixed_dictionaries({"city": st.sampled_from("AB")}),
        st.none() | st.just("x"),
    ),
    max_size=9,
)


def write_for_filters(path: str, rows: list[Any], first: int, kind: Any, num_rows: int) -> None:
    days, places, tags = zip(*rows, strict=True) if rows else ((), (), ())
    columns = {
        "id": pa.array(range(first, first + len(rows)), pa.int64()),
        "label": pa.array([1.0] * len(rows), pa.float32()),
        "day": pa.array(days, kind),
        "place": pa.array(places, PLACE),
        "tag": pa.array(tags, pa.string()),
    }
    pq.write_table(pa.table(columns), path, row_group_size=num_rows)


@given(
    files=st.lists(
        st.tuples(looked_at, st.sampled_from([pa.int8(), pa.int64()])), min_size=1, max_size=3
    ),
    where=st.sampled_from(FILTERS),
    num_rows=st.integers(1, 9),
    window_bytes=st.sampled_from([1, 300, 10**6]),
)
def test_filters_keep_the_rows_that_pyarrow_keeps(
    files: list[Any], where: Any, num_rows: int, window_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths, first = [], 0
        for number, (rows, kind) in enumerate(files):
            paths.append(f"{folder}/{number}.parquet")
            write_for_filters(paths[-1], rows, first, kind, num_rows)
            first += len(rows)
        table = ds.dataset(paths).to_table(columns=["id"], filter=where)
        read = ParquetData(
            paths,
            ids=["id"],
            labels="label",
            batch_size=3,
            shuffle=False,
            where=where,
            window_bytes=window_bytes,
        )
        found = [n for batch in read for n in batch.sparse["id"].values().tolist()]
        assert found == table.column(0).to_pylist()


def test_what_a_filter_cannot_take_as_the_type_of_the_first_file_is_named(tmp_path: Path) -> None:
    days = [pa.array([1, 2], pa.int8()), pa.array([1, 300], pa.int64())]
    for number, day in enumerate(days):
        columns = {"id": [1, 2], "label": [1.0, 1.0], "day": day}
        pq.write_table(pa.table(columns), tmp_path / f"{number}.parquet")
    data = ParquetData(
        tmp_path, ids=["id"], labels="label", batch_size=2, where=ds.field("day") >= 2
    )
    with pytest.raises(ValueError, match="1.parquet: column 'day', .* is int64, .* as int8, .*300"):
        list(data)


@pytest.mark.parametrize("where", [None, ds.field("c0") >= 0])
@pytest.mark.parametrize("far", [False, True])
def test_of_a_large_row_group_little_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: Any, far: bool
) -> None:
    numbers = np.random.default_rng(0)
    path = tmp_path / "a.parquet"
    num_rows, ids = 600_000, [f"c{n}" for n in range(8)]
    columns: dict[str, Any] = {name: numbers.integers(0, 2**62, num_rows) for name in ids}
    columns["label"] = np.ones(num_rows, np.float32)
    pq.write_table(pa.table(columns), path, row_group_size=num_rows, use_dictionary=False)
    source = f"file://{path}"
    if far:
        monkeypatch.setattr(parquet_opening, "_MOST_FAR_BYTES", 1 << 20)
        monkeypatch.setattr(parquet_opening, "_FAR_BYTES_AT_ONCE", 1 << 18)
        source = f"simplecache::file://{path}"
    data = ParquetData(
        source, ids=ids, labels="label", batch_size=5000, window_bytes=1 << 20, where=where
    )
    assert path.stat().st_size > 36 << 20
    before, most, rows = pa.total_allocated_bytes(), 0, 0
    for batch in data:
        most = max(most, pa.total_allocated_bytes() - before)
        rows += len(batch)
    assert rows == num_rows
    assert most < 12 << 20


def test_what_is_far_and_large_is_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    fs = fsspec.filesystem("memory")
    columns = {
        "id": range(3000),
        "bag": [[n] * (n % 3) for n in range(3000)],
        "label": [1.0] * 3000,
    }
    with fs.open("/parts/a.parquet", "wb") as file:
        pq.write_table(pa.table(columns), file, row_group_size=1000)
    read = {}
    for most in (1 << 30, 0):
        monkeypatch.setattr(parquet_opening, "_MOST_FAR_BYTES", most)
        data = ParquetData("memory://parts", ids=["id", "bag"], labels="label", batch_size=7)
        read[most] = [batch.sparse.values().tolist() for batch in data]
    fs.rm("/parts", recursive=True)
    assert read[0] == read[1 << 30]
    assert sum(map(len, read[0])) == 3000 + sum(n % 3 for n in range(3000))
