"""What Parquet columns become in batches, and what is refused or malformed."""

from __future__ import annotations

import datetime
import itertools
import math
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_support import parquet

from recsdk_pipeline.data import (
    BadLine,
    BadLines,
    IdColumn,
    ParquetData,
    category_key,
    category_keys,
)

int64s = st.integers(-(2**63), 2**63 - 1)
bags_of_text = st.none() | st.lists(st.text(max_size=40), max_size=4)
rows = st.fixed_dictionaries(
    {
        "signed": int64s | st.none(),
        "unsigned": st.integers(0, 2**64 - 1),
        "text": st.text(max_size=9) | st.none(),
        "raw": st.binary(max_size=9),
        "bag": bags_of_text,
        "numbers": st.lists(int64s, max_size=3),
        "x": st.floats(-100, 100, width=32),
        "n": st.integers(-100, 100),
        "label": st.booleans(),
    }
)
TYPES = {
    "signed": pa.int64(),
    "unsigned": pa.uint64(),
    "text": pa.string(),
    "raw": pa.binary(),
    "bag": pa.list_(pa.large_string()),
    "numbers": pa.large_list(pa.int64()),
    "x": pa.float32(),
    "n": pa.int16(),
    "label": pa.bool_(),
}


def as_int64(number: int) -> int:
    return number - ((number >> 63) << 64) if number > 0 else number


def bags_of(batch: Any, name: str) -> list[list[int]]:
    feature = batch.sparse[name]
    ends = feature.offsets().tolist()
    values = feature.values().tolist()
    return [values[start:end] for start, end in itertools.pairwise(ends)]


def keys(space: str, values: list[str]) -> list[int]:
    found: list[int] = category_keys(space, values).tolist()
    return found


def model_of(row: dict[str, Any]) -> dict[str, list[int]]:
    """The bags that a row must become."""
    return {
        "signed": [] if row["signed"] is None else [row["signed"]],
        "unsigned": [as_int64(row["unsigned"])],
        "text": [] if row["text"] is None else keys("text", [row["text"]]),
        "raw": keys("raw", [row["raw"].decode("latin1")]) if row["raw"].isascii() else [],
        "bag": keys("words", row["bag"] or []),
        "again": keys("words", row["bag"] or []),
        "numbers": row["numbers"],
    }


@settings(max_examples=2 * settings().max_examples)
@given(
    given_rows=st.lists(rows, max_size=12),
    batch_size=st.integers(1, 5),
    window_bytes=st.sampled_from([1, 300, 10**6]),
    is_dictionary=st.booleans(),
)
def test_rows_come_back(
    given_rows: list[dict[str, Any]], batch_size: int, window_bytes: int, is_dictionary: bool
) -> None:
    columns = {n: pa.array([row[n] for row in given_rows], t) for n, t in TYPES.items()}
    if is_dictionary:
        columns["text"] = columns["text"].dictionary_encode()
    ids = ["signed", "unsigned", "text", "raw", IdColumn(name="bag", space="words")]
    ids += [IdColumn(name="again", column="bag", space="words"), "numbers"]
    with tempfile.TemporaryDirectory() as folder:
        source = parquet.write(Path(folder), columns, [[len(given_rows)]])
        data = ParquetData(
            source,
            ids=ids,
            dense=["x", "n"],
            labels="label",
            batch_size=batch_size,
            window_bytes=window_bytes,
            shuffle=False,
        )
        batches = list(data)
    assert data.num_rows == len(given_rows)
    assert [len(b) for b in batches[:-1]] == [batch_size] * (len(batches) - 1)
    start = 0
    for batch in batches:
        part = given_rows[start : start + len(batch)]
        start += len(batch)
        assert batch.labels.tolist() == [float(row["label"]) for row in part]
        assert batch.dense.tolist() == [[row["x"], float(row["n"])] for row in part]
        for name in data.features:
            expected = [model_of(row)[name] for row in part]
            found = bags_of(batch, name)
            if name == "raw":  # the model can say only what is text
                is_text = [row["raw"].isascii() for row in part]
                assert [b for b, t in zip(found, is_text, strict=True) if t] == [
                    b for b, t in zip(expected, is_text, strict=True) if t
                ]
            else:
                assert found == expected
    assert start == len(given_rows)


