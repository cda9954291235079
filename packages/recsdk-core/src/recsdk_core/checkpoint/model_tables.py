"""Saving and loading the tables of one model, on one process or on many.

Shape letters: N keys, D row width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from recsdk_core import _ext
from recsdk_core._internal.packed_state import unpack_state
from recsdk_core.admission import Admit
from recsdk_core.checkpoint.columns import base_of, shared_name
from recsdk_core.checkpoint.manifest import (
    METADATA,
    EvictionEntry,
    Field,
    Sharding,
    TableEntry,
)
from recsdk_core.checkpoint.owners import Owner
from recsdk_core.checkpoint.participants import Ranks, share, together
from recsdk_core.checkpoint.reading import (
    Checkpoint,
    Position,
    Progress,
    chain_of,
    position_of,
)
from recsdk_core.checkpoint.records import Records, admission_entry
from recsdk_core.checkpoint.replacing import NewRows, add_shared, stage_rows
from recsdk_core.checkpoint.restoring import check_table, default_entry, read_shared, stage
from recsdk_core.checkpoint.saving import (
    Codec,
    SaveOptions,
    ShardFile,
    describe,
    fields_of,
    save_shards,
)
from recsdk_core.checkpoint.stores import Store, Target, open_store
from recsdk_core.errors import CapacityError, CheckpointError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from recsdk_core.table import Table

__all__ = [
    "Assembled",
    "Cuts",
    "Loading",
    "Shard",
    "ShardCut",
    "load_tables",
    "row_fields",
    "save_tables",
]


@dataclass(frozen=True, kw_only=True)
class Assembled:
    """Rows that were put together from a checkpoint's tables with other columns."""

    rows: NewRows
    """The rows, with the state of the table's optimizer."""
    entry: TableEntry
    """One of the tables that they come from, for its count of updates and learning rate."""


Assemble: TypeAlias = "Callable[[Sequence[Checkpoint], Collection[str]], Assembled]"
"""Makes a shard's rows from a chain, given what may differ; CheckpointError if some are missing."""


class ShardCut(Protocol):
    """What a shard holds at one moment, of rows that are in no table, until `finish`."""

    update_count: int
    log_decay: float
    eviction: _ext.EvictionState | None
    """Where the clock of eviction and admission stands, if the table has one of them."""
    admission: tuple[NDArray[np.int64], ...] | None
    """Keys without a row, how often they were seen, and the step that saw each last, int64 (m,)
    each, if the table has admission."""
    shared_rows: tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]] | None
    """The rows that keys without one share: keys (n,), weights (n, D), packed state; None: none."""

    @property
    def num_rows(self) -> int:
        """Rows to save."""

    @property
    def num_erased(self) -> int:
        """Keys that left."""

    def write(
        self, target: Target, token: bytes, codec: Codec, progress: Progress | None
    ) -> _ext.RowFileSummary:
        """Writes a file of rows."""

    def finish(self, durable: bool) -> None:
        """Ends it; durable: changes are counted from here, else as if it had never been."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One rank's shard of a table."""

    table: Table
    """The rows; if there is a `cut`, what describes them."""
    owner: Owner = field(default_factory=Owner)
    """Which keys belong here."""
    name: str | None = None
    """The table's name in checkpoints; None: its own. The name of a column range says which
    columns, see `columns.name_of`."""
    assemble: Assemble | None = None
    """Makes its rows from a checkpoint that has the table cut into other column ranges."""
    cut: Callable[[bool], ShardCut] | None = None
    """Cuts rows that are elsewhere: all of them, or what changed."""
    let_go: Callable[[], None] | None = None
    """Releases batches that are done but would keep its rows from being replaced; called when all
    of a checkpoint is read."""
    check_idle: Callable[[], None] | None = None
    """Raises BusyError if rows that follow those of the table cannot be replaced now."""

    @property
    def label(self) -> str:
        """The table's name in checkpoints."""
        return self.table.name if self.name is None else self.name


