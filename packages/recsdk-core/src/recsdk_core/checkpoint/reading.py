"""Opening a checkpoint: its manifest, its files, and the chain that a delta stands on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from recsdk_core import _ext
from recsdk_core._internal.checks import int_within, require_callable
from recsdk_core.checkpoint.manifest import (
    Field,
    Manifest,
    RowsEntry,
    TableEntry,
    UserEntry,
)
from recsdk_core.checkpoint.owners import Owner
from recsdk_core.checkpoint.stores import Source, Store, is_frozen, open_store
from recsdk_core.checkpoint.user_state import MAX_HEADER, check_array, decode_array, unpack
from recsdk_core.errors import CheckpointError

__all__ = [
    "MOST_READS",
    "Beside",
    "Checkpoint",
    "CountedOnce",
    "Position",
    "Progress",
    "ReplacedError",
    "chain_of",
    "check_chain",
    "find_chain",
    "look_beside",
    "open_checkpoint",
    "open_checkpoint_at",
    "position_of",
    "read_whole",
]

T = TypeVar("T")

Progress: TypeAlias = Callable[[int], None]
"""Called with the number of bytes read or written since the last call."""

MOST_READS = 10
"""How often a checkpoint is read that others replace meanwhile, before that is an error."""

_MOST_NAMED = 3
"""The most places that one message names."""


class ReplacedError(CheckpointError):
    """A checkpoint was replaced or removed while it was read."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a checkpoint stands: what a table remembers of its last save or load."""

    hashes: tuple[str, ...]
    """SHA-256 of the bytes of the chain's manifests, the snapshot's first and this one's last."""
    locations: tuple[str, ...]
    """Paths or URLs of the chain, in the same order."""

    @property
    def hash(self) -> str:
        """The hash of this checkpoint's manifest."""
        return self.hashes[-1]

    @property
    def base(self) -> str:
        """The hash of the snapshot that the chain begins with; its own if it is a snapshot."""
        return self.hashes[0]

    @property
    def sequence(self) -> int:
        """Deltas after that snapshot."""
        return len(self.hashes) - 1


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint: its manifest is read and checked, its files are not.

    Thread safety: it is a value; its methods may be called from any thread. All of them raise
    CheckpointError, naming file and reason, for what is missing or damaged.
    """

    store: Store
    """Where it lies."""
    manifest: Manifest
    """What it holds."""
    hash: str
    """SHA-256 of the manifest's bytes; a delta names its parent by it."""

    @property
    def location(self) -> str:
        """Its path or URL."""
        return self.store.location

    @property
    def is_snapshot(self) -> bool:
        """Whether it stands alone."""
        return self.manifest.chain is None

    def table(self, name: str) -> tuple[int, TableEntry]:
        """Index and entry of a table; CheckpointError if there is none of that name."""
        if not isinstance(name, str):
            raise TypeError(f"{self.location}: name must be that of a table, got {name!r}")
        for index, entry in enumerate(self.manifest.tables):
            if entry.name == name:
                return index, entry
        names = [entry.name for entry in self.manifest.tables]
        raise CheckpointError(f"{self.location}: has no table {name!r}; it has {names}")

    def _entry(self, table: int, rank: int) -> TableEntry:
        """The entry of a table that has a file of this rank."""
        int_within("Checkpoint", 0, len(self.manifest.tables), table=table)
        entry = self.manifest.tables[table]
        int_within("Checkpoint", 0, len(entry.files), rank=rank)
        return entry

    @contextmanager
    def rows_file(self, table: int, rank: int) -> Iterator[_ext.RowFile]:
        """Opens a rank's file of a table; a `with` that ends without an error has verified it all.

        Blocks are verified as they are read. The end of the `with` reads the rest.
        """
        entry = self._entry(table, rank)
        header = self.manifest.kind, entry.dim, entry.fields
        with self._row_file(entry.files[rank], *header) as rows:
            yield rows

    @contextmanager
    def _row_file(
        self, file: RowsEntry, kind: str, dim: int, fields: Sequence[Field]
    ) -> Iterator[_ext.RowFile]:
        with self._source(file) as source:
            rows = _ext.RowFile(
                source.read, source.size, source.name, file.num_rows, file.num_erased
            )
            self._check_header(rows, kind, dim, fields, source.name)
            yield rows
            while rows.next_block() is not None:
                pass
            _check_summary(rows.summary(), file, source.name)

    def blocks(self, table: int, rank: int) -> Iterator[_ext.RowBlock]:
        """The blocks of a rank's file, verified, also that its keys are those of this file."""
        with self.rows_file(table, rank) as file:
            yield from self._own_blocks(file, table, rank, self.manifest.tables[table].files)

    def record_blocks(self, table: int, rank: int) -> Iterator[_ext.RowBlock]:
        """As `blocks`, for how often keys without a row were seen; see `records`."""
        admission = self.manifest.tables[table].admission
        assert admission is not None
        with self._row_file(admission.files[rank], "snapshot", 1, admission.fields) as file:
            yield from self._own_blocks(file, table, rank, admission.files)

    def _own_blocks(
        self, file: _ext.RowFile, table: int, rank: int, files: Sequence[RowsEntry]
    ) -> Iterator[_ext.RowBlock]:
        owner = Owner(rank, len(files), self.manifest.tables[table].sharding)
        while (block := file.next_block()) is not None:
            if owner.world_size > 1 and not owner.owns(block.keys).all():
                raise CheckpointError(
                    f"{self.location}/{files[rank].path}: has keys of another file; "
                    "whatever wrote it mixed up its ranks or their rule"
                )
            yield block

    @contextmanager
    def _source(self, file: Any) -> Iterator[Source]:
        try:
            with self.store.open(file.path) as source:
                if source.size != file.num_bytes:
                    raise CheckpointError(
                        f"{source.name}: has {source.size} bytes, {file.num_bytes} were written; "
                        "the file was truncated or changed"
                    )
                yield source
        except CheckpointError as error:
            if isinstance(error, ReplacedError) or not self._is_replaced():
                raise
            raise ReplacedError(
                f"{self.location}: was replaced or removed while it was read ({error}); read it "
                "again, and save to a path of its own what is read during the next save"
            ) from error

    def _is_replaced(self) -> bool:
        """Whether another checkpoint, or none, is there now."""
        try:
            return hashlib.sha256(self.store.read_manifest()).hexdigest() != self.hash
        except CheckpointError:
            return not self._has_manifest()

    def _has_manifest(self) -> bool:
        try:
            return self.store.has_manifest()
        except CheckpointError:
            return True  # it cannot be told

    def _check_header(
        self, rows: _ext.RowFile, kind: str, dim: int, fields: Sequence[Field], name: str
    ) -> None:
        expected = (
            ("token", bytes.fromhex(self.manifest.token), bytes(rows.token)),
            ("kind", kind, rows.kind),
            ("dim", dim, rows.dim),
            ("fields", [(f.name, f.dtype, f.width) for f in fields], list(rows.fields)),
        )
        for what, wanted, got in expected:
            if wanted != got:
                raise CheckpointError(
                    f"{name}: its {what} is {got!r}, its manifest says {wanted!r}; it is a file of "
                    "another checkpoint or table"
                )

    def verify(self, progress: Progress | None = None) -> None:
        """Reads every byte of every file and compares it with its checksum.

        `progress` is called after each file with its number of bytes; together they are
        `manifest.num_bytes`. Raises CheckpointError, naming the file, for what is missing, cut off
        or differs, and what `progress` raises. Deltas are checked alone, without their chain.
        Memory: a block of a file.
        """
        require_callable("verify", progress=progress)
        for index, entry in enumerate(self.manifest.tables):
            for rank, file in enumerate(entry.files):
                for _ in self.blocks(index, rank):
                    pass
                if progress is not None:
                    progress(file.num_bytes)
            for rank, file in enumerate(() if entry.admission is None else entry.admission.files):
                for _ in self.record_blocks(index, rank):
                    pass
                if progress is not None:
                    progress(file.num_bytes)
        for index, user_file in enumerate(self.manifest.user_files):
            self._check_user_file(index)
            if progress is not None:
                progress(user_file.num_bytes)

    def user_state(self) -> Any:
        """The state that the user gave when saving; None if none was given."""
        return self._unpacked(self._user_file)

    def check_user_state(self) -> None:
        """Raises what `user_state` would raise, with a piece of a file in memory at a time."""
        self._unpacked(self._check_user_file)

    def _unpacked(self, read: Callable[[int], Any]) -> Any:
        seen: set[int] = set()

        def read_once(index: int) -> Any:
            if index in seen:
                raise CheckpointError(f"{self.location}: user_state refers twice to file {index}")
            seen.add(index)
            return read(index)

        return unpack(self.manifest.user_state, read_once)

    @contextmanager
    def _user_source(self, index: int) -> Iterator[tuple[UserEntry, Source]]:
        files = self.manifest.user_files
        if index >= len(files):
            raise CheckpointError(
                f"{self.location}: user_state refers to file {index} of {len(files)}"
            )
        with self._source(files[index]) as source:
            yield files[index], source

    def _check_user_file(self, index: int) -> None:
        digest, start = hashlib.sha256(), b""
        with self._user_source(index) as (file, source):
            for piece in source.pieces():
                start = start or piece[:MAX_HEADER]
                digest.update(piece)
        _check_user_checksum(digest.hexdigest(), file, source)
        if file.kind == "array":
            check_array(start, file.num_bytes, source.name)

    def _user_file(self, index: int) -> Any:
        with self._user_source(index) as (file, source):
            raw = source.read_all()
        _check_user_checksum(hashlib.sha256(raw).hexdigest(), file, source)
        return raw if file.kind == "bytes" else decode_array(raw, source.name)