def test_weights_and_timestamps_stand_beside_ids(tmp_path: Path) -> None:
    columns = {
        "plain": pa.array([1, 2, 3]),
        "bag": pa.array([[4, 5], [], [6]], pa.list_(pa.int64())),
        "weight": pa.array([[0.5, 2.0], None, [3.0]], pa.list_(pa.float64())),
        "when": pa.array([[7, 8], [], [9]], pa.list_(pa.int64())),
        "at": pa.array([datetime.datetime(1970, 1, 2)] * 3, pa.timestamp("ms")),
        "a": pa.array([1, 0, 1]),
        "b": pa.array([0.25, 0.5, 0.75]),
    }
    source = parquet.write(tmp_path, columns, [[3]])
    ids = [
        IdColumn(name="plain", timestamp="at"),
        IdColumn(name="bag", weight="weight", timestamp="when"),
    ]
    data = ParquetData(source, ids=ids, labels=["a", "b"], batch_size=2, shuffle=False)
    first, last = list(data)
    assert first.sparse.values().tolist() == [1, 2, 4, 5]
    assert first.sparse.weights().tolist() == [1.0, 1.0, 0.5, 2.0]
    day = 86_400_000_000
    assert first.timestamps.tolist() == [day, day, 7, 8]
    assert first.labels.tolist() == [[1.0, 0.25], [0.0, 0.5]]
    assert last.sparse.weights().tolist() == [1.0, 3.0]
    assert last.to("cpu").timestamps.tolist() == [day, 9]


BAD = [
    ("label", None, "label", "the number is missing"),
    ("label", math.inf, "label", "the number is not finite as float32"),
    ("x", None, "x", "the number is missing; missing_dense=0.0 of ParquetData reads it as 0"),
    ("x", 1e300, "x", "the number is not finite as float32"),
    ("bag", [1, None], "bag", "a bag has a null"),
    ("weight", [1.0], "weight", "its length is not that of bag"),
    ("weight", [1.0, None], "weight", "a bag has a null"),
    ("weight", [1.0, math.nan], "weight", "the number is not finite as float32"),
]


def spoiled(folder: Path, spoil: dict[int, tuple[str, Any]]) -> str:
    listed: list[dict[str, Any]] = [
        {"bag": [i, i], "weight": [1.0, 2.0], "x": 1.0, "label": 1.0, "i": i} for i in range(20)
    ]
    for row, (column, value) in spoil.items():
        listed[row][column] = value
    return parquet.write(folder, pa.Table.from_pylist(listed).to_pydict(), [[6, 4], [10]])


def reading(source: str, **options: Any) -> ParquetData:
    ids = [IdColumn(name="bag", weight="weight")]
    return ParquetData(source, ids=ids, dense=["x"], labels="label", batch_size=3, **options)


@pytest.mark.parametrize(("column", "value", "named", "problem"), BAD)
@pytest.mark.parametrize("is_filtered", [False, True])
def test_malformed_rows_are_located_counted_and_skipped(
    tmp_path: Path, column: str, value: Any, named: str, problem: str, is_filtered: bool
) -> None:
    where = ds.field("i") != 16 if is_filtered else None
    source = spoiled(tmp_path, {8: (column, value), 17: (column, value)})
    with pytest.raises(BadLine, match=r"row [87], column") as caught:
        list(reading(source, where=where))
    assert (caught.value.column, caught.value.problem) == (named, problem)
    bad = BadLines(limit=2)
    batches = list(reading(source, where=where, bad=bad, shuffle=False))
    assert sum(map(len, batches)) == 18 - is_filtered
    assert bad.count == 2
    first = f"row 8, column {named}: {problem}"
    assert bad.first[0].endswith(f"000.parquet, {first}")
    assert bad.first[1].endswith(f"001.parquet, {first.replace('row 8', 'row 7')}")


def test_more_than_the_limit_is_raised(tmp_path: Path) -> None:
    source = spoiled(tmp_path, dict.fromkeys(range(5), ("x", None)))
    bad = BadLines(limit=4)
    with pytest.raises(BadLine):
        list(reading(source, bad=bad))
    assert bad.count == 5
    assert sum(map(len, reading(source, missing_dense=-1.0))) == 20