class Cuts:
    """What the shards of one rank hold now, until `finish`; training may go on meanwhile."""

    def __init__(
        self,
        shards: Sequence[Shard],
        is_delta: bool,
        max_copy_bytes: int | None = None,
        *,
        one_thread: bool = False,
    ) -> None:
        """`one_thread`: saving takes one thread, not two: for saving beside training."""
        self._shards = shards
        self.cuts: list[Any] = []  # `_ext.Cut` each, or what the shard's `cut` gives
        self.files: list[ShardFile] = []
        """The shards as `save_shards` takes them."""
        with ExitStack() as undo:
            undo.callback(self.finish, None)
            for shard in shards:
                cut = _cut(shard, is_delta, max_copy_bytes)
                self.cuts.append(cut)
                self.files.append(_shard_file(shard, cut, is_delta, one_thread))
                if cut.shared_rows is not None:
                    self.files.append(_shared_file(shard, cut, is_delta))
            undo.pop_all()

    @property
    def num_bytes(self) -> int:
        """About how many bytes they take in files."""
        total = 0
        for shard, cut in zip(self._shards, self.cuts, strict=True):
            width = sum(item.width for item in row_fields(shard.table))
            total += cut.num_rows * (8 + 4 * width) + cut.num_erased * 8
            total += 0 if shard.table.admission is None else 24 * len(cut.admission[0])
        return total

    def finish(self, position: Position | None) -> None:
        """Ends the cuts; a position given is where the shards then stand.

        The position is set first: as soon as a cut has ended, another thread may take the next one.
        """
        for shard, cut in zip(self._shards, self.cuts, strict=False):  # `open` may have failed
            if position is not None:
                shard.table._position = position
            cut.finish(position is not None)

    def save(self, store: Store, ranks: Ranks, options: SaveOptions) -> Position:
        """Saves and ends the cuts; if that fails, their changes still count for the next delta."""
        position = None
        try:
            position = save_shards(store, ranks, self.files, options)
        finally:
            self.finish(position)
        return position


def save_tables(shards: Sequence[Shard], ranks: Ranks, path: Any, options: SaveOptions) -> Position:
    """Saves the shards of all ranks as one checkpoint; all ranks must call it.

    The rows are cut at once, before any rank waits for another. Raises CheckpointError on every
    rank if one fails; then nothing was saved.
    """
    made: list[tuple[Store, Cuts]] = []
    try:
        together(ranks, lambda: made.append((open_store(path), Cuts(shards, options.is_delta))))
    except BaseException:
        for _, cuts in made:
            cuts.finish(None)
        raise
    [(store, cuts)] = made
    return cuts.save(store, ranks, options)


def _cut(shard: Shard, is_delta: bool, max_copy_bytes: int | None) -> _ext.Cut | ShardCut:
    shard.table._check_cut(is_delta)
    if shard.cut is not None:
        return shard.cut(is_delta)
    return shard.table._engine.cut(is_delta, max_copy_bytes)


def _shard_file(
    shard: Shard, cut: _ext.Cut | ShardCut, is_delta: bool, one_thread: bool
) -> ShardFile:
    def write(
        target: Target, token: bytes, codec: Codec, progress: Progress | None
    ) -> _ext.RowFileSummary:
        if not isinstance(cut, _ext.Cut):
            return cut.write(target, token, codec, progress)
        told = None if progress is None else _differences(progress)
        return _ext.write_rows(
            cut,
            target.write,
            token=token,
            codec=codec,
            progress=told,
            name=target.name,
            in_background=not one_thread,
            sums_content=target.sums_content,
        )

    admission = shard.table.admission
    return ShardFile(
        entry=entry_of(shard, cut, shard.owner.sharding),
        write=write,
        index=shard.owner.rank,
        num_shards=shard.owner.world_size,
        position=shard.table._position if is_delta else None,
        records=None if admission is None else partial(_records_of, admission, cut),
    )


def _shared_file(shard: Shard, cut: _ext.Cut | ShardCut, is_delta: bool) -> ShardFile:
    """The rows that keys without one share, all that the shard has; a delta has them all, too."""
    table, own = shard.table, cut.shared_rows
    assert own is not None
    is_owned = shard.owner.owns(own[0])
    keys, weights, packed = own[0][is_owned], own[1][is_owned], own[2][is_owned]
    state = unpack_state(packed, table.state_fields) if table.state_fields else {}
    fields = fields_of(table.dim, table.state_fields)

    def write(
        target: Target, token: bytes, codec: Codec, progress: Progress | None
    ) -> _ext.RowFileSummary:
        return _ext.write_row_file(
            target.write,
            kind="delta" if is_delta else "snapshot",
            dim=table.dim,
            fields=[(each.name, each.dtype, each.width) for each in fields],
            blocks=[_ext.RowBlock.rows(keys, {"weight": weights, **state})] if len(keys) else [],
            token=token,
            codec=codec,
            name=target.name,
            sums_content=target.sums_content,
        )

    entry = entry_of(shard, cut, shard.owner.sharding)
    return ShardFile(
        entry=replace(
            entry,
            name=shared_name(entry.name),
            fields=fields,
            default=None,
            eviction=None,
            admission=None,
        ),
        write=write,
        index=shard.owner.rank,
        num_shards=shard.owner.world_size,
        position=table._position if is_delta else None,
    )