def _check_user_checksum(checksum: str, file: UserEntry, source: Source) -> None:
    if checksum != file.checksum:
        raise CheckpointError(f"{source.name}: its checksum does not match; it was changed")


def _check_summary(summary: _ext.RowFileSummary, file: RowsEntry, name: str) -> None:
    expected = (
        ("checksum", file.checksum, summary.checksum),
        ("number of rows", file.num_rows, summary.num_rows),
        ("number of erased keys", file.num_erased, summary.num_erased),
        ("number of evicted keys", file.num_evicted, summary.num_evicted),
        ("number of expired keys", file.num_expired, summary.num_expired),
    )
    for what, wanted, got in expected:
        if wanted != got:
            raise CheckpointError(
                f"{name}: its {what} is {got}, its manifest says {wanted}; it was changed or "
                "belongs to another rank"
            )


class CountedOnce:
    """Progress of work that may begin anew: bytes that were counted are not counted again."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._most = 0

    def begin(self) -> Progress | None:
        """What counts the bytes of the work from its beginning; None if nobody wants to know."""
        tell, counted = self._progress, 0
        if tell is None:
            return None

        def count(num_bytes: int) -> None:
            nonlocal counted
            counted += num_bytes
            more = counted - self._most
            if more > 0:
                self._most = counted
                tell(more)

        return count


def read_whole(read: Callable[[Progress | None], T], progress: Progress | None = None) -> T:
    """What `read` returns. Calls it again if a checkpoint was replaced meanwhile, a few times.

    It is given what counts its bytes for `progress`. Do not nest it: the times multiply.
    """
    require_callable("a checkpoint", progress=progress)
    once = CountedOnce(progress)
    for _ in range(MOST_READS - 1):
        with suppress(ReplacedError):
            return read(once.begin())
    return read(once.begin())


def open_checkpoint(path: Any) -> Checkpoint:
    """Opens the checkpoint at a path or fsspec URL, reading its manifest only.

    Raises CheckpointError if there is none or its manifest is damaged, ValueError for a path that
    is empty or longer than 1024 characters.
    """
    return open_checkpoint_at(open_store(path))


def open_checkpoint_at(store: Store) -> Checkpoint:
    """As `open_checkpoint`, at a place."""
    raw = store.read_manifest()
    manifest = Manifest.from_bytes(raw, f"{store.location}/manifest.json")
    return Checkpoint(store, manifest, hashlib.sha256(raw).hexdigest())


def chain_of(path: Any | Sequence[Any]) -> list[Checkpoint]:
    """The checkpoints to apply one after the other: a snapshot, then deltas.

    Given one path to a delta, it finds the checkpoints before it, by their hashes, beside it.
    Several paths must be the whole chain, in order. Raises CheckpointError, which names what is
    missing, repeated, out of order, or of another chain; ValueError for no path at all.
    """
    if isinstance(path, (list, tuple)):
        if not path:
            raise ValueError("the chain has no path; give a snapshot's first, then its deltas'")
        chain = [open_checkpoint(one) for one in path]
        check_chain(chain)
        return chain
    return find_chain(open_checkpoint(path))


def find_chain(last: Checkpoint) -> list[Checkpoint]:
    """The chain that ends with a checkpoint; its other links are found beside it."""
    chain = [last]
    if not last.is_snapshot:
        beside = look_beside(last.store)
        found = dict(beside.checkpoints)
        while (link := chain[0].manifest.chain) is not None:
            if link.parent not in found:
                raise CheckpointError(
                    f"{chain[0].location}: delta {link.sequence} of its chain; its parent is "
                    f"missing: no checkpoint beside it has the hash {link.parent}; put it there or "
                    f"give all paths of the chain{beside.unread}"
                ) from next(iter(beside.errors), None)
            chain.insert(0, found.pop(link.parent))
    check_chain(chain)
    return chain


@dataclass(frozen=True)
class Beside:
    """What lies in the same folder as a checkpoint."""

    checkpoints: Mapping[str, Checkpoint]
    """The checkpoints that can be read, by their hashes."""
    errors: Sequence[CheckpointError]
    """Why others cannot be read."""

    @property
    def unread(self) -> str:
        """The end of a message that something was not found."""
        if not self.errors:
            return ""
        named = [str(error) for error in self.errors[:_MOST_NAMED]]
        more = len(self.errors) - len(named)
        return "; what cannot be read was passed over: " + "; ".join(
            [*named, *([f"and {more} more"] if more else [])]
        )


def look_beside(store: Store) -> Beside:
    """The other checkpoints in the same folder; one that cannot be read does not hide the rest."""
    found: dict[str, Checkpoint] = {}
    errors: list[CheckpointError] = []
    stores: Sequence[Store] = []
    try:
        stores = store.siblings()
    except CheckpointError as error:
        errors.append(error)
    for each in stores:
        checkpoint = _open_if_any(each, errors)
        if checkpoint is not None:
            found.setdefault(checkpoint.hash, checkpoint)
    return Beside(found, errors)


def _open_if_any(store: Store, errors: list[CheckpointError]) -> Checkpoint | None:
    """The checkpoint there; None if there is none, or if it cannot be read: then adds the error.

    What was frozen is no checkpoint that could not be read.
    """
    try:
        return open_checkpoint_at(store) if store.has_manifest() else None
    except CheckpointError as error:
        if not is_frozen(store):
            errors.append(error)
        return None


def check_chain(chain: Sequence[Checkpoint]) -> None:
    """Raises CheckpointError, naming the link, unless each builds on the one before it."""
    seen: dict[str, Checkpoint] = {}
    first = chain[0]
    link = first.manifest.chain
    if link is not None:
        for other in chain:
            if other.hash == link.base:
                raise CheckpointError(
                    f"{other.location}: out of order: a chain begins with its snapshot, and this "
                    f"one comes after {first.location}, delta {link.sequence}"
                )
        raise CheckpointError(
            f"{first.location}: a chain begins with a snapshot; this is delta {link.sequence}, and "
            f"the snapshot with hash {link.base} is missing"
        )
    for index, checkpoint in enumerate(chain):
        if checkpoint.hash in seen:
            raise CheckpointError(
                f"{checkpoint.location}: repeated in the chain: it is the same as "
                f"{seen[checkpoint.hash].location}"
            )
        seen[checkpoint.hash] = checkpoint
        if index:
            _check_link(checkpoint, chain[index - 1], index, chain)


def _check_link(
    delta: Checkpoint, before: Checkpoint, index: int, chain: Sequence[Checkpoint]
) -> None:
    link = delta.manifest.chain
    if link is None or link.base != chain[0].hash:
        what = "a snapshot" if link is None else "a delta of another snapshot"
        raise CheckpointError(
            f"{delta.location}: foreign to the chain that begins with {chain[0].location}: it is "
            f"{what}"
        )
    if link.parent == before.hash and link.sequence == index:
        _check_same_tables(delta, before)
        return
    if any(other.hash == link.parent for other in chain):
        raise CheckpointError(
            f"{delta.location}: out of order: it is delta {link.sequence} and does not build on "
            f"{before.location}"
        )
    raise CheckpointError(
        f"{delta.location}: it is delta {link.sequence}, and its parent with hash {link.parent} is "
        f"missing before it (there is {before.location})"
    )


def _check_same_tables(delta: Checkpoint, before: Checkpoint) -> None:
    """Raises unless both have the same tables, apart from what training and resharding change."""

    def identity(checkpoint: Checkpoint) -> dict[str, Any]:
        return {entry.name: entry.identity for entry in checkpoint.manifest.tables}

    own, others = identity(delta), identity(before)
    for name in {**own, **others}:
        if own.get(name) != others.get(name):
            raise CheckpointError(
                f"{delta.location}: its table {name!r} is not that of {before.location}: "
                f"{own.get(name)} and {others.get(name)}"
            )


def position_of(chain: Sequence[Checkpoint]) -> Position:
    """The position of a table that holds what a chain holds."""
    return Position(
        hashes=tuple(checkpoint.hash for checkpoint in chain),
        locations=tuple(checkpoint.store.address for checkpoint in chain),
    )
