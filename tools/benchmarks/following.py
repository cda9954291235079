"""Frozen tables that follow a chain: how soon new rows are served, and what layers cost a reader.

From the return of `save_delta` to the first answer with its rows, for deltas of 1 % of the rows,
beside what reading the bytes of the delta from the disk takes alone. The follower looks at the
folder at its usual interval, so that is in the figure. What a reader pays is the processor's time
of pooling, beside the same files without follower: with no delta yet, with one layer, with two.

Shape letters: D row width.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks import records
from benchmarks.draws import draw_indexes, scramble
from recsdk_core import Table
from recsdk_core.serving import ServingTable, freeze

DIM = 64
SEED = 2
NUM_BATCHES, NUM_BAGS, BAG_LENGTH = 8, 4096, 20
ROWS_AT_ONCE = 100_000
PIECE = 1 << 22
BASE, NONE, ONE, TWO = "files alone", "no delta yet", "one layer", "two layers"


class Case:
    """A table that is trained, its chain, and the same files opened twice."""

    def __init__(self, num_rows: int, folder: Path) -> None:
        self.num_rows, self.chain = num_rows, folder / "chain"
        self.table = Table(dim=DIM, name="bench")
        for first in range(0, num_rows, ROWS_AT_ONCE):
            count = min(ROWS_AT_ONCE, num_rows - first)
            keys = scramble(np.arange(first + 1, first + count + 1))
            self.table.upsert(keys, np.zeros((count, DIM), dtype=np.float32))
        self.table.save(self.chain / "0")
        freeze(self.chain / "0", folder / "frozen")
        self.plain, self.live = ServingTable(folder / "frozen"), ServingTable(folder / "frozen")
        self.plain.preload()
        self.sequence = 0
        self.random = np.random.default_rng(SEED)

    @property
    def name(self) -> str:
        return f"{self.num_rows:.0e}_dim{DIM}_float32".replace("e+0", "e")

    def change(self, share: float) -> np.ndarray:
        """Changes some rows, all values to the number of the next delta; returns their keys."""
        count = max(int(self.num_rows * share), 1)
        chosen = self.random.choice(self.num_rows, count, replace=False)
        keys = scramble(np.sort(chosen) + 1)
        self.sequence += 1
        values = np.full((count, DIM), self.sequence, dtype=np.float32)
        self.table.upsert(keys, values)
        return keys

    def save(self) -> Path:
        path = self.chain / str(self.sequence)
        self.table.save_delta(path)
        return path

    def wait(self) -> None:
        while self.live.stats().sequence != self.sequence:
            time.sleep(0.01)


def seconds_to_serve(case: Case, share: float) -> tuple[float, int, Path]:
    """From the end of a save to the first answer with its rows; and the bytes of the delta."""
    keys = case.change(share)
    path = case.save()
    began = time.perf_counter()
    while case.live.lookup(keys[:1])[0, 0] != case.sequence:
        time.sleep(0.0005)
    seconds = time.perf_counter() - began
    assert (case.live.lookup(keys) == case.sequence).all()
    case.wait()
    return seconds, sum(file.stat().st_size for file in path.rglob("*.rows")), path


def seconds_to_read(path: Path) -> float:
    """What reading a delta's bytes takes when they are on the disk only."""
    total = 0.0
    for file in path.rglob("*.rows"):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        while os.read(descriptor, PIECE):
            pass
        total += time.perf_counter() - began
        os.close(descriptor)
    return total


@contextmanager
def case_of(num_rows: int) -> Iterator[Case]:
    parent = Path(__file__).resolve().parents[2] / "build" / "bench"
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        case = Case(num_rows, Path(folder))
        try:
            yield case
        finally:
            case.live.stop_following()


def run_case(num_rows: int, repetitions: int) -> list[records.Record]:
    with case_of(num_rows) as case:
        offsets = np.arange(0, NUM_BAGS * BAG_LENGTH + 1, BAG_LENGTH)
        ids = scramble(np.arange(1, num_rows + 1))
        count = NUM_BAGS * BAG_LENGTH
        batches = [ids[draw_indexes(case.random, num_rows, count, "zipf")]
                   for _ in range(NUM_BATCHES)]  # fmt: skip

        def pools(table: ServingTable) -> None:
            for keys in batches:
                table.pool(keys, offsets)

        def beside(what: str) -> records.Record:
            contestants = {BASE: lambda: pools(case.plain), what: lambda: pools(case.live)}
            samples = records.race(contestants, repetitions, time.process_time)
            a_batch = {name: [ms / NUM_BATCHES for ms in each] for name, each in samples.items()}
            return records.record_of(case.name, f"pool: {what}", "ms", what, a_batch)

        made = [beside(NONE)]
        case.live.follow(case.chain)
        served, read = [], []
        for repetition in range(repetitions):
            seconds, num_bytes, path = seconds_to_serve(case, 0.01)
            served.append(seconds * 1e3)
            read.append(seconds_to_read(path) * 1e3)
            if repetition == 0:
                made.append(beside(ONE))
        case.change(0.001)
        case.save()
        case.wait()
        made.append(beside(TWO))
        megabytes = f"a delta of {num_bytes / 1e6:.3g} MB"
        made.append(
            records.record_of(
                case.name,
                f"{megabytes}: saved to served",
                "ms",
                "ours",
                {"ours": served, "its bytes from the disk": read},
            )
        )
        return made
