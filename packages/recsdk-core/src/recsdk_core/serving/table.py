"""Frozen tables as Python has them.

Shape letters: N keys, B bags, C columns of a matrix, D row width.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Collection, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from recsdk_core import _ext
from recsdk_core._internal.checks import int_of, require_finite
from recsdk_core.checkpoint.stores import naming
from recsdk_core.errors import CheckpointError
from recsdk_core.files import local_path
from recsdk_core.files.paths import is_url
from recsdk_core.serving.chain_folder import ChainFolder, Place
from recsdk_core.serving.following import Follower, Progress, ServingStats
from recsdk_core.serving.manifest import FrozenFileEntry, FrozenManifest, FrozenSource
from recsdk_core.serving.one_freeze import Pinned, of_one_freeze, read_whole

__all__ = ["ServingTable", "followed_table", "open_tables", "pool_serving"]

Array: TypeAlias = Any
"""A numpy array, a torch CPU tensor, or any DLPack CPU array."""

_HEADER_BYTES = 8192
_SECONDS, _SECONDS_OF_URL = 0.1, 2.0
_Name: TypeAlias = tuple[str, str, tuple[int, ...] | None]
_followed: weakref.WeakValueDictionary[_Name, ServingTable] = weakref.WeakValueDictionary()


def open_tables(
    path: Any,
    tables: Collection[str] | None = None,
    *,
    shards: Sequence[int] | None = None,
    token: str | None = None,
) -> dict[str, ServingTable]:
    """Opens tables of the frozen checkpoint at a local path, all of one freeze; returns by name.

    Of tables that are opened one after the other each is of what is there then, which another
    freeze may have replaced meanwhile. `tables`: their names; None: all. `shards` as in
    `ServingTable`. With `token`, that of a manifest, no other freeze is opened. Raises as
    `ServingTable`, and CheckpointError if what is there has another token.
    """
    folder, chosen = local_path(path), _numbers_of(shards)
    if tables is not None:
        are_names = isinstance(tables, (Sequence, Set)) and not isinstance(tables, str)
        if not (are_names and all(isinstance(name, str) for name in tables)):
            raise TypeError(f"open_tables: tables must be names of tables, got {tables!r}")
    if token is not None and not isinstance(token, str):
        raise TypeError(f"open_tables: token must be that of a manifest, got {token!r}")

    def read(manifest: FrozenManifest) -> dict[str, ServingTable]:
        if token not in (None, manifest.token):
            raise CheckpointError(
                f"{folder}: another freeze has replaced the one that was to be opened; let one "
                "freeze write to a folder at a time"
            )
        names = [entry.name for entry in manifest.tables] if tables is None else tables
        opened = partial(ServingTable._of, folder, manifest, shards=chosen)
        return {name: opened(name=name) for name in names}

    return read_whole(folder, read)


class ServingTable:
    """A table of a frozen checkpoint: rows by raw keys, read only, mapped from its files.

    Opening takes the same time whatever the size; processes that open the same files share their
    memory. A server opens it once and keeps it. With `follow` it takes the deltas of the chain that
    the checkpoint was frozen of.

    A pickle has the path only, and opens what is there then, without the deltas; the tables of one
    pickle that were of one freeze are so again, or CheckpointError says that another freeze came
    between them. A copy is the table itself, and serves the same version.

    Thread safety: every method may be called from any thread and at once; reads take no lock, wait
    for nobody and let go of the GIL. After fork both processes go on reading; only the parent goes
    on following, until the child calls `follow` itself.
    """

    def __init__(
        self, path: Any, table: str | None = None, *, shards: Sequence[int] | None = None
    ) -> None:
        """Opens a table of the frozen checkpoint at a local path; for several see `open_tables`.

        `table` may be left out if there is only one. With `shards` only those files are opened, and
        a key of another shard is refused. Raises CheckpointError, naming file and reason, for what
        is missing, damaged in its header, or of another table; ValueError for shards that are not
        there or twice.
        """
        folder = local_path(path)
        if table is not None and not isinstance(table, str):
            raise TypeError(f"table must be the name of a table, got {table!r}")
        chosen = _numbers_of(shards)
        read_whole(folder, lambda manifest: self._open(folder, manifest, table, chosen))

    @classmethod
    def _of(
        cls, folder: Path, manifest: FrozenManifest, *, name: str, shards: tuple[int, ...] | None
    ) -> ServingTable:
        """A table of a manifest that was read before."""
        made = cls.__new__(cls)
        made._open(folder, manifest, name, shards)
        return made

    def _open(
        self,
        folder: Path,
        manifest: FrozenManifest,
        table: str | None,
        shards: tuple[int, ...] | None,
    ) -> None:
        """Opens the files of the manifest."""
        self._manifest, self._shards = manifest, shards
        self._index, self._entry = manifest.table(table, str(folder))
        chosen = range(len(self._entry.files)) if self._shards is None else self._shards
        entries = [self._file(shard) for shard in chosen]
        self._engine = _ext.ServingTable([_sized_file(folder, entry) for entry in entries])
        for entry in entries:
            _check_header(folder, entry)
        self._info = self._engine.info()
        self._check(folder)
        self._path = os.path.abspath(folder)
        self._follower: Follower | None = None
        self._start = Progress(_place_of(manifest.source))

    def _file(self, shard: int) -> FrozenFileEntry:
        count = len(self._entry.files)
        if not 0 <= shard < count:
            raise ValueError(f"shards must be of 0 to {count - 1}, got {shard!r}")
        return self._entry.files[shard]

    def _check(self, folder: Path) -> None:
        """Raises if the files and the manifest tell of different tables."""
        entry = self._entry
        expected = (
            ("name", entry.name),
            ("dim", entry.dim),
            ("dtype", entry.dtype),
            ("num_shards", len(entry.files)),
            ("num_shared", entry.num_shared),
        )
        for what, wanted in expected:
            if self._info[what] != wanted:
                raise CheckpointError(
                    f"{folder}: the {what} of table {entry.name!r} is {wanted!r} in the manifest "
                    f"and {self._info[what]!r} in its files; they do not belong together"
                )

    @property
    def name(self) -> str:
        """Its name."""
        return self._entry.name

    @property
    def dim(self) -> int:
        """Row width."""
        return self._entry.dim

    @property
    def dtype(self) -> str:
        """How rows are stored; all calls give float32."""
        return self._entry.dtype

    @property
    def default_value(self) -> float:
        """What every column of a missing key reads, unless such keys share rows."""
        return float(self._info["default_value"])

    @property
    def num_shared(self) -> int:
        """How many rows missing keys share: each reads one of them; 0: they read the default."""
        return self._entry.num_shared

    @property
    def num_shards(self) -> int:
        """Files that the table is cut into."""
        return len(self._entry.files)

    @property
    def is_whole(self) -> bool:
        """Whether all of them are open."""
        return bool(self._info["is_whole"])

    @property
    def num_bytes(self) -> int:
        """Size of the files that are open; `stats` tells what deltas take beside it."""
        return int(self._info["num_bytes"])

    @property
    def manifest(self) -> FrozenManifest:
        """What the frozen checkpoint holds, and what it was made of."""
        return self._manifest

    @property
    def path(self) -> str:
        """Where the frozen checkpoint lies, as an absolute path."""
        return self._path

    @property
    def shards(self) -> tuple[int, ...] | None:
        """Those that were asked for; None: all."""
        return self._shards

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (of_one_freeze(self._path, self._manifest), self.name, self._shards)

    def __copy__(self) -> ServingTable:
        return self

    def __deepcopy__(self, memo: Any) -> ServingTable:
        return self  # only its follower changes it, for all holders

    def __len__(self) -> int:
        """Rows of the files that are open, with the deltas that were taken."""
        return self._engine.size

    def __repr__(self) -> str:
        return (
            f"ServingTable(name={self.name!r}, dim={self.dim}, dtype={self.dtype!r}, "
            f"rows={len(self)})"
        )

    def lookup(self, keys: Array, *, return_outcomes: bool = False) -> Any:
        """The rows of keys (N,), float32 (N, D).

        A key without a row is MISSING, and reads the default value or the row that it shares. With
        `return_outcomes` returns (values, outcomes uint8 (N,)). Keys may repeat. Raises ValueError
        for a key of a shard that is not open.
        """
        return self._engine.lookup(keys, return_outcomes)

    def pool(
        self,
        keys: Array,
        offsets: Array,
        weights: Array | None = None,
        pooling: str = "sum",
        *,
        return_outcomes: bool = False,
    ) -> Any:
        """Reduces bags of keys to one vector each, float32 (B, D), as `Table.pool` does.

        Of a float32 table the result is that of `Table.pool`, bit for bit. Arguments as there, and
        errors as in `lookup`.
        """
        return self._engine.pool(keys, offsets, weights, pooling, return_outcomes)

    def follow(self, location: Any, *, interval_seconds: float | None = None) -> None:
        """Takes each delta of the table's chain as soon as it is complete, in the background.

        `location` is the folder, a path or an fsspec URL, in which the deltas appear beside each
        other, as `Table.save_delta` and `Saver` write them. They are taken in their order, from the
        checkpoint that was frozen on: each whole or not at all, after every byte of it was
        verified. A call of `lookup` or `pool` reads one version, and never waits. Keys that were
        erased or evicted read what missing ones do from then on. Rows that those share come with
        each delta. Until a delta is complete, and while
        one is missing or damaged, the last good version is served, and `stats` says why; what
        failed is tried again, at first after `interval_seconds`, then ever more rarely. The thread
        ends with `stop_following`, with the table, or with the process.

        `interval_seconds` is how long it waits between two looks: 0.1, for a URL 2.0. Memory while
        a delta is taken: the delta, a copy of it, and some 16 MiB. Rows that deltas have brought
        stay in memory, beside the files, and are gone with the table; a table that is opened anew
        takes the deltas again.

        Raises CheckpointError for a location that cannot be read or is itself a checkpoint;
        ValueError if the table follows already, was frozen from memory and so is of no chain, or
        for an `interval_seconds` that is not above 0.
        """
        interval = _interval_of(interval_seconds)
        progress = self._progress()
        if progress.place is None:
            raise ValueError(
                f"follow: table {self.name!r} was frozen from memory, so it has no place in a "
                "chain; save a checkpoint, freeze that, and save deltas"
            )
        if self._follower is not None and self._follower.is_running:
            raise ValueError(
                f"follow: table {self.name!r} follows already; call stop_following first"
            )
        folder = ChainFolder(location, self.name)
        if interval is None:
            interval = _SECONDS_OF_URL if is_url(folder.location) else _SECONDS
        self._follower = Follower(folder, self._engine, self.name, self._shards, interval, progress)
        weakref.finalize(self, self._follower.ask_to_stop)
        _followed[self._path, self.name, self._shards] = self
        self._follower.start()

    def stop_following(self) -> None:
        """Ends following; the version that is served stays. Nothing if it does not follow."""
        if self._follower is not None:
            self._follower.stop()

    def _progress(self) -> Progress:
        return self._start if self._follower is None else self._follower.progress

    def stats(self) -> ServingStats:
        """What is served, how far it is behind, and what is wrong. Cost: a microsecond."""
        progress = self._progress()
        seen_at, place = progress.seen_at, progress.place
        return ServingStats(
            num_rows=len(self),
            num_deltas=self._engine.num_deltas,
            delta_bytes=self._engine.delta_bytes,
            sequence=None if place is None else place.sequence,
            step=None if place is None else place.step,
            is_following=self._follower is not None and self._follower.is_running,
            num_behind=progress.num_behind,
            seconds_behind=0.0 if seen_at is None else time.monotonic() - seen_at,
            last_seconds=progress.last_seconds,
            num_failures=progress.num_failures,
            problem=progress.problem,
        )

    def verify(self) -> None:
        """Reads every byte and compares it with its checksum; CheckpointError names what differs.

        Cost: reading the files once. Opening does not do it. Deltas were verified when they came.
        """
        self._engine.verify()

    def preload(self) -> None:
        """Has the system read the files into memory, so that no later call waits for a disk."""
        self._engine.preload()


def _interval_of(interval_seconds: float | None) -> float | None:
    if interval_seconds is None:
        return None
    require_finite("follow", interval_seconds=interval_seconds)
    seconds = float(interval_seconds)
    if seconds <= 0:
        raise ValueError(f"follow: interval_seconds must be above 0, got {interval_seconds}")
    return seconds


def _sized_file(folder: Path, entry: FrozenFileEntry) -> bytes:
    """The path of a file, which has the size that the manifest says. Nothing of it is read."""
    path = folder / entry.path
    with naming(str(path), "opening"):
        size = path.stat().st_size
    if size != entry.num_bytes:
        raise CheckpointError(
            f"{path}: has {size} bytes, {entry.num_bytes} were written; it was cut short or changed"
        )
    return os.fsencode(path)


def _check_header(folder: Path, entry: FrozenFileEntry) -> None:
    """Raises if a file is not that of the manifest. The engine has mapped it: it comes into memory
    in huge pages then, and in small ones if it were read before."""
    path = folder / entry.path
    with naming(str(path), "opening"), path.open("rb") as file:
        head = file.read(_HEADER_BYTES)
    if f"{int.from_bytes(head[-8:], 'little'):016x}" != entry.checksum:
        raise CheckpointError(f"{path}: its header is not that of the manifest; it was changed")


def _numbers_of(shards: Sequence[int] | None) -> tuple[int, ...] | None:
    if shards is None:
        return None
    try:
        return tuple(int_of("ServingTable", shards=each) for each in shards)
    except TypeError:
        raise TypeError(
            f"shards must be the numbers of the shards to open, such as [0, 2], got {shards!r}"
        ) from None


def _place_of(source: FrozenSource | None) -> Place | None:
    if source is None:
        return None
    return Place(hash=source.hash, base=source.base, sequence=source.sequence, step=source.step)


def followed_table(path: str, table: str, shards: tuple[int, ...] | None) -> ServingTable | None:
    """The table of this place that follows a chain in this process; None if none does."""
    return _followed.get((path, table, shards))


def _reopen(freeze: Pinned, table: str, shards: tuple[int, ...] | None) -> ServingTable:
    return freeze.read(table, partial(ServingTable._of, freeze.folder, name=table, shards=shards))


def pool_serving(calls: Sequence[tuple[Any, ...]]) -> None:
    """Writes the pooled vectors of bags of many tables, on the calling thread.

    Each call is (table, keys (N,), offsets (B + 1,), out, column), optionally with weights (N,) or
    None, then with the pooling. Bag b goes to `out[b, column : column + D]`; `out` is float32 (at
    least B, C), each row contiguous. All calls are checked before the first is read. Each call
    reads one version of its table; tables that follow a chain do so apart, so two of them may be a
    delta apart. Raises ValueError and TypeError for arrays that do not fit.
    """
    if not isinstance(calls, Sequence):
        raise TypeError(f"pool_serving: calls must be a sequence, got {type(calls).__name__}")
    _ext.pool_serving([_engine_call(call) for call in calls])


def _engine_call(call: tuple[Any, ...]) -> tuple[Any, ...]:
    if not isinstance(call, (tuple, list)) or not call:
        raise TypeError(f"each call must be (table, keys, offsets, out, column), got {call!r}")
    table, *arguments = call
    if not isinstance(table, ServingTable):
        raise TypeError(f"each call must start with a ServingTable, got {type(table).__name__}")
    if len(arguments) > 3 and isinstance(arguments[3], bool):
        raise TypeError(f"column must be an int, got {arguments[3]}")
    return table._engine, *arguments