def _records_of(rule: Admit, cut: Any) -> Records:
    return Records.of_rule(rule, cut.admission)


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How to load, the same on all ranks."""

    is_delta: bool = False
    """Whether the checkpoint is to follow the one that the tables were saved to or loaded from."""
    names: dict[str, str] = field(default_factory=dict)
    """The checkpoint's name of a table, where it is not the table's own."""
    allow: Collection[str] = ()
    """What may differ; see `restoring.ALLOWANCES`."""
    may_lack: bool = False
    """Whether the checkpoint may have tables that are not loaded."""
    stateless: Collection[str] = ()
    """Names of tables without an optimizer, which take no state."""
    progress: Progress | None = None
    """Called with the bytes that this rank has read."""


def load_tables(shards: Sequence[Shard], ranks: Ranks, path: Any, loading: Loading) -> Checkpoint:
    """Replaces the rows of all ranks' shards; all ranks must call it.

    Every rank reads and verifies what it owns, and checks that all of its tables can change, before
    any rank changes a row. Raises CheckpointError on every rank if one fails.
    """
    names = [name for of_rank in ranks.gather([s.label for s in shards]) for name in of_rank]
    positions = ranks.gather([shard.table._position for shard in shards])
    chains: list[list[Checkpoint]] = []

    def plan() -> str:
        if loading.is_delta:
            chains.append(_continued([p for of_rank in positions for p in of_rank], path))
        else:
            chains.append(chain_of(path))
        _check_all(shards, names, chains[0][-1], loading)
        return chains[0][-1].hash

    if len(set(together(ranks, plan))) > 1:
        raise CheckpointError(f"{path}: the ranks see different checkpoints under this path")
    staged: list[_Staged] = []

    def read() -> list[_Found]:
        staged.extend(_stage(shard, chains[0], loading) for shard in shards)
        return [one.found for one in staged if one.found is not None]

    _check_found([one for of_rank in together(ranks, read) for one in of_rank], chains[0][0])
    share(ranks, lambda: chains[0][-1].check_user_state())  # before a row changes
    together(ranks, lambda: _each(staged, _Staged.check))
    together(ranks, lambda: _each(staged, _Staged.adopt))
    return chains[0][-1]


@dataclass(frozen=True)
class _Found:
    """What a rank has found in a snapshot for one of its shards."""

    table: str
    index: int
    num_shards: int
    num_rows: int


def _check_found(found: Sequence[_Found], snapshot: Checkpoint) -> None:
    """Raises if rows of a table belong to no rank, such as keys in the files of other ranks."""
    of_shards: dict[tuple[str, int], dict[int, int]] = {}
    for one in found:
        of_shards.setdefault((one.table, one.num_shards), {})[one.index] = one.num_rows
    for (name, num_shards), counts in of_shards.items():
        _, entry = snapshot.table(name)
        total = sum(counts.values())
        if len(counts) == num_shards and total != entry.num_rows:
            raise CheckpointError(
                f"{snapshot.location}: table {name!r} has {entry.num_rows} rows, but the ranks "
                f"found {total} by its sharding rule; whatever wrote it mixed up its ranks"
            )


def _each(staged: Sequence[_Staged], call: Callable[[_Staged], None]) -> None:
    for one in staged:
        call(one)


def _check_all(
    shards: Sequence[Shard], names: Sequence[str], last: Checkpoint, loading: Loading
) -> None:
    """Raises for what can be refused before a row is read; `names` are of all ranks' shards."""
    for shard in shards:
        if _is_there(shard, last, loading):
            _check(shard, last, loading)
    wanted = {base_of(loading.names.get(name, name)) for name in names}
    tables = last.manifest.tables
    shared = {shared_name(entry.name) for entry in tables if entry.default is not None}
    found = {base_of(entry.name) for entry in tables if entry.name not in shared}
    if found - wanted and not loading.may_lack:
        raise CheckpointError(
            f"{last.location}: has tables {sorted(found - wanted)} that are not in the module, "
            f"which has {sorted(wanted)}"
        )


