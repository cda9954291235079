"""Pooling from frozen tables, beside general stores of bytes by key: LMDB, RocksDB and Redis.

Each store has the same int8 rows under the same 64-bit keys. RocksDB and Redis get all keys of a
call at once; of LMDB each key is read by itself, which is faster than its call for many. numpy then
widens the rows and adds them up. Redis runs as a server of its own on a socket of this machine; its
processor time counts as the client's does. What single bags take is time on the wall. A store that
cannot run stands in the errors.

Shape letters: N keys, B bags, D row width.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks import records
from benchmarks.draws import draw_indexes, scramble
from recsdk_core import Table
from recsdk_core.serving import ServingTable, freeze

DIM, NUM_BAGS, BAG_LENGTH = 64, 256, 20
ROW_BYTES = DIM + 8  # with its scale and bias
SEED, NUM_BATCHES, NUM_SINGLE = 3, 8, 2000
ROWS_AT_ONCE = 20_000


class Store(Protocol):
    """Rows as bytes, by keys as bytes."""

    def put(self, keys: list[bytes], rows: list[bytes]) -> None:
        """Stores rows."""

    def get(self, keys: list[bytes]) -> list[bytes]:
        """The rows of keys, in their order."""

    def num_bytes(self) -> int:
        """What it takes, on disk or in memory."""

    def cpu_seconds(self) -> float:
        """Of processes beside this one."""

    def reopen(self) -> None:
        """Closes it, and opens it again."""


class Lmdb:
    """An environment of LMDB, mapped."""

    def __init__(self, folder: Path, num_rows: int) -> None:
        self.folder, self.size = folder, num_rows * ROW_BYTES * 4 + (1 << 26)
        self._open()

    def _open(self) -> None:
        import lmdb

        self.env: Any = lmdb.open(str(self.folder), map_size=self.size, sync=False, lock=False)
        self.read: Any = self.env.begin(buffers=True)

    def put(self, keys: list[bytes], rows: list[bytes]) -> None:
        with self.env.begin(write=True) as write, write.cursor() as cursor:
            cursor.putmulti(list(zip(keys, rows, strict=True)))
        self.read = self.env.begin(buffers=True)

    def get(self, keys: list[bytes]) -> list[bytes]:
        read = self.read.get
        return [read(key) for key in keys]

    def num_bytes(self) -> int:
        return sum(file.stat().st_blocks * 512 for file in self.folder.iterdir())

    def cpu_seconds(self) -> float:
        return 0.0

    def reopen(self) -> None:
        del self.read
        self.env.close()
        self._open()


class RocksDb:
    """A database of RocksDB, compacted before it is read."""

    def __init__(self, folder: Path, num_rows: int) -> None:
        self.folder = folder
        self._open()

    def _open(self) -> None:
        import rocksdict

        self.db: Any = rocksdict.Rdict(str(self.folder), rocksdict.Options(raw_mode=True))

    def put(self, keys: list[bytes], rows: list[bytes]) -> None:
        import rocksdict

        batch: Any = rocksdict.WriteBatch(raw_mode=True)
        for key, row in zip(keys, rows, strict=True):
            batch.put(key, row)
        self.db.write(batch)

    def get(self, keys: list[bytes]) -> list[bytes]:
        found: list[bytes] = self.db.get(keys)
        return found

    def num_bytes(self) -> int:
        self.db.flush()
        self.db.compact_range(None, None)
        return sum(file.stat().st_size for file in self.folder.glob("*.sst"))

    def cpu_seconds(self) -> float:
        return 0.0

    def reopen(self) -> None:
        self.db.close()
        self._open()


class Redis:
    """A server of Redis on a socket in a folder; nothing else reaches it."""

    def __init__(self, folder: Path, num_rows: int) -> None:
        self.folder = folder
        folder.mkdir()
        self._open()
        self._empty = int(self.client.info("memory")["used_memory"])

    def _open(self) -> None:
        import redis.backoff
        import redis.retry

        program = shutil.which("redis-server")
        if program is None:
            raise RuntimeError(
                "there is no redis-server on the PATH; Debian's package has its name"
            )
        socket = self.folder / "socket"
        options = ["--port", "0", "--unixsocket", str(socket), "--dir", str(self.folder)]
        quiet = ["--save", "", "--loglevel", "warning"]
        self.server = subprocess.Popen([program, *options, *quiet], stdout=subprocess.DEVNULL)
        retry = redis.retry.Retry(redis.backoff.ConstantBackoff(0.01), 6000)
        self.client: Any = redis.Redis(unix_socket_path=str(socket), retry=retry)
        self.client.ping()

    def put(self, keys: list[bytes], rows: list[bytes]) -> None:
        self.client.mset(dict(zip(keys, rows, strict=True)))

    def get(self, keys: list[bytes]) -> list[bytes]:
        found: list[bytes] = self.client.mget(keys)
        return found

    def num_bytes(self) -> int:
        return int(self.client.info("memory")["used_memory"]) - self._empty

    def cpu_seconds(self) -> float:
        ran = Path(f"/proc/{self.server.pid}/schedstat").read_text().split()[0]
        return int(ran) / 1e9

    def reopen(self) -> None:
        self.client.save()
        self.close()
        self._open()

    def close(self) -> None:
        self.client.close()
        self.server.terminate()
        self.server.wait()


KINDS: dict[str, Callable[[Path, int], Any]] = {"lmdb": Lmdb, "rocksdb": RocksDb, "redis": Redis}


def batches_of(num_rows: int, count: int, num_bags: int) -> list[np.ndarray]:
    """Keys of bags, by a power law."""
    random = np.random.default_rng(SEED)
    ids = scramble(np.arange(1, num_rows + 1))
    size = num_bags * BAG_LENGTH
    return [ids[draw_indexes(random, num_rows, size, "zipf")] for _ in range(count)]


def quantized(weights: np.ndarray) -> list[bytes]:
    """Rows of int8 with scale and bias, as FBGEMM lays them out."""
    low = weights.min(1, keepdims=True)
    scale = (weights.max(1, keepdims=True) - low) / 255
    words = np.rint((weights - low) / scale).astype(np.uint8)
    return [row.tobytes() for row in np.hstack([words, scale.view(np.uint8), low.view(np.uint8)])]


def pooled(rows: list[bytes]) -> np.ndarray:
    """Sums of bags of rows, float32 (B, D)."""
    raw = np.frombuffer(b"".join(rows), np.uint8).reshape(-1, ROW_BYTES)
    scale_bias = np.ascontiguousarray(raw[:, DIM:]).view(np.float32)
    floats = raw[:, :DIM] * scale_bias[:, :1] + scale_bias[:, 1:]
    return np.asarray(floats.reshape(-1, BAG_LENGTH, DIM).sum(1))


def pool(store: Store, keys: np.ndarray) -> np.ndarray:
    words = keys.tobytes()
    return pooled(store.get([words[i : i + 8] for i in range(0, len(words), 8)]))


@contextmanager
def filled(num_rows: int) -> Iterator[tuple[ServingTable, dict[str, Store], dict[str, str]]]:
    """Our table and the stores, with the same rows; and why a store could not run."""
    parent = Path(__file__).resolve().parents[2] / "build" / "bench"
    parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=parent)))
        stores: dict[str, Store] = {}
        errors: dict[str, str] = {}
        for name, make in KINDS.items():
            try:
                stores[name] = store = make(folder / name, num_rows)
            except (ImportError, OSError, RuntimeError) as error:
                errors[name] = str(error)
                continue
            if isinstance(store, Redis):
                stack.callback(store.close)
        table = Table(dim=DIM, name="bench")
        random = np.random.default_rng(SEED)
        every = scramble(np.arange(1, num_rows + 1))
        every = every[
            np.argsort(every.view(np.uint64).byteswap())
        ]  # as trees of bytes like it best
        for first in range(0, num_rows, ROWS_AT_ONCE):
            keys = every[first : first + ROWS_AT_ONCE]
            count = len(keys)
            weights = random.standard_normal((count, DIM), dtype=np.float32)
            table.upsert(keys, weights)
            rows, names = quantized(weights), [key.tobytes() for key in keys]
            for store in stores.values():
                store.put(names, rows)
        table.save(folder / "checkpoint")
        freeze(folder / "checkpoint", folder / "frozen", dtype="int8")
        served = ServingTable(folder / "frozen")
        served.preload()
        yield served, stores, errors


def single_p99(call: Callable[[Any], object], bags: Sequence[Any]) -> float:
    """Microseconds that one of a hundred bags takes longer than, each alone."""
    seconds = []
    for bag in bags:
        began = time.perf_counter()
        call(bag)
        seconds.append(time.perf_counter() - began)
    return float(np.percentile(seconds, 99)) * 1e6


def run_case(num_rows: int, repetitions: int) -> list[records.Record]:
    """One table beside the stores."""
    batches, bags = batches_of(num_rows, NUM_BATCHES, NUM_BAGS), batches_of(num_rows, NUM_SINGLE, 1)
    ends = np.arange(0, NUM_BAGS * BAG_LENGTH + 1, BAG_LENGTH)
    with filled(num_rows) as (served, stores, errors):
        size = {"ours": [served.num_bytes / num_rows]}
        size |= {name: [store.num_bytes() / num_rows] for name, store in stores.items()}
        calls: dict[str, Callable[[np.ndarray], Any]] = {
            name: lambda keys, store=store: pool(store, keys)  # type: ignore[misc]
            for name, store in stores.items()
        }
        calls["ours"] = lambda keys: served.pool(keys, ends[: len(keys) // BAG_LENGTH + 1])
        for call in calls.values():
            np.testing.assert_allclose(call(batches[0]), calls["ours"](batches[0]), atol=1e-3)

        def clock() -> float:
            return time.process_time() + sum(each.cpu_seconds() for each in stores.values())

        def all_of(call: Callable[[np.ndarray], Any]) -> Callable[[], object]:
            return lambda: [call(keys) for keys in batches]

        order = ["ours", *stores]
        took = records.race({name: all_of(calls[name]) for name in order}, repetitions, clock)
        a_batch = {name: [ms / NUM_BATCHES for ms in each] for name, each in took.items()}
        single: dict[str, list[float]] = {name: [] for name in order}
        for _ in range(repetitions):
            for name in order:
                single[name].append(single_p99(calls[name], bags))
        opens: dict[str, Callable[[], object]] = {
            name: store.reopen for name, store in stores.items() if name != "redis"
        }
        path = served.path
        opened = records.race({"ours": lambda: ServingTable(path), **opens}, repetitions)
        name = f"zipf1.05_{num_rows:.0e}_dim{DIM}_int8".replace("e+0", "e")
        of_batch = f"{name}_bags{NUM_BAGS}x{BAG_LENGTH}"
        of_one = f"{name}_bags1x{BAG_LENGTH}"
        return [
            records.record_of(of_batch, "pool a batch", "ms", "ours", a_batch, errors),
            records.record_of(of_one, "p99 of a bag", "us", "ours", single, errors),
            records.record_of(name, "a key with its row", "bytes", "ours", size, errors),
            records.record_of(name, "open", "ms", "ours", opened, errors),
        ]
