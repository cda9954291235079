"""Reading files: ours beside pyarrow alone, which decodes the same columns and no more.

The Parquet files are Criteo's in shape: 26 ids, 13 numbers and a label a row, packed by snappy, ids
drawn by power law; two files, and many small ones of one row group. Both read all rows; ours also
hashes strings, shuffles and makes batches of tensors. The text files are in Criteo's and
MovieLens's formats, each beside pyarrow.csv. Every race is timed by the clock on the wall and by
the time of the processors, all threads together; that of workers is the time of the busiest. Two
threads should take as much of it as one, which halves the time by the clock where two processors
are idle.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pv
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from torch.utils.data import DataLoader

from benchmarks import records
from recsdk_pipeline.data import CriteoData, MovieLensData, ParquetData

NUM_IDS, NUM_DENSE = 26, 13
IDS = [f"C{n}" for n in range(1, NUM_IDS + 1)]
DENSE = [f"I{n}" for n in range(1, NUM_DENSE + 1)]
ROWS_A_GROUP = 100_000
ROWS_OF_SMALL_FILE = 4_000
FEW_ROWS = 400_000
BATCH_SIZE = 4096
REPETITIONS = 7


def write(folder: Path, num_rows: int, *, as_text: bool, num_files: int = 2) -> str:
    """Files of `num_rows` rows together."""
    generator = np.random.default_rng(0)
    for number in range(num_files):
        size = num_rows // num_files
        columns: dict[str, Any] = {"label": generator.integers(0, 2, size).astype(np.float32)}
        for name in DENSE:
            columns[name] = generator.normal(size=size).astype(np.float32)
        for name in IDS:
            ids = generator.zipf(1.2, size).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            columns[name] = [f"{i >> 32:08x}" for i in ids.tolist()] if as_text else ids
        path = folder / f"{number:04}.parquet"
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


def write_criteo(path: Path, num_rows: int) -> str:
    """Tab-separated lines: a tenth of the numbers and a fifth of the ids are missing."""
    generator = np.random.default_rng(0)
    columns = [generator.integers(0, 2, num_rows).astype(str)]
    for _ in DENSE:
        numbers = generator.geometric(0.01, num_rows).astype(str)
        columns.append(np.where(generator.random(num_rows) < 0.1, "", numbers))
    for _ in IDS:
        ids = generator.zipf(1.2, num_rows).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        names = np.array([f"{each >> 32:08x}" for each in ids.tolist()])
        columns.append(np.where(generator.random(num_rows) < 0.2, "", names))
    path.write_text("".join("\t".join(row) + "\n" for row in zip(*columns, strict=True)))
    return str(path)


def write_movielens(folder: Path, num_rows: int) -> str:
    """Ratings of 943 users and 1682 items."""
    generator = np.random.default_rng(0)
    flags = "|".join(["0"] * 18 + ["1"])
    users = "".join(f"{user}|{user % 80}|M|writer|{user:05}\n" for user in range(1, 944))
    items = "".join(f"{item}|Film|01-Jan-1995||x|{flags}\n" for item in range(1, 1683))
    ratings = np.stack(
        [
            generator.integers(1, 944, num_rows),
            generator.integers(1, 1683, num_rows),
            generator.integers(1, 6, num_rows),
            generator.integers(874_724_710, 893_286_638, num_rows),
        ],
        axis=1,
    )
    (folder / "u.user").write_text(users)
    (folder / "u.item").write_text(items)
    np.savetxt(folder / "u.data", ratings, "%d", delimiter="\t")
    return str(folder)


def pyarrow_csv(path: str) -> Callable[[], None]:
    def run() -> None:
        options = pv.ReadOptions(autogenerate_column_names=True)
        for _ in pv.open_csv(path, options, pv.ParseOptions(delimiter="\t")):
            pass

    return run


def busiest(loaders: Iterable[Any]) -> float:
    """Seconds of the processors' time of the busiest worker of each loader, added up."""
    return sum(max(map(_seconds, _workers(each)), default=0.0) for each in loaders)


def _workers(loader: Any) -> list[int]:
    iterator = loader._iterator
    return [] if iterator is None else [worker.pid for worker in iterator._workers]


def _seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def raced(
    workload: str,
    op: str,
    contestants: Mapping[str, Callable[[], None]],
    quick: bool,
    processors: Callable[[], float] = time.process_time,
) -> list[records.Record]:
    """A record by each clock; the first contestant is ours."""
    clocks = {op: time.perf_counter, f"{op}, processor time": processors}
    times = records.race_by(clocks, contestants, 5 if quick else REPETITIONS)
    ours = next(iter(contestants))
    return [records.record_of(workload, name, "ms", ours, each) for name, each in times.items()]


def run_text(quick: bool) -> list[records.Record]:
    num_rows = 200_000 if quick else 1_000_000
    found = []
    with tempfile.TemporaryDirectory() as folder:
        clicks = write_criteo(Path(folder, "clicks"), num_rows)
        ratings = write_movielens(Path(folder), num_rows)
        for name, data, path in (
            ("criteo", CriteoData(clicks, batch_size=BATCH_SIZE), clicks),
            ("movielens", MovieLensData(ratings, batch_size=BATCH_SIZE), f"{ratings}/u.data"),
        ):
            contestants = {"ours": read(data), "pyarrow.csv": pyarrow_csv(path)}
            found += raced(f"{name}_text_{num_rows}", "read", contestants, quick)
    return found


def run_reading(workload: str, source: str, quick: bool) -> list[records.Record]:
    contestants = {
        "ours": read(ours(source)),
        "ours, in order": read(ours(source, shuffle=False)),
        "pyarrow alone": pyarrow_alone(source),
    }
    return raced(workload, "read", contestants, quick)


def run_small_files(quick: bool) -> list[records.Record]:
    num_files = 50 if quick else 200
    num_rows = num_files * ROWS_OF_SMALL_FILE
    with tempfile.TemporaryDirectory() as folder:
        source = write(Path(folder), num_rows, as_text=False, num_files=num_files)
        return run_reading(f"criteo_like_int64_{num_files}_files_{num_rows}", source, quick)


def run_short_files() -> list[records.Record]:
    with tempfile.TemporaryDirectory() as folder:
        source = write(Path(folder), FEW_ROWS, as_text=False)
        return run_reading(f"criteo_like_int64_{FEW_ROWS}", source, quick=False)


def run(quick: bool) -> list[records.Record]:
    num_rows = FEW_ROWS if quick else 2_000_000
    found = run_text(quick) + run_small_files(quick)
    if not quick:
        found += run_short_files()
    for kind, as_text in (("int64", False), ("text", True)):
        with tempfile.TemporaryDirectory() as folder:
            source = write(Path(folder), num_rows, as_text=as_text)
            workload = f"criteo_like_{kind}_{num_rows}"
            found += run_reading(workload, source, quick)
            loaders = {f"{n} workers": loader(source, n) for n in (2, 1)}
            workers = {name: read(each) for name, each in loaders.items()}
            clock = partial(busiest, loaders.values())
            found += raced(workload, "workers", workers, quick, clock)
            threads = {f"{n} threads": read(ours(source, num_threads=n)) for n in (2, 1)}
            found += raced(workload, "threads", threads, quick)
    return found