def _continued(positions: Sequence[Position | None], path: Any) -> list[Checkpoint]:
    """The position of all tables, and the delta at `path` that follows it, as a chain."""
    position = positions[0] if len(set(positions)) == 1 else None
    if position is None:
        raise CheckpointError(
            f"{path}: an incremental checkpoint follows another: load that first, into all tables"
        )
    if position.locations[-1] == open_store(path).address:
        return chain_of(list(position.locations))
    chain = chain_of([*position.locations, path])
    if chain[-2].hash != position.hash:
        raise CheckpointError(f"{chain[-2].location}: was replaced since it was saved or loaded")
    return chain


def _name_in(loading: Loading, shard: Shard) -> str:
    return loading.names.get(shard.label, shard.label)


def _is_there(shard: Shard, last: Checkpoint, loading: Loading) -> bool:
    """Whether the checkpoint has the shard's table with the same columns."""
    name = _name_in(loading, shard)
    return shard.assemble is None or any(entry.name == name for entry in last.manifest.tables)


def _check(shard: Shard, last: Checkpoint, loading: Loading) -> TableEntry:
    table, allow = shard.table, _allowed(shard, loading)
    return check_table(table, row_fields(table), last, _name_in(loading, shard), allow)


def _allowed(shard: Shard, loading: Loading) -> Collection[str]:
    """What may differ of a shard."""
    return {*loading.allow, *(["optimizer"] if shard.table.name in loading.stateless else [])}


@dataclass(frozen=True)
class _Staged:
    """Rows that were read but are not yet in the table."""

    shard: Shard
    location: str
    restore: _ext.Restore
    update_count: int
    log_decay: float
    learning_rate: float
    position: Position | None
    found: _Found | None
    eviction: _ext.EvictionState

    def check(self) -> None:
        """Raises what `adopt` would raise."""
        if self.shard.let_go is not None:
            self.shard.let_go()
        try:
            self.restore.check(self.update_count, self.log_decay)
        except ValueError as error:
            raise CheckpointError(f"{self.location}: {error}") from None
        if self.shard.check_idle is not None:
            self.shard.check_idle()

    def adopt(self) -> None:
        """Puts them into the table."""
        self.restore.commit(self.update_count, self.log_decay, self.eviction)
        self.shard.table._time = self.eviction.time
        self.shard.table.learning_rate = self.learning_rate
        self.shard.table._position = self.position


def _stage(shard: Shard, chain: Sequence[Checkpoint], loading: Loading) -> _Staged:
    table = shard.table
    is_there = _is_there(shard, chain[-1], loading)
    position = found = None
    if is_there:
        entry = _check(shard, chain[-1], loading)
        drop_state = "optimizer" in _allowed(shard, loading) or entry.optimizer is None
        drop_metadata = "eviction" in loading.allow
        restore, num_in_snapshot = stage(
            table._engine,
            chain,
            entry.name,
            shard.owner,
            drop_state=drop_state,
            drop_metadata=drop_metadata,
            has_admission=table.admission is not None and "admission" not in loading.allow,
            progress=loading.progress,
        )
        owner = shard.owner
        if entry.default is not None and entry.default == default_entry(table):
            _stage_shared(restore, shard, chain, entry, drop_state)
        found = _Found(entry.name, owner.rank, owner.world_size, num_in_snapshot)
        # A delta would not chain if the load allowed another identity or other state.
        is_same = entry.identity == entry_of(shard, None, entry.sharding).identity
        has_metadata = any(item in METADATA for item in entry.fields)
        num_state = sum(item not in METADATA for item in entry.fields) - 1
        has_lost = (drop_state and num_state > 0) or (drop_metadata and has_metadata)
        has_lost |= entry.admission is not None and "admission" in loading.allow
        position = position_of(chain) if is_same and not has_lost else None
    else:
        assert shard.assemble is not None
        assembled = shard.assemble(chain, _allowed(shard, loading))
        entry, drop_state = assembled.entry, False
        drop_metadata = "eviction" in loading.allow
        restore = stage_rows(table, assembled.rows)
    # With eviction the lowest leave.
    is_limited = table.max_rows is not None and table.eviction is None
    if is_limited and restore.num_rows > (table.max_rows or 0):
        raise CapacityError(
            f"table {table.name!r}: {restore.num_rows} rows to load do not fit into its "
            f"max_rows, {table.max_rows}; raise max_rows"
        )
    # Rows whose last decay is unknown have none to catch up.
    catches_up = any(name == "log_decay" for name, _ in table.state_fields)
    return _Staged(
        shard,
        chain[-1].location,
        restore,
        entry.update_count,
        entry.log_decay if catches_up or not drop_state else 0.0,
        _learning_rate(table, entry, chain[-1]),
        position,
        found,
        _clock(table, entry, drop_metadata),
    )


