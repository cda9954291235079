"""Writes a checkpoint: every rank writes its files, rank 0 the manifest, which completes it."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from functools import partial
from itertools import compress
from typing import Any, Literal, TypeAlias

from recsdk_core import _ext
from recsdk_core._internal.checks import (
    int_if_given,
    require_bool,
    require_callable,
    require_one_of,
)
from recsdk_core._internal.version import __version__
from recsdk_core.checkpoint.admission_records import Records
from recsdk_core.checkpoint.columns import all_tables
from recsdk_core.checkpoint.manifest import (
    METADATA,
    ChainLink,
    Described,
    Field,
    Manifest,
    RowsEntry,
    TableEntry,
    UserEntry,
    path_of_counts,
    path_of_rows,
    path_of_user_file,
)
from recsdk_core.checkpoint.participants import Ranks, refuse_different, share, together
from recsdk_core.checkpoint.reading import Position, Progress, look_beside
from recsdk_core.checkpoint.stores import Store, Target, open_store
from recsdk_core.checkpoint.user_state import PackedState, UserFile, pack
from recsdk_core.errors import CheckpointError
from recsdk_core.eviction import Evict
from recsdk_core.virtual_shards import NUM_VIRTUAL_SHARDS

__all__ = ["Codec", "ShardFile", "SaveOptions", "WriteRows", "describe", "fields_of", "save_shards"]

Codec: TypeAlias = Literal["none", "zstd"]
WriteRows: TypeAlias = "Callable[[Target, bytes, Codec, Progress | None], _ext.RowFileSummary]"
"""Writes a file of rows to a target, with a token and a codec."""

_WRITER = f"recsdk-core {__version__}"
_REMEDY = "shard it, or give each rank's a name of its own"


@dataclass(frozen=True, kw_only=True)
class ShardFile:
    """One file of a table to save: a shard of its rows."""

    entry: TableEntry
    """Describes the table, without files; equal for all of its shards."""
    write: WriteRows
    """Writes the rows."""
    index: int = 0
    """Which of the table's shards this is, by its sharding rule."""
    num_shards: int = 1
    """How many there are, on all ranks."""
    position: Position | None = None
    """For a delta: the checkpoint that its changes are counted from; equal for all shards."""
    records: Callable[[], Records] | None = None
    """How often keys without a row were seen, if the table has a rule of admission."""


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """How to save, the same on all ranks."""

    is_delta: bool = False
    """Whether to save the changes since the shards' position."""
    overwrite: bool = False
    """Whether a checkpoint at the place is replaced; it stays until the new one is complete."""
    step: int | None = None
    """The caller's step, kept in the manifest."""
    user_state: Any = None
    """JSON values, bytes and numpy arrays; rank 0's are kept."""
    codec: Codec = "none"
    """Compression of blocks."""
    world_size: int | None = None
    """The number of ranks to name in the manifest; None: the number of those that save."""
    progress: Progress | None = field(default=None, compare=False)
    """Called with the bytes that this rank has written."""

    def __post_init__(self) -> None:
        """Takes any integer as the step; TypeError or ValueError for what cannot be kept."""
        require_bool("save", delta=self.is_delta, overwrite=self.overwrite)
        require_one_of("save", ("none", "zstd"), codec=self.codec)
        require_callable("save", progress=self.progress)
        most = NUM_VIRTUAL_SHARDS + 1
        world_size = int_if_given("save", 1, most, world_size=self.world_size)
        object.__setattr__(self, "world_size", world_size)
        object.__setattr__(self, "step", int_if_given("save", 0, 2**63, step=self.step))

    @property
    def shared(self) -> dict[str, object]:
        """What must be the same on all ranks, by its name in `save`."""
        return {
            "incremental": self.is_delta,
            "overwrite": self.overwrite,
            "step": self.step,
            "codec": self.codec,
        }


