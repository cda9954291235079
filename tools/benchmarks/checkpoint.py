"""Saving and loading a table against plain files, torch.save and torch.distributed.checkpoint.

All contestants write the same number of bytes, durably (fsync), and read them with a cold page
cache (posix_fadvise), taking turns. Then: what a delta takes, and how much longer a step of
training takes while `save_async` writes. QUICK=1: 256 MiB instead of as much as fits;
RECSDK_BENCH_BYTES: no more than that.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from benchmarks import steps_beside_a_save
from benchmarks.records import Record, record_of
from recsdk_core import Table, optim
from recsdk_core.checkpoint import open_checkpoint

DIM = 64
ROW_BYTES = 8 + 4 * DIM + 4  # key, weights, the state of rowwise Adagrad
MOST_BYTES = 10 * 10**9
QUICK_BYTES = 256 * 2**20
SHARE_OF_MEMORY = 0.7
CHUNK = 16 * 2**20
BATCH = 2**18
CHANGED_SHARE = 0.01


@dataclass
class Contestant:
    """What writes a file or folder, and reads it again."""

    save: Callable[[Path], object]
    load: Callable[[Path], object]
    samples: dict[str, list[float]] = field(default_factory=lambda: {"save": [], "load": []})


def run(quick: bool) -> list[Record]:
    """Measures; prints how large the table is."""
    # The table, the peers' tensor, and what is loaded of either.
    most = int(_memory_available() * SHARE_OF_MEMORY / 4)
    wanted = int(os.environ.get("RECSDK_BENCH_BYTES", MOST_BYTES))
    num_bytes = QUICK_BYTES if quick else min(wanted, most)
    num_rows = num_bytes // ROW_BYTES
    print(f"{num_rows} rows of width {DIM}, {num_rows * ROW_BYTES / 1e9:.2f} GB")
    folder = Path(tempfile.mkdtemp(dir=os.environ.get("RECSDK_BENCH_DIR", "build/bench")))
    try:
        return _measure(num_rows, folder, repetitions=3)
    finally:
        shutil.rmtree(folder)


def _memory_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 8 * 2**30


def _measure(num_rows: int, folder: Path, repetitions: int) -> list[Record]:
    table = _filled(num_rows)
    tensor = torch.from_numpy(
        np.random.default_rng(0).random(num_rows * ROW_BYTES // 4, dtype=np.float32)
    )
    contestants = _contestants(table, tensor)
    for repetition in range(repetitions):
        names = list(contestants)
        shift = repetition % len(names)
        for name in names[shift:] + names[:shift]:
            _turn(contestants[name], folder / name)
    workload = f"rows{num_rows}_dim{DIM}"
    records = [
        record_of(workload, op, "ms", "recsdk", {n: c.samples[op] for n, c in contestants.items()})
        for op in ("save", "load")
    ]
    records += _deltas(table, folder, workload, repetitions)
    keys = _keys(0, num_rows)
    return records + steps_beside_a_save.measure(table, keys, folder, workload, repetitions)


def _filled(num_rows: int) -> Table:
    table = _empty()
    for begin in range(0, num_rows, BATCH):
        keys = _keys(begin, min(begin + BATCH, num_rows))
        table.find_or_insert(keys)
    return table


def _empty() -> Table:
    return Table(dim=DIM, name="bench", optimizer=optim.RowwiseAdagrad(lr=0.1))


def _keys(begin: int, end: int) -> np.ndarray:
    spread = np.uint64(0x9E3779B97F4A7C15)  # odd, so that products stay distinct
    keys: np.ndarray = (np.arange(begin, end, dtype=np.uint64) * spread).view(np.int64)
    return keys


def _contestants(table: Table, tensor: torch.Tensor) -> dict[str, Contestant]:
    received = torch.empty_like(tensor)

    def load(path: Path) -> None:
        _empty().load(path)

    def torch_save(path: Path) -> None:
        torch.save(tensor, path)
        _sync(path)

    def dcp_save(path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save_distributed({"tensor": tensor}, checkpoint_id=path, no_dist=True)
        for file in _files(path):
            _sync(file)

    def dcp_load(path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load_distributed({"tensor": received}, checkpoint_id=path, no_dist=True)

    return {
        "recsdk": Contestant(table.save, load),
        "plain file": Contestant(
            lambda path: _plain_write(path, tensor), lambda path: _plain_read(path, received)
        ),
        "torch.save": Contestant(torch_save, torch.load),
        "dcp.save": Contestant(dcp_save, dcp_load),
    }


def _turn(contestant: Contestant, path: Path) -> None:
    """Saves and loads once, nothing of it in the page cache before."""
    with suppress(FileNotFoundError):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    os.sync()
    for op, work in (("save", contestant.save), ("load", contestant.load)):
        start = time.perf_counter()
        work(path)
        contestant.samples[op].append((time.perf_counter() - start) * 1e3)
        _forget(path)
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _files(path: Path) -> list[Path]:
    return [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else [path]


def _forget(path: Path) -> None:
    """Takes what was written out of the page cache."""
    for file in _files(path):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _plain_write(path: Path, tensor: torch.Tensor) -> None:
    view = tensor.numpy().data.cast("B")
    with path.open("wb", buffering=0) as file:
        for begin in range(0, len(view), CHUNK):
            file.write(view[begin : begin + CHUNK])
        os.fsync(file.fileno())


def _plain_read(path: Path, received: torch.Tensor) -> None:
    view = received.numpy().data.cast("B")
    with path.open("rb", buffering=0) as file:
        begin = 0
        while count := file.readinto(view[begin : begin + CHUNK]):
            begin += count


def _deltas(table: Table, folder: Path, workload: str, repetitions: int) -> list[Record]:
    """Bytes and time of a delta after 1 % of the rows were updated, beside the full save's."""
    times: dict[str, list[float]] = {"delta": [], "full save": []}
    sizes: dict[str, list[float]] = {"delta": [], "full save": []}
    random = np.random.default_rng(1)
    for _ in range(repetitions):
        for name, save in (("full save", table.save), ("delta", table.save_delta)):
            path = folder / name.replace(" ", "_")
            shutil.rmtree(path, ignore_errors=True)
            os.sync()
            start = time.perf_counter()
            save(path)
            times[name].append((time.perf_counter() - start) * 1e3)
            sizes[name].append(open_checkpoint(path).manifest.num_bytes)
            _touch(table, random)
    op = f"save {CHANGED_SHARE:.0%} changed rows"
    return [
        record_of(workload, op, "ms", "delta", times),
        record_of(workload, op, "bytes", "delta", sizes),
    ]


def _touch(table: Table, random: np.random.Generator) -> None:
    count = max(int(len(table) * CHANGED_SHARE), 1)
    chosen = random.choice(len(table), count, replace=False).astype(np.uint64)
    keys = (chosen * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)
    table.apply_gradients(keys, np.ones((count, DIM), np.float32))
