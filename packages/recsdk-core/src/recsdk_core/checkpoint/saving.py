"""Writing a checkpoint: every rank its files, rank 0 the manifest, complete at one point."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from typing import Any, Literal, TypeAlias

from recsdk_core import _ext
from recsdk_core._internal.version import __version__
from recsdk_core.checkpoint.manifest import (
    ChainLink,
    Described,
    Field,
    Manifest,
    RowsEntry,
    TableEntry,
    UserEntry,
)
from recsdk_core.checkpoint.ranks import Ranks, share, together
from recsdk_core.checkpoint.reading import Position, Progress
from recsdk_core.checkpoint.stores import Store, Target, write_all
from recsdk_core.checkpoint.user_state import UserFile, pack
from recsdk_core.errors import CheckpointError

__all__ = ["Codec", "Part", "SaveOptions", "WriteRows", "describe", "save_parts"]

Codec: TypeAlias = Literal["none", "zstd"]
WriteRows: TypeAlias = "Callable[[int, Target, bytes, Codec, Progress | None], _ext.RowFileSummary]"
"""Writes a rank's file of rows to a target, with a token and a codec."""

_WRITER = f"recsdk-core {__version__}"


@dataclass(frozen=True, kw_only=True)
class Part:
    """One rank's part of a table that is to be saved."""

    entry: TableEntry
    """Describes the table; equal on all ranks; without files."""
    write: WriteRows
    """Writes a rank's rows."""
    position: Position | None = None
    """For a delta: the checkpoint that its changes are counted from; equal for all parts."""


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """How to save, the same on all ranks."""

    is_delta: bool = False
    """Whether the parts are changes since their position."""
    overwrite: bool = False
    """Whether a checkpoint at the place is replaced; it stays until the new one is complete."""
    step: int | None = None
    """The caller's step, kept in the manifest."""
    user_state: Any = None
    """JSON values, bytes and numpy arrays; rank 0's are kept."""
    codec: Codec = "none"
    """Compression of blocks."""
    world_size: int | None = None
    """How many ranks' files one process writes; None: each process its own."""
    progress: Progress | None = field(default=None, compare=False)
    """Told of the bytes that this rank has written."""


def describe(value: Any) -> Described:
    """The name and arguments of an initializer or optimizer; a function is left out."""
    arguments = {item.name: getattr(value, item.name) for item in dataclass_fields(value)}
    kept = {name: _plain(item) for name, item in arguments.items() if not callable(item)}
    return Described(kind=type(value).__name__, arguments=kept)


def _plain(value: Any) -> Any:
    """As it comes back from JSON."""
    return list(value) if isinstance(value, tuple) else value


def save_parts(store: Store, ranks: Ranks, parts: Sequence[Part], options: SaveOptions) -> Position:
    """Saves the parts of all ranks; all ranks must call it. Where the checkpoint stands.

    Raises CheckpointError on every rank if one of them fails; then nothing was saved, and what was
    at the place is as it was.
    """
    prepared: list[tuple[Any, list[UserFile]]] = []
    together(ranks, lambda: prepared.append(_prepare(store, parts, options)))
    [(packed, user_files)] = prepared
    _check_agreement(ranks, parts)
    token = share(ranks, lambda: secrets.token_hex(16))
    try:
        share(ranks, lambda: store.begin(token, options.overwrite))
        together(ranks, lambda: store.join(token))
        own = range(options.world_size or 0) or [ranks.rank]
        groups = together(
            ranks, lambda: [_write_parts(store, rank, token, parts, options) for rank in own]
        )
        written = [of_rank for group in groups for of_rank in group]

        def complete() -> Position:
            users = _write_user_files(store, token, user_files)
            tables = _tables(parts, written)
            manifest = _manifest(token, len(written), tables, packed, users, parts, options)
            raw = manifest.to_bytes()
            Manifest.from_bytes(raw, store.location)  # what cannot be read is not committed
            store.commit(token, raw)
            return _position(store, parts, options, hashlib.sha256(raw).hexdigest())

        return share(ranks, complete)
    except BaseException:
        if ranks.rank == 0:
            store.abandon(token)
        raise