def describe(value: Any) -> Described:
    """The name and arguments of an initializer, optimizer or rule.

    A function is left out; of that which a rule of eviction goes by the name is kept.
    """
    arguments = {item.name: getattr(value, item.name) for item in dataclass_fields(value)}
    kept = {name: _plain(item) for name, item in arguments.items() if not callable(item)}
    if isinstance(value, Evict) and value.places is not None:
        kept["places"] = getattr(value.places, "__qualname__", type(value.places).__qualname__)
    return Described(kind=type(value).__name__, arguments=kept)


def _plain(value: Any) -> Any:
    """The value as it comes back from JSON."""
    return list(value) if isinstance(value, tuple) else value


def save_shards(
    store: Store, ranks: Ranks, shards: Sequence[ShardFile], options: SaveOptions
) -> Position:
    """Saves the shards of all ranks; all ranks must call it. Returns where the checkpoint stands.

    If several ranks have a shard, the first of them writes it. The others sum up what they would
    have written, which must be the same rows, in any order. Raises CheckpointError on every rank
    if one of them fails or differs; then nothing was saved, and what was at the place is unchanged.
    """
    prepared: list[PackedState] = []
    together(ranks, lambda: prepared.append(pack(options.user_state)))
    [packed] = prepared
    plan = _plan(store, ranks, shards, options)
    share(ranks, lambda: _check_chain(store, plan.position, options.overwrite))
    token = share(ranks, lambda: secrets.token_hex(16))
    try:
        share(ranks, lambda: store.begin(token, options.overwrite))
        together(ranks, lambda: store.join(token))
        written = together(
            ranks, lambda: _write_shards(store, ranks.rank, token, shards, plan, options)
        )
        refuse_different([of_rank.copies for of_rank in written], "different rows", _REMEDY)

        def complete() -> Position:
            files = {place: file for of_rank in written for place, file in of_rank.files.items()}
            counts = {place: file for of_rank in written for place, file in of_rank.counts.items()}
            users = _write_user_files(store, token, packed.files)
            manifest = Manifest(
                token=token,
                chain=plan.link if options.is_delta else None,
                world_size=options.world_size or ranks.world_size,
                step=options.step,
                tables=plan.tables_with(files, counts),
                user_state=packed.value,
                user_files=users,
                writer=_WRITER,
            )
            raw = manifest.to_bytes()
            Manifest.from_bytes(raw, store.location)  # what cannot be read is not committed
            store.commit(token, raw)
            return _next_position(store, plan.position, hashlib.sha256(raw).hexdigest())

        return share(ranks, complete)
    except BaseException:
        if ranks.rank == 0:
            store.abandon(token)
        raise


_Place: TypeAlias = tuple[int, int]
"""Index of a table in the manifest, and of a file among its files."""


@dataclass
class _Plan:
    """What all ranks together save."""

    position: Position | None
    """The position that a delta follows."""
    entries: list[TableEntry] = field(default_factory=list)
    """Without files."""
    tables: dict[str, int] = field(default_factory=dict)
    """Where a table is among them."""
    holders: list[dict[int, list[int]]] = field(default_factory=list)
    """For each table, by a shard's index: the ranks that have the shard; the first writes it."""

    @property
    def link(self) -> ChainLink:
        """The delta's place in its chain."""
        assert self.position is not None
        before = self.position
        return ChainLink(parent=before.hash, base=before.base, sequence=before.sequence + 1)

    def add(self, rank: int, offer: _Offer) -> None:
        """Notes a shard that a rank has."""
        table = self.tables.setdefault(offer.entry.name, len(self.tables))
        if table == len(self.entries):
            self.entries.append(offer.entry)
            self.holders.append({})
        holders = self.holders[table]
        if rank in holders.get(offer.index, ()):
            raise _named_twice(offer.entry.name)
        if self.entries[table] != offer.entry:
            first = min(ranks[0] for ranks in holders.values())
            if first == rank:
                raise _named_twice(offer.entry.name)
            raise CheckpointError(
                f"ranks {first} and {rank} save different tables as {offer.entry.name!r}: "
                f"{self.entries[table]} and {offer.entry}"
            )
        holders.setdefault(offer.index, []).append(rank)

    def check_whole_tables(self) -> None:
        """Raises if two of them have one name where ranges of columns are put together."""
        names: set[str] = set()
        for table in all_tables(self.entries):
            if table.name in names:
                raise _named_twice(table.name)
            names.add(table.name)

    def tables_with(
        self, files: dict[_Place, RowsEntry], counts: dict[_Place, RowsEntry]
    ) -> tuple[TableEntry, ...]:
        """The manifest's entries."""
        made = []
        for table, (entry, holders) in enumerate(zip(self.entries, self.holders, strict=True)):
            rows = tuple(files[table, index] for index in sorted(holders))
            admission = entry.admission
            if admission is not None:
                of_shards = tuple(counts[table, index] for index in sorted(holders))
                admission = replace(admission, files=of_shards)
            made.append(replace(entry, files=rows, admission=admission))
        return tuple(made)


