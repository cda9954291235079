"""Moves rows of torchrec's own tables into hash tables, and back.

Shape letters: N ids, D row width.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from recsdk_core.checkpoint.participants import Ranks, begin, together
from recsdk_sharding._checkpoint.dense_state import (
    Agreed,
    DenseTable,
    Description,
    agree,
    read_dense_table,
)
from recsdk_sharding._checkpoint.saver import joint_ranks
from recsdk_sharding._checkpoint.tensor_parts import Piece, join
from recsdk_sharding._rows.optimizers import set_learning_rate
from recsdk_sharding._rows.row_state import fields_of
from recsdk_sharding._rows.rows import OwnedShard, TableRows

__all__ = ["export_rows", "import_rows"]


def import_rows(
    module: nn.Module,
    state_dict: Mapping[str, Any],
    ids: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, Any] | None = None,
) -> None:
    """Puts rows of dense tables into a model's hash tables, as a warm start.

    `state_dict` has, for each table in `ids`, one entry whose name is `<table>.weight` or ends in
    `.<table>.weight`: a tensor (N, D), as from torchrec's EmbeddingBagCollection or an
    nn.ModuleDict of nn.EmbeddingBag, or a ShardedTensor or DTensor of that size, as from torchrec's
    DistributedModelParallel. `ids` int64 (N,) has the raw id of each row. The row of an id that has
    one already is overwritten.

    `optimizer`: the `state_dict()` of torchrec's optimizer of these tables
    (`model.fused_optimizer`, or torch's in a KeyedOptimizerWrapper). Its state, which must have the
    fields and shapes of the hash table's, becomes that of the rows. Its `step`, which Adam and its
    like must have, becomes the table's `update_count`, unless that is higher. A table also takes
    its learning rate if param_groups were saved (`save_param_groups(True)`). None: optimizer state
    is made fresh, and learning rates stay.

    Every rank of a sharded model calls it with the same ids, in the same order of tables, and keeps
    the rows that it owns, on the host or in device memory. The tensors may be spread over the same
    ranks in any way. Cost: for each 65,536 rows of a table, two exchanges in which each rank gets
    these rows and their state from all ranks; one if every rank has the whole table.

    Raises KeyError, TypeError or ValueError for what cannot be translated, CapacityError if a table
    has no room for its rows, and BusyError while batches are in flight; on ranks other than the one
    that failed, CheckpointError. Then nothing has changed on any rank. (A rank that runs out of
    memory later leaves the rows that were written by then.)
    """
    given: list[_Given] = []

    def read() -> tuple[dict[str, object], list[Description]]:
        _require_dicts(state_dict=state_dict, ids=ids)
        if optimizer is not None and not isinstance(optimizer, Mapping):
            raise TypeError(f"optimizer must be a state_dict, got {type(optimizer).__name__}")
        tables = _tables_of(module)
        for name, keys in ids.items():
            given.append(_Given.read(_table(tables, name), keys, state_dict, optimizer))
        return _said({each.rows.config.name: each.keys for each in given}), [
            each.dense.description for each in given
        ]

    with joint_ranks(module) as ranks:
        told = begin(ranks, "import_rows", read)
        agreed = _agree(given, told)
        together(ranks, partial(_check_room, given))
        for each, of_table in zip(given, agreed, strict=True):
            each.write(of_table, ranks)
        together(ranks, partial(_set_counts, given, agreed))


_ROWS_AT_ONCE = 65536


@dataclass(frozen=True)
class _Given:
    """The rows for one table."""

    rows: TableRows
    keys: NDArray[np.int64]
    dense: DenseTable

    @staticmethod
    def read(
        rows: TableRows,
        ids: torch.Tensor,
        state_dict: Mapping[str, Any],
        optimizer: Mapping[str, Any] | None,
    ) -> _Given:
        """Reads what this rank has. Raises for what cannot be read."""
        name = rows.config.name
        keys = _keys(name, ids)
        different, counts = np.unique(keys, return_counts=True)
        if len(different) < len(keys):
            first = different[counts > 1][0]
            raise ValueError(f"ids of {name!r} must not repeat, got {first} again; give each once")
        return _Given(rows, keys, read_dense_table(name, state_dict, optimizer))

    def agree(self, told: Sequence[Description]) -> Agreed:
        """What all ranks have."""
        shape = len(self.keys), self.rows.config.embedding_dim
        return agree(self.rows.config.name, shape, self.rows.optimizer, told)

    def check_room(self) -> None:
        """Raises BusyError or CapacityError if the tables cannot take the rows."""
        for each in self.rows.shards:
            nothing = self.keys[:0], np.zeros((0, each.shard.width), np.float32)
            each.table.upsert(*nothing, **_marks(each.table))
            keys = self.keys[each.shard.ranks.owned_by(each.shard.index, self.keys)]
            each.held.check_room(keys)

    def write(self, agreed: Agreed, ranks: Ranks) -> None:
        """Puts what this process owns into its tables."""
        for first in range(0, len(self.keys), _ROWS_AT_ONCE):
            keys = self.keys[first : first + _ROWS_AT_ONCE]
            own = partial(self._pieces, agreed, first, first + len(keys))
            told = [own()] if agreed.is_everywhere else together(ranks, own)
            together(ranks, partial(self._write_rows, keys, told))

    def _pieces(self, agreed: Agreed, first: int, last: int) -> dict[str, list[Piece]]:
        """This rank's pieces of a range of rows: state by field, and "weight"."""
        own = {field: self.dense.state.get(name) for field, name in agreed.state.items()}
        return {
            field: [] if tensor is None else tensor.rows(first, last)
            for field, tensor in {"weight": self.dense.weight, **own}.items()
        }

    def _write_rows(self, keys: NDArray[np.int64], told: list[dict[str, list[Piece]]]) -> None:
        """Writes the rows that these pieces of all ranks make up."""
        dim = self.rows.config.embedding_dim
        fields = {"weight": 0, **fields_of(self.rows.optimizer)}
        widths = {field: width for field, width in fields.items() if field in told[0]}
        found = {
            field: join((len(keys), width or dim), (p for own in told for p in own[field]))
            for field, width in widths.items()
        }
        for each in self.rows.shards:
            owned = each.shard.ranks.owned_by(each.shard.index, keys)
            columns = slice(*each.shard.columns)
            cut = {
                field: value[owned] if widths[field] else value[owned, columns]
                for field, value in found.items()
            }
            given = keys[owned], cut.pop("weight"), cut or None
            each.table.upsert(*given, **_marks(each.table))

    def set_counts(self, agreed: Agreed) -> None:
        """Sets the number of updates and the learning rate to the dense optimizer's."""
        if agreed.num_updates is not None:
            for each in self.rows.shards:
                each.table.update_count = max(each.table.update_count, agreed.num_updates)
        if agreed.learning_rate is not None:
            set_learning_rate(self.rows, agreed.learning_rate)


def _check_room(given: Sequence[_Given]) -> None:
    for each in given:
        each.check_room()


def _set_counts(given: Sequence[_Given], agreed: Sequence[Agreed]) -> None:
    for each, of_table in zip(given, agreed, strict=True):
        each.set_counts(of_table)


def _agree(given: Sequence[_Given], told: Sequence[Sequence[Description]]) -> list[Agreed]:
    """What all ranks have of each table. Raises on all ranks alike for what does not fit."""
    return [each.agree([of_rank[at] for of_rank in told]) for at, each in enumerate(given)]


def export_rows(module: nn.Module, ids: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The rows of ids, for dense tables: float32 (N, D) by `<table>.weight`.

    `ids` has int64 (N,) by table; an id without a row reads the table's default. Every rank of a
    sharded model calls it with the same ids, in the same order of tables, and gets all rows. If one
    rank fails, the others raise CheckpointError.
    """
    wanted: dict[str, tuple[TableRows, NDArray[np.int64]]] = {}

    def read() -> tuple[dict[str, object], None]:
        _require_dicts(ids=ids)
        tables = _tables_of(module)
        wanted.update({name: (_table(tables, name), _keys(name, ids[name])) for name in ids})
        return _said({name: keys for name, (_, keys) in wanted.items()}), None

    with joint_ranks(module) as ranks:
        begin(ranks, "export_rows", read)
        return {f"{name}.weight": _gathered(ranks, *of_table) for name, of_table in wanted.items()}


def _said(ids: Mapping[str, NDArray[np.int64]]) -> dict[str, object]:
    """What ranks tell each other of the ids that they were given."""
    shown = {
        f"ids[{name!r}]": f"{len(keys)} ids, crc {zlib.crc32(keys.tobytes()):08x}"
        for name, keys in ids.items()
    }
    return {"list(ids)": list(ids), **shown}


def _gathered(ranks: Ranks, table: TableRows, keys: NDArray[np.int64]) -> torch.Tensor:
    """The rows of a table's keys, of all ranks: float32 (N, D)."""
    own = together(ranks, lambda: [_rows_of(keys, each) for each in table.shards])
    rows = np.empty((len(keys), table.config.embedding_dim), np.float32)
    for of_rank in own:
        for at, (first, last), values in of_rank:
            rows[at, first:last] = values
    return torch.from_numpy(rows)


def _tables_of(module: nn.Module) -> dict[str, TableRows]:
    tables: dict[str, TableRows] = {}
    for each in module.modules():
        if isinstance(each, TableRows) and tables.setdefault(each.config.name, each) is not each:
            raise ValueError(
                f"two tables of the model are named {each.config.name!r}; pass the part of the "
                "model that has the one that is meant"
            )
    return tables


def _require_dicts(**arguments: object) -> None:
    for name, value in arguments.items():
        if not isinstance(value, Mapping):
            raise TypeError(f"{name} must be a dict by table, got {type(value).__name__}")


def _table(tables: Mapping[str, TableRows], name: str) -> TableRows:
    if name not in tables:
        raise KeyError(f"the model has no hash table {name!r}; it has {sorted(tables)}")
    return tables[name]


def _rows_of(
    keys: NDArray[np.int64], owned: OwnedShard
) -> tuple[NDArray[np.int64], tuple[int, int], NDArray[np.float32]]:
    """Which of the keys belong to a shard, its columns, and their rows."""
    own = np.flatnonzero(owned.shard.ranks.owned_by(owned.shard.index, keys))
    return own, owned.shard.columns, owned.table.lookup(keys[own])


def _marks(table: Any) -> dict[str, Any]:
    """What a rule by time takes with rows of which no time is known: before all others."""
    rule = getattr(table, "eviction", None)
    return {"times": -(2**63)} if rule is not None and rule.by == "time" else {}


def _keys(name: str, keys: torch.Tensor) -> NDArray[np.int64]:
    if not isinstance(keys, torch.Tensor):
        raise TypeError(f"ids of {name!r} must be a torch.Tensor, got {type(keys).__name__}")
    if keys.dtype != torch.int64 or keys.dim() != 1:
        raise TypeError(f"ids of {name!r} must be int64 (N,), got {keys.dtype} {tuple(keys.shape)}")
    return np.ascontiguousarray(keys.detach().cpu().numpy())