def _prepare(
    store: Store, parts: Sequence[Part], options: SaveOptions
) -> tuple[Any, list[UserFile]]:
    """What can be refused before anything is written."""
    if any(part.position and store.address in part.position.locations for part in parts):
        raise CheckpointError(
            f"{store.location}: the delta would replace a checkpoint that it builds on; choose "
            "another path"
        )
    if options.is_delta and any(part.position is None for part in parts):
        raise CheckpointError(
            "a delta needs a checkpoint before it: save or load one in full first"
        )
    if len({part.position.hash for part in parts if part.position is not None}) > 1:
        raise CheckpointError(
            "the tables' changes are counted from different checkpoints; save all in full first"
        )
    return pack(options.user_state)


def _check_agreement(ranks: Ranks, parts: Sequence[Part]) -> None:
    """All ranks must save the same tables, as changes since the same checkpoint."""
    own = [(part.entry, None if part.position is None else part.position.hash) for part in parts]
    for rank, others in enumerate(ranks.gather(own)):
        if others != own:
            raise CheckpointError(
                f"rank {rank} saves other tables than rank {ranks.rank}, or changes since another "
                f"checkpoint: {_first_difference(own, others)}"
            )


def _first_difference(own: list[Any], others: list[Any]) -> str:
    for mine, theirs in zip(own, others, strict=False):
        if mine != theirs:
            return f"{mine} and {theirs}"
    return f"{len(own)} and {len(others)} tables"


def _write_parts(
    store: Store, rank: int, token: str, parts: Sequence[Part], options: SaveOptions
) -> list[RowsEntry]:
    entries = []
    for index, part in enumerate(parts):
        path = RowsEntry.path_of(token, index, rank)
        with store.create(token, path) as target:
            done = part.write(rank, target, bytes.fromhex(token), options.codec, options.progress)
        entries.append(
            RowsEntry(
                path=path,
                num_bytes=done.num_bytes,
                checksum=done.checksum,
                num_rows=done.num_rows,
                num_erased=done.num_erased,
            )
        )
    return entries


def _write_user_files(store: Store, token: str, files: Sequence[UserFile]) -> tuple[UserEntry, ...]:
    entries = []
    for index, (kind, content) in enumerate(files):
        path = UserEntry.path_of(token, index)
        with store.create(token, path) as target:
            if isinstance(target, int):
                write_all(target, memoryview(content))
            else:
                target(memoryview(content))
        checksum = hashlib.sha256(content).hexdigest()
        entries.append(UserEntry(path=path, num_bytes=len(content), checksum=checksum, kind=kind))
    return tuple(entries)


def _tables(
    parts: Sequence[Part], written: Sequence[Sequence[RowsEntry]]
) -> tuple[TableEntry, ...]:
    return tuple(
        replace(part.entry, files=tuple(of_rank[index] for of_rank in written))
        for index, part in enumerate(parts)
    )


def _manifest(
    token: str,
    world_size: int,
    tables: tuple[TableEntry, ...],
    packed: Any,
    users: tuple[UserEntry, ...],
    parts: Sequence[Part],
    options: SaveOptions,
) -> Manifest:
    chain = None
    if options.is_delta:
        position = _common_position(parts)
        chain = ChainLink(parent=position.hash, base=position.base, sequence=position.sequence + 1)
    return Manifest(
        token=token,
        chain=chain,
        world_size=world_size,
        step=options.step,
        tables=tables,
        user_state=packed,
        user_files=users,
        writer=_WRITER,
    )


def _common_position(parts: Sequence[Part]) -> Position:
    found = next((part.position for part in parts if part.position is not None), None)
    if found is None:
        raise CheckpointError("a delta of no table cannot be saved; save in full")
    return found


def _position(store: Store, parts: Sequence[Part], options: SaveOptions, digest: str) -> Position:
    if not options.is_delta:
        return Position(hash=digest, base=digest, sequence=0, locations=(store.address,))
    before = _common_position(parts)
    return Position(
        hash=digest,
        base=before.base,
        sequence=before.sequence + 1,
        locations=(*before.locations, store.address),
    )


def fields_of(
    dim: int, state: Sequence[tuple[str, int]], dtype: str = "float32"
) -> tuple[Field, ...]:
    """The fields of a table's rows, weights as `dtype` and state as float32."""
    fields = [Field(name=name, dtype="float32", width=width) for name, width in state]
    return (Field(name="weight", dtype=dtype, width=dim), *fields)