def _named_twice(name: str) -> CheckpointError:
    return CheckpointError(
        f"two tables would be named {name!r} in the checkpoint, where ranges of columns, and rows "
        "that keys share, are tables as well; rename the table of that name"
    )


@dataclass(frozen=True)
class _Offer:
    """What a rank tells the others of a shard."""

    entry: TableEntry
    index: int
    num_shards: int
    position: Position | None


def _plan(store: Store, ranks: Ranks, shards: Sequence[ShardFile], options: SaveOptions) -> _Plan:
    """The same on all ranks, or the same error."""
    offers = ranks.gather(
        [_Offer(shard.entry, shard.index, shard.num_shards, shard.position) for shard in shards]
    )
    every = [(rank, offer) for rank, of_rank in enumerate(offers) for offer in of_rank]
    plan = _Plan(_common_position([o for _, o in every]) if options.is_delta else None)
    for rank, offer in every:
        plan.add(rank, offer)
    plan.check_whole_tables()
    for _, offer in every:
        holders = plan.holders[plan.tables[offer.entry.name]]
        if sorted(holders) != list(range(offer.num_shards)):
            raise CheckpointError(
                f"{store.location}: table {offer.entry.name!r} is cut into {offer.num_shards} "
                f"shards, but the ranks have only {sorted(holders)}; every rank must save the model"
            )
    return plan


def _common_position(offers: Sequence[_Offer]) -> Position:
    """The position that the changes of all shards are counted from."""
    positions = {None if o.position is None else o.position.hash: o.position for o in offers}
    if None in positions or not positions:
        raise CheckpointError(
            "a delta needs a checkpoint before it: save or load one in full first"
        )
    if len(positions) > 1:
        raise CheckpointError(
            "the tables' changes are counted from different checkpoints; save all in full first"
        )
    [position] = positions.values()
    assert position is not None
    return position


def _check_chain(store: Store, position: Position | None, overwrite: bool) -> None:
    """Raises for a delta that would replace a checkpoint that it builds on, or whose chain is gone.

    Cost: reads the manifest of each link.
    """
    if position is None:
        return
    if overwrite:
        _refuse_own_chain(store, position)
    lost: dict[str, tuple[str, list[Exception]]] = {}
    for digest, location in zip(position.hashes, position.locations, strict=True):
        errors: list[Exception] = []
        if _digest(partial(open_store, location), errors) != digest:
            lost[digest] = location, errors
    if not lost:
        return
    beside = look_beside(store)  # loading finds them there, where they may have been moved
    for digest, (location, errors) in lost.items():
        if digest not in beside.checkpoints:
            raise CheckpointError(
                f"{store.location}: the delta builds on {location}, which is gone, cannot be read, "
                "or is not the checkpoint that was saved or loaded; save in full, or put it back"
                f"{beside.unread}"
            ) from next(iter(errors), None)


def _refuse_own_chain(store: Store, position: Position) -> None:
    """Raises if a checkpoint of the chain is at the place, under whatever name."""
    if _digest(lambda: store, []) in position.hashes or store.address in position.locations:
        raise CheckpointError(
            f"{store.location}: the delta would replace a checkpoint that it builds on; choose "
            "another path"
        )


def _digest(open_it: Callable[[], Store], errors: list[Exception]) -> str | None:
    """The hash of the checkpoint there, if one can be read; adds the error if not."""
    try:
        return hashlib.sha256(open_it().read_manifest()).hexdigest()
    except (CheckpointError, ValueError) as error:
        errors.append(error)
        return None


