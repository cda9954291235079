"""Saving and loading a table against plain files, torch.save and torch.distributed.checkpoint.

All contestants write the same number of bytes, durably (fsync), and read them with a cold page
cache (posix_fadvise), taking turns. A table is loaded into fresh memory, as torch.load does; the
plain file is read into memory that is there already, and into fresh memory. Before each turn as
much memory is touched and freed again, since the host of a virtual machine takes free memory back
and needs time to give it again, which would fall on whoever comes first.

Then: what a delta takes, and how much longer a step of training takes while `save_async` writes.
QUICK=1: 256 MiB instead of as much as fits; RECSDK_BENCH_BYTES: no more than that;
RECSDK_BENCH_REPETITIONS: other than 3; RECSDK_BENCH_DIR: where to write, other than build/bench.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from benchmarks import steps_beside_a_save
from benchmarks.records import Record, orders, record_of
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


class Contestant(Protocol):
    """What writes a file or folder, and reads it again."""

    def save(self, path: Path) -> None:
        """Writes it, durably."""

    def prepare_load(self) -> None:
        """Frees what the load replaces; not timed."""

    def load(self, path: Path) -> None:
        """Reads it."""


def run(quick: bool) -> list[Record]:
    """Measures; prints how large the table is."""
    # The table with its index, the peers' tensor, and what dcp.load reads before it copies that.
    most = int(_memory_available() * SHARE_OF_MEMORY / 3.2)
    wanted = int(os.environ.get("RECSDK_BENCH_BYTES", MOST_BYTES))
    num_bytes = QUICK_BYTES if quick else min(wanted, most)
    num_rows = num_bytes // ROW_BYTES
    print(f"{num_rows} rows of width {DIM}, {num_rows * ROW_BYTES / 1e9:.2f} GB", flush=True)
    parent = Path(os.environ.get("RECSDK_BENCH_DIR", "build/bench"))
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=parent))
    try:
        repetitions = int(os.environ.get("RECSDK_BENCH_REPETITIONS", "3"))
        return _measure(num_rows, folder, repetitions)
    finally:
        shutil.rmtree(folder)


def _memory_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 8 * 2**30


def _measure(num_rows: int, folder: Path, repetitions: int) -> list[Record]:
    recsdk = _Recsdk(_filled(num_rows))
    peers = _Peers(num_rows * ROW_BYTES)
    contestants: dict[str, Contestant] = {
        "recsdk": recsdk,
        "plain file": _PlainFile(peers),
        "plain file, fresh memory": _FreshPlainFile(peers),
        "torch.save": _TorchSave(peers),
        "dcp.save": _DcpSave(peers),
    }
    times: dict[str, dict[str, list[float]]] = {"save": {}, "load": {}}
    for names in orders(contestants, repetitions):
        for name in names:
            for op, milliseconds in _turn(contestants[name], folder / name, peers.num_bytes):
                times[op].setdefault(name, []).append(milliseconds)
    del times["save"]["plain file, fresh memory"]  # the same as the other
    peers.tensor = torch.empty(0)
    workload = f"rows{num_rows}_dim{DIM}"
    records = [record_of(workload, op, "ms", "recsdk", times[op]) for op in times]
    records += _deltas(recsdk.table, folder, workload, repetitions)
    keys = _keys(0, num_rows)
    return records + steps_beside_a_save.measure(recsdk.table, keys, folder, workload, repetitions)


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


@dataclass
class _Recsdk:
    table: Table

    def prepare_load(self) -> None:
        self.table = _empty()

    def save(self, path: Path) -> None:
        self.table.save(path)

    def load(self, path: Path) -> None:
        self.table.load(path)


class _Peers:
    """The tensor that the peers write, and read into or in place of."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.tensor = torch.empty(num_bytes // 4).uniform_()


@dataclass
class _OfTensor:
    peers: _Peers

    def prepare_load(self) -> None:
        """Nothing: it is read into the same memory."""


class _PlainFile(_OfTensor):
    def save(self, path: Path) -> None:
        view = self.peers.tensor.numpy().data.cast("B")
        with path.open("wb", buffering=0) as file:
            for begin in range(0, len(view), CHUNK):
                file.write(view[begin : begin + CHUNK])
            os.fsync(file.fileno())

    def load(self, path: Path) -> None:
        view = self.peers.tensor.numpy().data.cast("B")
        with path.open("rb", buffering=0) as file:
            begin = 0
            while count := file.readinto(view[begin : begin + CHUNK]):
                begin += count


class _FreshPlainFile(_PlainFile):
    def prepare_load(self) -> None:
        self.peers.tensor = torch.empty(0)

    def load(self, path: Path) -> None:
        self.peers.tensor = torch.empty(self.peers.num_bytes // 4)
        super().load(path)


class _TorchSave(_OfTensor):
    def prepare_load(self) -> None:
        self.peers.tensor = torch.empty(0)

    def save(self, path: Path) -> None:
        torch.save(self.peers.tensor, path)
        _sync(path)

    def load(self, path: Path) -> None:
        self.peers.tensor = torch.load(path)


class _DcpSave(_OfTensor):
    def save(self, path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save_distributed({"tensor": self.peers.tensor}, checkpoint_id=path, no_dist=True)
        for file in _files(path):
            _sync(file)

    def load(self, path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load_distributed({"tensor": self.peers.tensor}, checkpoint_id=path, no_dist=True)


def _turn(contestant: Contestant, path: Path, num_bytes: int) -> Iterator[tuple[str, float]]:
    """Milliseconds to save and to load once, nothing of it in the page cache before."""
    _remove(path)
    os.sync()
    for op in ("save", "load"):
        if op == "load":
            contestant.prepare_load()
        _touch_memory(num_bytes)
        start = time.perf_counter()
        contestant.save(path) if op == "save" else contestant.load(path)
        yield op, (time.perf_counter() - start) * 1e3
        _forget(path)
    _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def _touch_memory(num_bytes: int) -> None:
    """Has the host back so much free memory, as far as there is."""
    gc.collect()
    np.ones(min(num_bytes, int(_memory_available() * 0.8)), np.uint8)


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