@pytest.mark.parametrize("kind", [pa.uint8(), pa.bool_(), pa.float64(), pa.decimal128(30, 2)])
@pytest.mark.parametrize("missing", [-1.0, 0.5, 3e38])
def test_missing_numbers_read_as_asked_in_columns_of_any_type(
    tmp_path: Path, kind: pa.DataType, missing: float
) -> None:
    columns = {"x": pa.array([1, None]).cast(kind), "label": [0.0, 0.0]}
    source = parquet.write(tmp_path, columns, [[2]])
    (batch,) = ParquetData(
        source,
        ids=[],
        dense=["x"],
        labels="label",
        batch_size=2,
        shuffle=False,
        missing_dense=missing,
    )
    assert batch.dense[:, 0].tolist() == np.float32([1, missing]).tolist()


@pytest.mark.parametrize("kind", [pa.binary(4), pa.large_binary()])
def test_text_and_bytes_of_any_layout_have_the_same_ids(tmp_path: Path, kind: pa.DataType) -> None:
    texts = [b"four", None, b"\xc3\xa4ae"]
    source = parquet.write(tmp_path, {"a": pa.array(texts).cast(kind), "label": [0.0] * 3}, [[3]])
    (batch,) = ParquetData(source, ids=["a"], labels="label", batch_size=3, shuffle=False)
    expected = [category_key("a", "four"), category_key("a", "\u00e4ae")]
    assert batch.sparse["a"].values().tolist() == expected
    assert batch.sparse["a"].lengths().tolist() == [1, 0, 1]


def test_a_filter_skips_row_groups_by_their_statistics(tmp_path: Path) -> None:
    source = spoiled(tmp_path, {2: ("x", None)})
    data = reading(source, where=ds.field("i") >= 8)
    assert data.num_rows == 14  # the row group with the malformed row is never read
    found = np.sort(np.concatenate([b.sparse["bag"].values()[::2].numpy() for b in data]))
    assert found.tolist() == list(range(8, 20))


def test_parts_have_the_row_groups_that_they_name(tmp_path: Path) -> None:
    source = parquet.write(tmp_path, {"user": range(9), "label": [0.0] * 9}, [[2, 3], [4]])
    options: dict[str, Any] = {"batch_size": 9, "shuffle": False}
    data = ParquetData(source, ids=["user"], labels="label", **options)
    assert data.row_groups == (2, 3, 4)
    ids = [batch.sparse.values().tolist() for batch in data.part([2, 0])]
    assert ids == [[5, 6, 7, 8, 0, 1]]
    part = data.part([2, 0]).part([1])
    assert (part.num_rows, part.features) == (2, ("user",))
    assert [batch.sparse.values().tolist() for batch in part] == [[0, 1]]
    assert part.bad is data.bad
    with pytest.raises(IndexError, match="row_groups must be 0 to 2, got 3"):
        data.part([3])
    with pytest.raises(IndexError, match="row_groups must be empty, since there are none, got 0"):
        data.part([]).part([0])
    with pytest.raises(ValueError, match="row_groups must not repeat"):
        data.part([1, 1])
    with pytest.raises(ValueError, match="of other files"):
        data.part([1]).load_state_dict(data.part([2]).state_dict())


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_rows_of_ranks_are_those_that_they_read(tmp_path: Path, world_size: int) -> None:
    source = parquet.write(
        tmp_path, {"user": range(40), "label": [0.0] * 40}, [[9, 1, 5], [11, 6, 8]]
    )
    for rank in range(world_size):
        data = ParquetData(
            source, ids=["user"], labels="label", batch_size=7, rank=rank, world_size=world_size
        )
        for epoch in range(3):
            data.set_epoch(epoch)
            assert data.rows_of_ranks(epoch)[rank] == sum(len(batch) for batch in data)


def test_last_batch_may_be_left_out(tmp_path: Path) -> None:
    source = spoiled(tmp_path, {})
    assert [len(batch) for batch in reading(source)] == [3] * 6 + [2]
    assert [len(batch) for batch in reading(source, drop_last=True)] == [3] * 6


