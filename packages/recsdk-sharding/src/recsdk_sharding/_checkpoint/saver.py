"""Saving and loading the hash tables of a model, sharded or not.

Shape letter: W ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch.distributed as dist
from torch import nn

from recsdk_core import Admit, CheckpointError, Default, Table, init
from recsdk_core.agreement import known
from recsdk_core.checkpoint import Checkpoint, Position
from recsdk_core.checkpoint.model.loading import Loading, load_tables
from recsdk_core.checkpoint.model.saving import save_tables
from recsdk_core.checkpoint.model.shards import Shard
from recsdk_core.checkpoint.owners import Owner
from recsdk_core.checkpoint.participants import OneRank, Ranks, together
from recsdk_core.checkpoint.reading import Progress
from recsdk_core.checkpoint.saving import SaveOptions
from recsdk_core.nn import HashEmbedding, HashEmbeddingBag
from recsdk_core.optim import Optimizer
from recsdk_sharding._checkpoint.recut_columns import assemble, sharding_of
from recsdk_sharding._configs.checking import check_switch, int_of
from recsdk_sharding._configs.initializers import column_initializer
from recsdk_sharding._rows.engine import EngineShard
from recsdk_sharding._rows.row_state import RowSettings
from recsdk_sharding._rows.rows import OwnedShard, TableRows
from recsdk_sharding.exchange import HostExchange, exchanges_of
from recsdk_sharding.exchange.failures import failing_together
from recsdk_sharding.exchange.groups import group_beside, is_of_groups
from recsdk_sharding.placement import layout

__all__ = ["Saver", "joint_ranks"]


class Saver:
    """Saves the hash tables of a model as one checkpoint, and loads them.

    The model may have any mix of hash collections and of `recsdk_core.nn`'s modules, sharded by
    `DistributedModelParallel` or not; torch saves its dense part. With a sharded model every rank
    must call `save` and `load`, with the same arguments, between the same two steps; each rank
    writes the rows that it owns. The first rank writes tables that are replicated or not sharded.
    The others compute, at the same time, what they would write: if that differs, the save is
    refused. If nothing in a model is sharded, one rank saves it, or each to a path of its own.
    Nothing else needs to stop: the checkpoint holds what the finished steps have made, without the
    batches that a pipeline has in flight.

    A checkpoint loads into any number of ranks, either rank rule and any sharding type. A table cut
    by columns is saved as a table for each column range, `<name>.columns_<first>_<last>`, since
    rowwise optimizers keep state for each. Loading into other column ranges puts them together;
    state that a row has one number of becomes the mean over the ranges. The next save must then be
    full, and a chain of deltas is loaded at once, not delta by delta.

    Rows in device memory are loaded through a copy on the host.

    If one rank fails, all raise CheckpointError, and nothing was saved or loaded. Not thread-safe.

    >>> import tempfile, torch
    >>> from recsdk_sharding import HashEmbeddingBagCollection, HashEmbeddingBagConfig, Saver
    >>> tables = [HashEmbeddingBagConfig(name="user", embedding_dim=4, num_embeddings=100)]
    >>> folder = tempfile.mkdtemp()
    >>> _ = Saver().save(HashEmbeddingBagCollection(tables), f"{folder}/first")
    >>> _ = Saver().load(HashEmbeddingBagCollection(tables), f"{folder}/first")
    """

    def __init__(self, rank: int | None = None) -> None:
        """`rank` is this process's rank; None: its rank in the default process group.

        Raises ValueError if it is another.
        """
        own = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        if rank is not None and int_of("Saver: rank", rank) != own:
            raise ValueError(
                f"Saver: rank must be that of this process, {own}, got {rank}; leave it out"
            )

    def save(
        self,
        module: nn.Module,
        path: Any,
        incremental: bool = False,
        *,
        overwrite: bool = False,
        step: int | None = None,
        user_state: Any = None,
        codec: Literal["none", "zstd"] = "none",
        progress: Progress | None = None,
    ) -> Position:
        """Saves all rows; with `incremental`, those changed or gone since the last save or load.

        `path` (1 to 1024 characters) is a folder to make on a file system that all ranks see, or an
        fsspec URL. Other arguments are those of `recsdk_core.Table.save`; rank 0's `user_state`
        counts.

        Raises CheckpointError if it cannot save, if ranks have different rows of a table that is
        whole on each, or if a checkpoint that a delta follows is gone; ValueError for a module
        without hash tables.
        """

        def give() -> tuple[list[Shard], SaveOptions]:
            check_switch("Saver: incremental", incremental)
            options = SaveOptions(
                is_delta=incremental,
                overwrite=overwrite,
                step=step,
                user_state=user_state,
                codec=codec,
                progress=progress,
            )
            return [each.shard() for each in _held_by(module)], options

        with joint_ranks(module) as ranks:
            return save_tables(give, ranks, path)

    def load(
        self,
        module: nn.Module,
        path: Any,
        incremental: bool = False,
        *,
        allow: Collection[str] = (),
        progress: Progress | None = None,
    ) -> Checkpoint:
        """Replaces the rows of all tables by those of a checkpoint.

        `path` is a snapshot, a delta whose predecessors lie beside it, or the list of a chain's
        paths. `incremental`: a delta that follows the checkpoint saved or loaded last. Tables
        without an optimizer take no optimizer state. `allow` is that of `Table.load`. Once all is
        read, gradients accumulated for the next update are dropped. Returns the checkpoint, for its
        `user_state()` and `manifest.step`.

        Raises CheckpointError for what is missing, damaged or does not fit the module, BusyError
        while batches are in flight (abandon them first: `pipeline.drop()`).
        """
        with joint_ranks(module) as ranks, ExitStack() as replacing:
            return self._load(module, ranks, path, incremental, allow, progress, replacing)

    def _load(
        self,
        module: nn.Module,
        ranks: Ranks,
        path: Any,
        incremental: bool,
        allow: Collection[str],
        progress: Progress | None,
        replacing: ExitStack,
    ) -> Checkpoint:
        every = [each for each in module.modules() if isinstance(each, TableRows)]
        held: list[tuple[_Held, Shard]] = []

        def give() -> tuple[list[Shard], Loading]:
            check_switch("Saver: incremental", incremental)
            for rows in () if incremental else every:
                replacing.enter_context(rows.being_replaced())
            held.extend((each, each.shard()) for each in _held_by(module))
            return [shard for _, shard in held], Loading(
                is_delta=incremental,
                allow=allow,
                stateless=[each.owned.table.name for each, _ in held if each.owned.is_stateless],
                progress=progress,
            )

        def take() -> None:
            for each, shard in held:
                each.owned.held.take_loaded(shard.table)
            tables = checkpoint.manifest.tables
            with_state = {t.whole_name for t in tables if len(t.fields) > 1}
            for rows in every:
                rows.note_loaded(has_state=rows.config.name in with_state)

        checkpoint = load_tables(give, ranks, path)
        together(ranks, take)
        return checkpoint


@contextmanager
def joint_ranks(module: nn.Module) -> Iterator[Ranks]:
    """The ranks over which a model's hash tables are spread; inside, one rank's exception raises on
    all.

    Where the ranks do not tell each other, as `begin` and `together` do, the groups are closed; so
    they are for what is no module. A refusal, a CheckpointError that all raise alike, closes
    nothing. Raises TypeError for what is no module.
    """
    exchanges = exchanges_of(module) if isinstance(module, nn.Module) else None
    if exchanges is not None and all(each.world_size == 1 for each in exchanges):
        yield OneRank()
        return
    groups = {each.group for each in exchanges or ()}
    with failing_together(groups.pop() if len(groups) == 1 else None):
        try:
            if not exchanges:
                raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
            yield _ranks_of(exchanges[0])
        except CheckpointError as error:
            if not is_of_groups(error):
                known(error)
            raise


@dataclass(frozen=True)
class _Held:
    """A shard of a table that this rank has."""

    settings: RowSettings
    optimizer: Optimizer | None
    owned: OwnedShard

    def shard(self) -> Shard:
        """The shard to save or load."""
        owned, shard = self.owned, self.owned.shard
        table = owned.held.host_table()
        return Shard(
            table=table,
            cut=owned.held.cutter(table),
            owner=Owner(shard.index, shard.ranks.world_size, sharding_of(shard)),
            columns=None if shard.columns == (0, self.settings.embedding_dim) else shard.columns,
            assemble=partial(assemble, self.settings, self.optimizer, owned, table),
            let_go=None if owned.accumulation is None else owned.accumulation.drop,
            check_idle=owned.held.check_idle,
        )


@dataclass(frozen=True)
class _SettingsOfTable:
    """What rows must fit that are loaded into a table of `recsdk_core`."""

    table: Table

    @property
    def name(self) -> str:
        return self.table.name

    @property
    def embedding_dim(self) -> int:
        return self.table.dim

    @property
    def seed(self) -> int:
        return self.table.seed

    @property
    def admission(self) -> Admit | None:
        return self.table.admission

    @property
    def default(self) -> Default:
        return self.table.default

    def initializer_of(self, columns: tuple[int, int]) -> init.Initializer:
        """Makes those columns of the whole table's initial rows."""
        table = self.table
        if columns == (0, table.dim):
            return table.initializer
        return column_initializer(table.initializer, table.seed, table.name, table.dim, columns)


