"""Loading the tables of one model, on one process or on many: all is read before a row changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from recsdk_core import _ext
from recsdk_core._internal.checks import require_callable
from recsdk_core._internal.interruptions import held_back
from recsdk_core.checkpoint.columns import shared_name
from recsdk_core.checkpoint.manifest import METADATA, TableEntry
from recsdk_core.checkpoint.model.shards import Shard, entry_of, row_fields
from recsdk_core.checkpoint.participants import Ranks, begin, share, together
from recsdk_core.checkpoint.reading import (
    MOST_READS,
    Checkpoint,
    CountedOnce,
    Position,
    Progress,
    ReplacedError,
    chain_of,
    position_of,
)
from recsdk_core.checkpoint.replacing import add_shared, check_room, stage_rows
from recsdk_core.checkpoint.restoring import (
    allowances,
    check_table,
    default_entry,
    read_shared,
    stage,
)
from recsdk_core.checkpoint.stores import open_store
from recsdk_core.errors import CheckpointError

if TYPE_CHECKING:
    from recsdk_core.table import Table

__all__ = ["Loading", "load_tables"]

T = TypeVar("T")


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

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError for what cannot be asked for."""
        require_callable("load", progress=self.progress)
        allowances(self.allow)


def load_tables(
    give: Callable[[], tuple[Sequence[Shard], Loading]], ranks: Ranks, path: Any
) -> Checkpoint:
    """Replaces the rows of all ranks' shards; all ranks must call it.

    `give` gives this rank's shards, and how to load, the same on all ranks; what it raises all
    ranks raise. Every rank reads and verifies what it owns, and checks that all of its tables can
    change, before any rank changes a row. If the checkpoint is replaced meanwhile, all of them read
    what is there then. Raises CheckpointError on every rank if one fails.
    """
    given: list[tuple[Sequence[Shard], Loading]] = []

    def start() -> tuple[dict[str, object], list[_Offer]]:
        given.append(give())
        [(shards, loading)] = given
        offers = [_Offer(shard.table.name, shard.table._position) for shard in shards]
        return {"incremental": loading.is_delta, "allow": sorted(loading.allow)}, offers

    offers = [offer for of_rank in begin(ranks, "load", start) for offer in of_rank]
    [(shards, loading)] = given
    once = CountedOnce(loading.progress)
    for number in range(1, MOST_READS + 1):
        counted = replace(loading, progress=once.begin())
        read = _read(shards, offers, ranks, path, counted, is_last=number == MOST_READS)
        if read is not None:
            break
    assert read is not None
    together(ranks, lambda: _each(read.staged, _Staged.check))
    together(ranks, lambda: _adopt_all(read.staged))
    return read.chain[-1]


@dataclass(frozen=True)
class _Offer:
    """What a rank tells the others of a shard."""

    table: str
    position: Position | None


@dataclass(frozen=True)
class _Read:
    """What a rank has read and verified."""

    chain: list[Checkpoint]
    staged: list[_Staged]


def _read(
    shards: Sequence[Shard],
    offers: Sequence[_Offer],
    ranks: Ranks,
    path: Any,
    loading: Loading,
    *,
    is_last: bool,
) -> _Read | None:
    """Reads all; None on all ranks if the checkpoint was replaced meanwhile, unless `is_last`.

    `offers`: of all ranks.
    """
    names = [offer.table for offer in offers]
    chain: list[Checkpoint] = []
    staged: list[_Staged] = []

    def plan() -> str:
        if loading.is_delta:
            chain.extend(_continued([offer.position for offer in offers], path))
        else:
            chain.extend(chain_of(path))
        _check_all(shards, names, chain[-1], loading)
        return chain[-1].hash

    def read() -> list[_Found]:
        staged.extend(_stage(shard, chain, loading) for shard in shards)
        return [one.found for one in staged if one.found is not None]

    def check_user_state() -> bool:
        chain[-1].check_user_state()  # before a row changes
        return True

    if len(set(together(ranks, plan))) > 1:
        if not is_last:
            return None
        raise CheckpointError(f"{path}: the ranks see different checkpoints under this path")
    found = together(ranks, partial(_unless_replaced, read, is_last))
    if any(of_rank is None for of_rank in found):
        return None
    _check_found([one for of_rank in found for one in of_rank or ()], chain[0])
    if share(ranks, partial(_unless_replaced, check_user_state, is_last)) is None:
        return None
    return _Read(chain, staged)


def _unless_replaced(work: Callable[[], T], is_last: bool) -> T | None:
    """What `work` returns; None if the checkpoint was replaced meanwhile, unless `is_last`."""
    try:
        return work()
    except ReplacedError:
        if is_last:
            raise
        return None


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


def _adopt_all(staged: Sequence[_Staged]) -> None:
    with held_back():  # else some tables, or a table without its position, would be as they were
        _each(staged, _Staged.adopt)


def _check_all(
    shards: Sequence[Shard], names: Sequence[str], last: Checkpoint, loading: Loading
) -> None:
    """Raises for what can be refused before a row is read; `names` are of all ranks' tables."""
    for shard in shards:
        if _is_there(shard, last, loading):
            _check(shard, last, loading)
    wanted = {loading.names.get(name, name) for name in names}
    tables = last.manifest.tables
    shared = {shared_name(entry.name) for entry in tables if entry.default is not None}
    found = {entry.whole_name for entry in tables if entry.name not in shared}
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
            f"{path}: an incremental checkpoint follows another: load that first, into all "
            "tables; if its tables have other column ranges, load all of the chain at once"
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
        self.shard.table.learning_rate = self.learning_rate
        self.shard.table._position = self.position


def _stage(shard: Shard, chain: Sequence[Checkpoint], loading: Loading) -> _Staged:
    table = shard.table
    drop_metadata = "eviction" in loading.allow
    position = found = None
    if _is_there(shard, chain[-1], loading):
        entry = _check(shard, chain[-1], loading)
        drop_state = "optimizer" in _allowed(shard, loading) or entry.optimizer is None
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
        check_room(table, restore.num_rows)
        if entry.default is not None and entry.default == default_entry(table):
            _stage_shared(restore, shard, chain, entry, drop_state)
        owner = shard.owner
        found = _Found(entry.name, owner.rank, owner.world_size, num_in_snapshot)
        if _takes_all(shard, entry, loading, drop_state):
            position = position_of(chain)
    else:
        assert shard.assemble is not None
        assembled = shard.assemble(chain, _allowed(shard, loading))
        entry, drop_state = assembled.entry, not assembled.has_state
        restore = stage_rows(table, assembled.rows)
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


def _takes_all(shard: Shard, entry: TableEntry, loading: Loading, drop_state: bool) -> bool:
    """Whether the table is as it was saved, so that a delta may follow: nothing was allowed that
    lost it its identity, or what was kept of its rows."""
    has_metadata = any(item in METADATA for item in entry.fields)
    num_state = sum(item not in METADATA for item in entry.fields) - 1
    has_lost = (
        (drop_state and num_state > 0)
        or ("eviction" in loading.allow and has_metadata)
        or ("admission" in loading.allow and entry.admission is not None)
    )
    return not has_lost and entry.identity == entry_of(shard, None, entry.sharding).identity


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
    time = table.time if eviction is None else eviction.time
    found = eviction if table.admission is None else entry.admission or eviction
    if found is None:
        return _ext.EvictionState(time=time)
    # Leases of a later job may count their steps anew: the next one comes right after.
    return _ext.EvictionState(found.step or 0, None, found.step is not None, time)


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