def test_urls_lists_and_patterns(tmp_path: Path) -> None:
    local = spoiled(tmp_path, {})
    (tmp_path / "_metadata").write_text("no data")
    memory = fsspec.filesystem("memory")
    for path in Path(local).glob("*.parquet"):
        memory.pipe(f"/data/{path.name}", path.read_bytes())
    expected = [b.sparse.values().tolist() for b in reading(local)]
    both = [f"{local}/000.parquet", f"{local}/001.parquet"]
    assert [b.sparse.values().tolist() for b in reading(Path(local))] == expected
    for source in ("memory://data", "memory://data/*.parquet", f"file://{local}", both):
        assert [b.sparse.values().tolist() for b in reading(source)] == expected
    memory.rm("/data", recursive=True)


@pytest.mark.parametrize("where", [None, ds.field("label") >= 0])
@pytest.mark.parametrize(
    "source",
    [
        "zip://clicks::file://{0}/files.zip",
        "zip://clicks/*.parquet::{0}/files.zip",
        "dir://clicks::file://{0}",
        "dir://clicks/*.parquet::file://{0}",
        "simplecache::file://{0}/clicks/*.parquet",
        "simplecache::file://{0}/clicks",
        "simplecache::zip://clicks/*.parquet::file://{0}/files.zip",
    ],
)
def test_chains_of_urls(tmp_path: Path, source: str, where: Any) -> None:
    local = spoiled(tmp_path / "clicks", {})
    shutil.make_archive(str(tmp_path / "files"), "zip", tmp_path, "clicks")
    expected = [b.sparse.values().tolist() for b in reading(local, where=where)]
    for num_threads in (None, 2):
        data = reading(source.format(tmp_path), where=where, num_threads=num_threads)
        assert [b.sparse.values().tolist() for b in data] == expected


def test_what_a_pattern_finds_is_read_through_the_cache(tmp_path: Path) -> None:
    spoiled(tmp_path / "clicks", {})
    kept = tmp_path / "kept"
    options = {"simplecache": {"cache_storage": str(kept)}}
    source = f"simplecache::file://{tmp_path}/clicks/*.parquet"
    list(reading(source, options=options))
    assert len(list(kept.iterdir())) == len(list((tmp_path / "clicks").glob("*.parquet")))


@pytest.mark.parametrize("where", [None, ds.field("label") >= 0])
def test_names_of_columns_may_hold_dots(tmp_path: Path, where: Any) -> None:
    columns = {"a": [1, 2], "a.b": [3, 4], "a.b.c": [[5], [6, 7]], "label": [0.0, 1.0]}
    source = parquet.write(tmp_path, columns, [[2]])
    data = ParquetData(
        source, ids=["a", "a.b", "a.b.c"], labels="label", batch_size=2, shuffle=False, where=where
    )
    (batch,) = data
    assert bags_of(batch, "a") == [[1], [2]]
    assert bags_of(batch, "a.b") == [[3], [4]]
    assert bags_of(batch, "a.b.c") == [[5], [6, 7]]


def test_a_column_named_like_the_answer_of_the_filter_is_refused(tmp_path: Path) -> None:
    columns = {"id": [1, 2], "__recsdk_keep": [False, True], "label": [0.0, 1.0]}
    source = parquet.write(tmp_path, columns, [[2]])
    options: dict[str, Any] = {"labels": "label", "batch_size": 2}
    with pytest.raises(ValueError, match="column '__recsdk_keep' has the name of the filter's"):
        ParquetData(source, ids=["id"], dense=["__recsdk_keep"], **options)
    kept = ParquetData(source, ids=["id"], where=ds.field("__recsdk_keep"), **options)
    assert [batch.sparse["id"].values().tolist() for batch in kept] == [[2]]


