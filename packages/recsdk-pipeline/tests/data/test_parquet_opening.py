"""How Parquet files are opened: text by its dictionaries, footers kept for the next."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsdk_pipeline._internal import parquet_opening
from recsdk_pipeline._internal.parquet_opening import open_file
from recsdk_pipeline.data import ParquetData, category_keys

NUM_ROWS = 400
TEXTS = st.lists(st.none() | st.sampled_from(["", "a", "bc", "\x00", "long" * 9]), min_size=1)
KINDS = [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No footer is kept from before."""
    with mock.patch.object(parquet_opening, "_FOOTERS", parquet_opening._Footers()):
        yield


def write(path: Path, values: list[str | None], kind: Any = None, **options: Any) -> Path:
    array = pa.array(values, pa.string()).cast(kind or pa.string())
    pq.write_table(pa.table({"a.b": array, "label": [1.0] * len(values)}), path, **options)
    return path


def read(source: Path | str, **options: Any) -> list[list[int]]:
    given = {"batch_size": 64, "shuffle": False, "labels": "label", **options}
    data = ParquetData(source, ids=["a.b"], **given)
    return [
        bag.tolist()
        for batch in data
        for bag in batch.sparse["a.b"].values().split(batch.sparse["a.b"].lengths().tolist())
    ]


def opened(path: Path) -> Any:
    fs = pa.fs.LocalFileSystem()
    return open_file(str(path), fs, ["a.b"], ["a.b"]).schema_arrow.field("a.b").type


def keys_of(values: list[str | None]) -> list[list[int]]:
    known = {each: category_keys("a.b", [each]).tolist() for each in values if each is not None}
    return [[] if each is None else known[each] for each in values]


@settings(max_examples=2 * settings().max_examples)
@given(
    some=TEXTS,
    kind=st.sampled_from(KINDS),
    window_bytes=st.sampled_from([1, 100, 10**6]),
    rows_of_group=st.sampled_from([7, NUM_ROWS]),
    where=st.booleans(),
)
def test_ids_are_those_of_the_values_one_by_one(
    tmp_path_factory: pytest.TempPathFactory,
    some: list[str | None],
    kind: Any,
    window_bytes: int,
    rows_of_group: int,
    where: bool,
) -> None:
    values = (some * NUM_ROWS)[:NUM_ROWS]
    folder = tmp_path_factory.mktemp("text")
    coded = write(folder / "coded.parquet", values, kind, row_group_size=rows_of_group)
    kept = ds.field("a.b").is_valid() if where else None
    expected = keys_of([each for each in values if each is not None or not where])
    assert read(coded, window_bytes=window_bytes, where=kept) == expected


def test_text_that_repeats_few_values_comes_as_a_dictionary(tmp_path: Path) -> None:
    repeated, distinct = ["x", "y"] * 200, [f"{n:015x}" for n in range(NUM_ROWS)]
    for kind in KINDS:
        path = write(tmp_path / "repeated.parquet", repeated, kind)
        assert pa.types.is_dictionary(opened(path))
    assert opened(write(tmp_path / "distinct.parquet", distinct)) == pa.string()
    plain = write(tmp_path / "plain.parquet", repeated, use_dictionary=False)
    assert opened(plain) == pa.string()
    # One row group in which a dictionary would have to be made first.
    both = pa.table({"a.b": repeated + distinct})
    pq.write_table(both, tmp_path / "both.parquet", row_group_size=NUM_ROWS)
    assert opened(tmp_path / "both.parquet") == pa.string()


def test_a_dictionary_that_a_writer_gave_up_is_not_made_anew(tmp_path: Path) -> None:
    values = [f"{n:015x}" for n in range(5000)]
    path = write(tmp_path / "a.parquet", values, dictionary_pagesize_limit=100)
    assert pq.ParquetFile(path).metadata.row_group(0).column(0).has_dictionary_page
    assert opened(path) == pa.string()
    assert read(path) == keys_of(values)  # type: ignore[arg-type]


