"""Text files in streams: each line read once, by any ranks and workers, plain or packed."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import itertools
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_support import parquet
from torchdata.stateful_dataloader import StatefulDataLoader

from recsdk_pipeline.data import (
    BadLine,
    BadLines,
    CriteoData,
    FileData,
    MovieLensData,
    category_key,
)
from recsdk_pipeline.data.text_files import PackedFile

PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "plain": lambda data: data,
    "gzip": gzip.compress,
    "bz2": bz2.compress,
}


def line_of(number: int, fill: int) -> str:
    """A click whose first number is `number`; longer for a larger `fill`."""
    ids = [f"{number:x}", *["0a1b2c3d"[:fill]] * 25]
    return "\t".join([str(number % 2), str(number), *[""] * 12, *ids])


def numbers_of(batch: Any) -> list[int]:
    """The numbers of its lines."""
    return [round(float(np.expm1(x))) for x in batch.dense[:, 0].double().numpy()]


def read(
    make: Callable[..., FileData], ranks: int, workers: int, stop: int | None, state: Any
) -> tuple[list[int], list[Any]]:
    """The lines that all streams read, `stop` batches each, and their states."""
    found, states = [], []
    for rank, worker in itertools.product(range(ranks), range(workers)):
        data = make(rank=rank, world_size=ranks)
        with parquet.as_worker(worker, workers) if workers > 1 else contextlib.nullcontext():
            if state is not None:
                data.load_state_dict(state)
            for batch in itertools.islice(data, stop):
                found += numbers_of(batch)
            states.append(data.state_dict())
    return found, states


@pytest.mark.filterwarnings("ignore:rank . of . has nothing to read")
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    fill=st.integers(0, 8),
    packing=st.sampled_from(sorted(PACKINGS)),
    window_bytes=st.sampled_from([1, 2500, 1 << 20]),
    layouts=st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(0, 3)), max_size=2
    ),
    shuffle=st.booleans(),
    ends=st.sampled_from(["\n", "\r\n"]),
    has_last_end=st.booleans(),
    num_threads=st.sampled_from([None, 3]),
)
def test_every_line_is_read_once(
    sizes: list[int],
    fill: int,
    packing: str,
    window_bytes: int,
    layouts: list[tuple[int, int, int]],
    shuffle: bool,
    ends: str,
    has_last_end: bool,
    num_threads: int | None,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, sources = 0, []
        for size in sizes:
            text = ends.join(line_of(n, fill) for n in range(first, first + size))
            sources.append(Path(folder, f"{first}"))
            data = text + (ends if has_last_end else "")
            sources[-1].write_bytes(PACKINGS[packing](data.encode()))
            first += size

        def make(**options: Any) -> FileData:
            options |= {"shuffle": shuffle, "num_threads": num_threads}
            return CriteoData(sources, batch_size=3, window_bytes=window_bytes, **options)

        found: list[int] = []
        state = None
        for ranks, workers, stop in layouts:
            numbers, states = read(make, ranks, workers, stop, state)
            found += numbers
            state = FileData.merge(states)
        found += read(make, 2, 1, None, state)[0]
    assert sorted(found) == list(range(first))


def test_blocks_are_dealt_evenly_and_shuffled(tmp_path: Path) -> None:
    path = tmp_path / "clicks"
    path.write_text("".join(line_of(n, 8) + "\n" for n in range(1000)))
    options: dict[str, Any] = {"batch_size": 10, "window_bytes": 40_000, "world_size": 2}
    shares = [CriteoData(path, rank=rank, seed=5, **options) for rank in range(2)]
    read_by = [[n for batch in share for n in numbers_of(batch)] for share in shares]
    again = [[n for batch in share for n in numbers_of(batch)] for share in shares]
    assert read_by == again
    sizes = [len(numbers) for numbers in read_by]
    assert abs(sizes[0] - sizes[1]) <= 40  # about a block
    assert read_by[0] != sorted(read_by[0])
    shares[0].set_epoch(1)
    assert [n for batch in shares[0] for n in numbers_of(batch)] != read_by[0]


def test_a_packed_file_is_read_from_front_to_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "clicks.gz"
    path.write_bytes(gzip.compress("".join(line_of(n, 8) + "\n" for n in range(5000)).encode()))
    data = CriteoData(path, batch_size=100, window_bytes=100_000, rank=0, world_size=1)
    begun: list[int] = []
    begin = PackedFile._begin
    monkeypatch.setattr(PackedFile, "_begin", lambda self: (begun.append(1), begin(self))[1])
    assert sorted(n for batch in data for n in numbers_of(batch)) == list(range(5000))
    assert len(begun) == 1


@pytest.mark.parametrize("packing", sorted(PACKINGS))
def test_files_behind_urls(packing: str) -> None:
    fs = fsspec.filesystem("memory")
    for part in range(2):
        lines = "".join(line_of(n, 3) + "\n" for n in range(20 * part, 20 * part + 20))
        fs.pipe(f"/clicks-{packing}/{part}", PACKINGS[packing](lines.encode()))
    source = f"memory://clicks-{packing}/*"
    data = CriteoData(source, batch_size=7, window_bytes=900, rank=0, world_size=1)
    assert sorted(n for batch in data for n in numbers_of(batch)) == list(range(40))


@pytest.mark.parametrize("source", ["zip://clicks-*::file://{0}", "zip://clicks-*::{0}"])
def test_files_of_an_archive(tmp_path: Path, source: str) -> None:
    archive = tmp_path / "clicks.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for part in range(2):
            lines = "".join(line_of(n, 3) + "\n" for n in range(20 * part, 20 * part + 20))
            file.writestr(f"clicks-{part}", lines)
    data = CriteoData(source.format(archive), batch_size=7, window_bytes=900, rank=0, world_size=1)
    assert sorted(n for batch in data for n in numbers_of(batch)) == list(range(40))


@pytest.mark.parametrize("packing", sorted(PACKINGS))
def test_bad_lines_of_any_block_are_located(tmp_path: Path, packing: str) -> None:
    lines = [line_of(n, 8) for n in range(200)]
    lines[150] = lines[150].replace("0a1b", "bad!", 1)
    lines[77] = "nothing"
    path = tmp_path / "clicks"
    path.write_bytes(PACKINGS[packing]("\n".join(lines).encode()))
    bad = BadLines(limit=2)
    data = CriteoData(path, batch_size=10, window_bytes=3000, bad=bad, rank=0, world_size=1)
    assert len([n for batch in data for n in numbers_of(batch)]) == 198
    assert bad.count == 2
    assert sorted(each.split(", ")[1] for each in bad.first) == ["line 151", "line 78"]
    strict = CriteoData(path, batch_size=10, shuffle=False, rank=0, world_size=1)
    with pytest.raises(BadLine, match="line 78, column 2: the line has 1 columns; 40"):
        list(strict)


def test_a_stateful_loader_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "clicks"
    path.write_text("".join(line_of(n, 8) + "\n" for n in range(300)))

    def loader() -> Any:
        data = CriteoData(path, batch_size=10, window_bytes=20_000, rank=0, world_size=1)
        return StatefulDataLoader(data, batch_size=None, num_workers=2)

    first = loader()
    batches: Iterator[Any] = iter(first)
    found = [n for batch in itertools.islice(batches, 7) for n in numbers_of(batch)]
    again = loader()
    again.load_state_dict(first.state_dict())
    found += [n for batch in again for n in numbers_of(batch)]
    assert sorted(found) == list(range(300))


def test_movielens_in_streams(tmp_path: Path) -> None:
    (tmp_path / "u.user").write_text("1|24|M|writer|85711\n2|53|F|other|94043\n")
    flags = "|".join(["0"] * 18 + ["1"])
    (tmp_path / "u.item").write_text(f"1|Film|01-Jan-1995||http://x|{flags}\n")
    ratings = "".join(f"{1 + n % 2}\t1\t{1 + n % 5}\t{n * 3600}\n" for n in range(50))
    (tmp_path / "u.data").write_text(ratings)
    fs = fsspec.filesystem("memory")
    for each in tmp_path.iterdir():
        fs.pipe(f"/movies/{each.name}", each.read_bytes())
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        for each in tmp_path.iterdir():
            file.write(each, f"ml/{each.name}")
            file.write(each, each.name)
    fs.pipe("/movies/all.zip", archive.getvalue())
    in_archive = [f"zip://{name}::memory://movies/all.zip" for name in ("ml", "ml/", "")]
    for folder in (str(tmp_path), "memory://movies", "simplecache::memory://movies", *in_archive):
        shares = [
            MovieLensData(folder, batch_size=7, window_bytes=500, rank=rank, world_size=2)
            for rank in range(2)
        ]
        batches = [batch for share in shares for batch in share]
        hours = [key for batch in batches for key in batch.sparse["hour"].values().tolist()]
        assert sorted(hours) == sorted(category_key("hour", str(n % 24)) for n in range(50))
        assert sum(float(batch.labels.sum()) for batch in batches) == 20
        assert all(len(batch.sparse["genres"].values()) == len(batch) for batch in batches)


def test_a_stream_may_be_left_at_the_end_of_a_program(tmp_path: Path) -> None:
    path = tmp_path / "clicks.tsv"
    path.write_text("".join(f"{line_of(number, 8)}\n" for number in range(1000)))
    program = (
        "from recsdk_pipeline.data import CriteoData\n"
        f"data = CriteoData({str(path)!r}, batch_size=10, window_bytes=20_000)\n"
        "batches = iter(data)\n"
        "print(len(next(batches)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "10\n"
    assert "Exception" not in done.stderr
    assert "Error" not in done.stderr


def test_a_rank_that_gets_nothing_says_so(tmp_path: Path) -> None:
    path = tmp_path / "clicks.tsv"
    path.write_text("".join(f"{line_of(n, 8)}\n" for n in range(20)))
    with pytest.warns(
        UserWarning, match="rank 1 of 2 has nothing to read, as there are 1 row"
    ) as w:
        assert list(CriteoData(path, batch_size=5, rank=1, world_size=2)) == []
    assert len(w) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = CriteoData(path, batch_size=5, rank=0, world_size=2)
        assert len(list(first)) == 4
        second = CriteoData(path, batch_size=5, rank=1, world_size=2)
        second.load_state_dict(CriteoData.merge([first.state_dict(), second.state_dict()]))
        assert list(second) == []