def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    source = spoiled(tmp_path / "good", {})
    options: dict[str, Any] = {"labels": "label", "batch_size": 3}
    for error, match, changed in (
        (ValueError, "there is no column 'other'", {"ids": ["other"]}),
        (TypeError, "column 'x' has the type double; it must hold integers", {"ids": ["x"]}),
        (TypeError, "column 'bag' has the type .* must hold numbers", {"labels": "bag"}),
        (
            TypeError,
            "must both be lists or neither",
            {"ids": [IdColumn(name="i", weight="weight")]},
        ),
        (TypeError, "ids must be a list, got the string 'bag'", {"ids": "bag"}),
        (ValueError, "ids must have a name each of its own", {"ids": ["bag", "bag"]}),
        (ValueError, "labels must be at least one column", {"labels": []}),
        (ValueError, "batch_size must be at least 1, got 0", {"batch_size": 0}),
        (ValueError, "window_bytes must be at least 1, got 0", {"window_bytes": 0}),
        (ValueError, "num_threads must be at least 1, got 0", {"num_threads": 0}),
        (ValueError, "seed must be at least 0, got -1", {"seed": -1}),
        (TypeError, "seed must be an int", {"seed": 1.5}),
        (TypeError, "batch_size must be an int, got None", {"batch_size": None}),
        (TypeError, "shuffle must be True or False, got 'no'", {"shuffle": "no"}),
        (TypeError, "drop_last must be True or False", {"drop_last": 1}),
        (TypeError, "bad must be BadLines", {"bad": 3}),
        (TypeError, "ids must be names of columns or .*, got 3", {"ids": [3]}),
        (TypeError, "rank must be an int", {"rank": 0.5, "world_size": 2}),
        (TypeError, "world_size must be an int", {"rank": 0, "world_size": 2.0}),
        (
            TypeError,
            "where must be a pyarrow.dataset expression, .* got 'i > 3'",
            {"where": "i > 3"},
        ),
        (
            TypeError,
            "where must be true or false of a row, got .* of the type int64",
            {"where": ds.field("i")},
        ),
        (TypeError, "missing_dense must be a number", {"missing_dense": "0"}),
        (
            ValueError,
            "missing_dense must be finite in single precision, got nan",
            {"missing_dense": math.nan},
        ),
        (ValueError, "missing_dense must be finite in single precision", {"missing_dense": 1e39}),
        (ValueError, "pass both rank and world_size", {"rank": 1}),
        (ValueError, "rank must be at most 1, got 2", {"rank": 2, "world_size": 2}),
    ):
        with pytest.raises(error, match=match):
            ParquetData(source, **{"ids": ["bag"], **options, **changed})
    with pytest.raises(FileNotFoundError, match="no such file"):
        ParquetData(str(tmp_path / "none.parquet"), ids=["bag"], **options)
    (tmp_path / "text.parquet").write_text("no Parquet")
    with pytest.raises(ValueError, match=r"text\.parquet: cannot be read as Parquet"):
        ParquetData(str(tmp_path / "text.parquet"), ids=["bag"], **options)
    other = parquet.write(tmp_path / "other", {"bag": ["text"], "label": [1.0]}, [[1]])
    with pytest.raises(ValueError, match="column 'bag' is string; in .* it is list"):
        ParquetData([source, other], ids=["bag"], **options)
    (tmp_path / "empty").mkdir()
    for lacking in (str(tmp_path / "empty"), str(tmp_path / "none*.parquet")):
        for each in (lacking, [source, lacking]):
            with pytest.raises(FileNotFoundError, match=f"{re.escape(lacking)}: holds no Parquet"):
                ParquetData(each, ids=["bag"], **options)


def test_what_is_no_state_or_epoch_is_refused(tmp_path: Path) -> None:
    data = reading(spoiled(tmp_path, {}))
    before = data.state_dict()
    for state in (None, 3, {}, {"kind": "other"}):
        with pytest.raises(ValueError, match="this is no state of ParquetData"):
            data.load_state_dict(state)
    for epoch in (1.5, "1", True, None):
        with pytest.raises(TypeError, match="epoch must be an int"):
            data.set_epoch(epoch)
    assert data.state_dict() == before


def test_a_file_that_changes_is_named(tmp_path: Path) -> None:
    source = spoiled(tmp_path, {})
    data = reading(source, shuffle=False)
    (tmp_path / "001.parquet").write_bytes(b"gone")
    with pytest.raises(OSError, match=r"001\.parquet, row group 0: cannot be read"):
        list(data)