@dataclass(frozen=True)
class _Written:
    """What a rank has written."""

    files: dict[_Place, RowsEntry] = field(default_factory=dict)
    counts: dict[_Place, RowsEntry] = field(default_factory=dict)
    """Of keys without a row."""
    copies: dict[str, str] = field(default_factory=dict)
    """By table, if other ranks have it too: what rows it wrote or would have written."""


def _write_shards(
    store: Store,
    rank: int,
    token: str,
    shards: Sequence[ShardFile],
    plan: _Plan,
    options: SaveOptions,
) -> _Written:
    """Writes this rank's share of the shards, and sums up what others write for it.

    Of that the order is left out: where evicted keys leave their rows to new ones depends on which
    batches are in flight.
    """
    written = _Written()
    for shard in shards:
        table = plan.tables[shard.entry.name]
        holders = plan.holders[table][shard.index]
        path = path_of_rows(token, table, shard.index)
        has_copies = len(holders) > 1
        if holders[0] == rank:
            with store.create(token, path) as target:
                target = replace(target, sums_content=has_copies)
                done = shard.write(target, bytes.fromhex(token), options.codec, options.progress)
            written.files[table, shard.index] = _entry_of(path, done)
            if shard.records is not None:
                path = path_of_counts(token, table, shard.index)
                with store.create(token, path) as target:
                    kept = shard.records().write(target, bytes.fromhex(token), options.codec)
                written.counts[table, shard.index] = _entry_of(path, kept)
        else:
            nowhere = Target(lambda _: None, path, sums_content=has_copies)
            done = shard.write(nowhere, bytes.fromhex(token), options.codec, None)
        if has_copies:
            label = "" if shard.num_shards == 1 else f", shard {shard.index}"
            content = f"{done.num_rows} {done.num_erased} {done.content}"
            written.copies[shard.entry.name + label] = content
    return written


def _entry_of(path: str, done: _ext.RowFileSummary) -> RowsEntry:
    return RowsEntry(
        path=path,
        num_bytes=done.num_bytes,
        checksum=done.checksum,
        num_rows=done.num_rows,
        num_erased=done.num_erased,
        num_evicted=done.num_evicted,
        num_expired=done.num_expired,
    )


def _write_user_files(store: Store, token: str, files: Sequence[UserFile]) -> tuple[UserEntry, ...]:
    entries = []
    for index, (kind, content) in enumerate(files):
        path = path_of_user_file(token, index)
        with store.create(token, path) as target:
            target.write_all(memoryview(content))
        checksum = hashlib.sha256(content).hexdigest()
        entries.append(UserEntry(path=path, num_bytes=len(content), checksum=checksum, kind=kind))
    return tuple(entries)


def _next_position(store: Store, before: Position | None, digest: str) -> Position:
    if before is None:
        return Position(hashes=(digest,), locations=(store.address,))
    return Position(hashes=(*before.hashes, digest), locations=(*before.locations, store.address))


def fields_of(
    dim: int,
    state: Sequence[tuple[str, int]],
    dtype: str = "float32",
    eviction: Evict | None = None,
) -> tuple[Field, ...]:
    """The fields of a table's rows: weights as `dtype`, state as float32, what eviction keeps."""
    fields = [Field(name=name, dtype="float32", width=width) for name, width in state]
    weight = Field(name="weight", dtype=dtype, width=dim)
    return (weight, *fields, *(() if eviction is None else _metadata(eviction)))


def _metadata(rule: Evict) -> Iterator[Field]:
    is_kept = (
        True,
        rule.by == "time",
        rule.order == "lfu" or rule.rare_count is not None or "count" in rule.columns,
        rule.order == "score" or "score" in rule.columns,
        rule.order == "show_click",
        rule.order == "show_click_totals",
        rule.order == "show_click_totals",
        rule.order == "low_norm",
        rule.order == "function",
        rule.min_age > 0,
    )
    return compress(METADATA, is_kept)