def _stage_shared(
    restore: _ext.Restore,
    shard: Shard,
    chain: Sequence[Checkpoint],
    entry: TableEntry,
    drop_state: bool,
) -> None:
    if shard.table.default.kind != "shared_rows":
        return
    rows = read_shared(chain, entry.name, shard.owner, drop_state=drop_state)
    try:
        add_shared(restore, shard.table, rows)
    except ValueError as error:
        raise CheckpointError(f"{chain[-1].location}: {error}") from None


def _clock(table: Table, entry: TableEntry, drop_metadata: bool) -> _ext.EvictionState:
    """Where the clock of a table stands once its rows are loaded."""
    eviction = None if drop_metadata or table.eviction is None else entry.eviction
    time = table._time if eviction is None else eviction.time
    found = eviction if table.admission is None else entry.admission or eviction
    if found is None:
        return _ext.EvictionState(time=time)
    # Leases of a later job may count their steps anew: the next one comes right after.
    return _ext.EvictionState(found.step or 0, None, found.step is not None, time)


def row_fields(table: Table) -> tuple[Field, ...]:
    """The fields of a table's rows."""
    return fields_of(table.dim, table.state_fields, table.dtype, table.eviction)


def entry_of(shard: Shard, cut: _ext.Cut | ShardCut | None, sharding: Sharding) -> TableEntry:
    """The manifest's entry of a shard's table, as of a cut if given, without files."""
    table = shard.table
    return TableEntry(
        name=shard.label,
        dim=table.dim,
        seed=table.seed,
        initializer=describe(table.initializer),
        default_value=float(table.default.value),
        optimizer=describe(table.optimizer),
        update_count=table.update_count if cut is None else cut.update_count,
        log_decay=table.log_decay if cut is None else cut.log_decay,
        eviction=_eviction_entry(table, cut),
        admission=admission_entry(table, cut),
        default=default_entry(table),
        fields=row_fields(table),
        sharding=sharding,
        files=(),
    )


def _eviction_entry(table: Table, cut: _ext.Cut | ShardCut | None) -> EvictionEntry | None:
    state = None if cut is None else cut.eviction
    if table.eviction is None or state is None:
        return None
    return EvictionEntry(
        rule=describe(table.eviction),
        step=state.step if state.is_begun else None,
        time=state.time,
    )


def _learning_rate(table: Table, entry: TableEntry, checkpoint: Checkpoint) -> float:
    """The saved learning rate; the table's own if another optimizer was saved."""
    if entry.optimizer is None or entry.optimizer.kind != type(table.optimizer).__name__:
        return table.learning_rate
    rate = entry.optimizer.arguments.get("lr")
    try:
        if isinstance(rate, bool) or not isinstance(rate, (int, float)):
            raise ValueError(f"lr must be a number, got {rate!r}")
        return replace(table.optimizer, lr=float(rate)).lr
    except (ValueError, OverflowError) as error:
        raise CheckpointError(
            f"{checkpoint.location}: table {entry.name!r}: its optimizer cannot be read: {error}"
        ) from None


def _differences(progress: Progress) -> Callable[[int], None]:
    """Turns the bytes so far into the bytes since the last call."""
    last = 0

    def call(num_bytes: int) -> None:
        nonlocal last
        progress(num_bytes - last)
        last = num_bytes

    return call