@pytest.mark.parametrize("most", [0, 256 << 20])
def test_text_behind_a_url_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(parquet_opening, "_MOST_FAR_BYTES", most)
    values: list[str | None] = ["x", "y"] * 200
    written = write(tmp_path / "a.parquet", values)
    files = fsspec.filesystem("memory")
    files.pipe("/opening/a.parquet", written.read_bytes())
    assert read("memory://opening/a.parquet") == keys_of(values)
    files.rm("/opening", recursive=True)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files whose footers are read, one after the other."""
    found: list[str] = []
    of = parquet_opening._FOOTERS.of

    def looked(stamp: Any) -> Any:
        footer = of(stamp)
        if footer is None:
            found.append("read")
        return footer

    monkeypatch.setattr(parquet_opening._FOOTERS, "of", looked)
    return found


def test_a_footer_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.parquet", ["x"] * 5)
    misses = counted(monkeypatch)
    for _ in range(2):
        read(tmp_path)
    assert misses == []


def changed_in_place(path: Path) -> None:
    write(path, ["z", "y"] * 3)


def changed_for_another(path: Path) -> None:
    other = write(path.with_suffix(".new"), ["z", "y"] * 3)
    os.replace(other, path)


@pytest.mark.parametrize("change", [changed_in_place, changed_for_another])
def test_a_file_that_was_changed_is_read_by_its_own_footer(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    path = write(tmp_path / "a.parquet", ["x", "y"] * 3)
    data = ParquetData(path, ids=["a.b"], labels="label", batch_size=6, shuffle=False)
    before = [batch.sparse.values().tolist() for batch in data]
    size = path.stat().st_size
    change(path)
    assert path.stat().st_size == size
    after = [batch.sparse.values().tolist() for batch in data]
    assert before == [category_keys("a.b", ["x", "y"] * 3).tolist()]
    assert after == [category_keys("a.b", ["z", "y"] * 3).tolist()]


def test_a_file_that_is_replaced_while_it_is_opened_is_read_by_its_own_footer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.parquet", ["x", "y"] * 3)
    opened(path)  # from here on its footer is kept
    stamp_of = parquet_opening.stamp_of

    def late(name: str) -> Any:
        found = stamp_of(name)
        monkeypatch.setattr(parquet_opening, "stamp_of", stamp_of)
        os.replace(write(path.with_suffix(".new"), ["one", "two", "three"] * 9), path)
        return found

    monkeypatch.setattr(parquet_opening, "stamp_of", late)
    file = open_file(str(path), pa.fs.LocalFileSystem(), ["a.b"], ["a.b"])
    assert file.read(["a.b"]).column(0).to_pylist() == ["one", "two", "three"] * 9


def test_who_iterates_may_be_referred_to_weakly(tmp_path: Path) -> None:
    """So pipelines know iterators that nobody has any longer."""
    data = ParquetData(
        write(tmp_path / "a.parquet", ["x"]), ids=["a.b"], labels="label", batch_size=1
    )
    iterator = iter(data)
    reference = weakref.ref(iterator)
    next(iterator)
    del iterator
    assert reference() is None


def test_footers_are_kept_up_to_so_many_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        write(tmp_path / f"{number}.parquet", ["x"] * 5)
    size = pq.read_metadata(tmp_path / "0.parquet").serialized_size
    monkeypatch.setattr(parquet_opening, "_MOST_BYTES", 2 * size)
    footers = parquet_opening._FOOTERS
    for number in range(5):
        read(tmp_path / f"{number}.parquet")
        assert footers._bytes == size * min(2, number + 1)
    stamps = [parquet_opening.stamp_of(str(tmp_path / f"{n}.parquet")) for n in range(5)]
    assert [footers.of(each) is not None for each in stamps] == [False] * 3 + [True] * 2
    footers.of(stamps[3])
    read(tmp_path / "0.parquet")
    assert footers.of(stamps[3]) is not None  # the other was not used for longer
    assert footers.of(stamps[4]) is None


def test_a_forked_process_begins_without_footers(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", ["x"] * 5)
    with parquet_opening._FOOTERS._lock:
        child = os.fork()
        if child == 0:
            parquet_opening._FOOTERS.forget()
            os._exit(0 if len(read(tmp_path)) == 5 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