def _held_by(module: nn.Module) -> list[_Held]:
    """This rank's shards of the module's tables, in order of their names."""
    found: dict[str, list[_Held]] = {}
    for each in module.modules():
        if isinstance(each, TableRows):
            name, held = each.config.name, _held_of_rows(each)
        elif isinstance(each, (HashEmbedding, HashEmbeddingBag)):
            each.check_named()
            name, held = each.table.name, [_whole(each.table)]
        else:
            continue
        if name in found:
            raise ValueError(
                f"two tables of the module are named {name!r}; a checkpoint needs different names"
            )
        found[name] = held
    if not found:
        raise ValueError(
            f"{type(module).__name__} has no hash tables to save or load; pass the model that has "
            "them"
        )
    return [shard for name in sorted(found) for shard in found[name]]


def _held_of_rows(rows: TableRows) -> list[_Held]:
    shards = rows.shards  # makes the tables, and then knows the optimizer
    return [_Held(rows.config, rows.optimizer, shard) for shard in shards]


def _whole(table: Table) -> _Held:
    """The only shard of the table in a module of `recsdk_core.nn`."""
    return _Held(
        _SettingsOfTable(table),
        table.optimizer,
        OwnedShard(
            table.name,
            layout.Shard.whole(table.dim),
            EngineShard(table),
            accumulation=None,
            is_stateless=False,
        ),
    )


class _GroupRanks:
    """The ranks of a host group, over a gloo group of its own, since the host group may be busy."""

    def __init__(self, host: dist.ProcessGroup) -> None:
        self._group = group_beside(host)
        self.rank: int = dist.get_rank(self._group)
        self.world_size: int = dist.get_world_size(self._group)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks."""
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value, group=self._group)
        return found


_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, _GroupRanks] = weakref.WeakKeyDictionary()


def _ranks_of(exchange: HostExchange) -> Ranks:
    """The ranks of an exchange, which may be busy with batches ahead."""
    host = exchange.group
    if exchange.world_size == 1:
        return OneRank()
    if host not in _groups:
        exchange.meet()
        _groups[host] = _GroupRanks(host)
    return _groups[host]
