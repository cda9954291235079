"""Rows of torchrec's own tables into hash tables, and back.

Shape letters: N ids, D row width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from recsdk_sharding.rows import OwnedPart, TableRows
from recsdk_sharding.saver import ranks_of_module

__all__ = ["export_rows", "import_rows"]


def import_rows(
    module: nn.Module, state_dict: Mapping[str, Any], ids: Mapping[str, torch.Tensor]
) -> None:
    """Puts rows of dense tables into a model's hash tables, as a warm start.

    `state_dict` has, for each table in `ids`, one entry named `<table>.weight` or ending in
    `.<table>.weight`: a tensor (N, D), as of torchrec's EmbeddingBagCollection or of an
    nn.ModuleDict of nn.EmbeddingBag. `ids` int64 (N,) says which raw id each row is of. An id that
    has a row already is overwritten; optimizer state is made fresh. Of a sharded model every rank
    calls it with all rows and keeps those that it owns, on the host or in device memory.

    Raises KeyError, TypeError or ValueError, naming the table, before anything has changed;
    CapacityError for a table that has no room for its rows, and BusyError while batches are in
    flight: then the tables before it in `ids` have theirs.
    """
    parts = _parts_of(module)
    given = {name: _checked(parts, name, keys, state_dict) for name, keys in ids.items()}
    for name, (keys, weights) in given.items():
        for part in parts[name].parts:
            owned = part.place.ranks.owned_by(part.place.index, keys)
            first, last = part.place.columns
            part.table.upsert(keys[owned], np.ascontiguousarray(weights[owned, first:last]))


def export_rows(module: nn.Module, ids: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The rows of ids, for dense tables: float32 (N, D) by `<table>.weight`.

    `ids` int64 (N,) by table; an id without a row reads the table's default. Of a sharded model
    every rank calls it with the same ids and gets all rows.
    """
    parts, ranks = _parts_of(module), ranks_of_module(module)
    found = {}
    for name, keys in ids.items():
        part = _part(parts, name)
        wanted = _keys(name, keys)
        own = [_rows_of(wanted, each) for each in part.parts]
        rows = np.empty((len(wanted), part.config.embedding_dim), np.float32)
        for of_rank in ranks.gather(own):
            for at, (first, last), values in of_rank:
                rows[at, first:last] = values
        found[f"{name}.weight"] = torch.from_numpy(rows)
    return found


def _parts_of(module: nn.Module) -> dict[str, TableRows]:
    return {part.config.name: part for part in module.modules() if isinstance(part, TableRows)}


def _part(parts: Mapping[str, TableRows], name: str) -> TableRows:
    if name not in parts:
        raise KeyError(f"the model has no hash table {name!r}; it has {sorted(parts)}")
    return parts[name]


def _rows_of(
    keys: NDArray[np.int64], part: OwnedPart
) -> tuple[NDArray[np.int64], tuple[int, int], NDArray[np.float32]]:
    """Which of the keys belong to a part, its columns, and their rows."""
    own = np.flatnonzero(part.place.ranks.owned_by(part.place.index, keys))
    return own, part.place.columns, part.table.lookup(keys[own])


def _keys(name: str, keys: torch.Tensor) -> NDArray[np.int64]:
    if keys.dtype != torch.int64 or keys.dim() != 1:
        raise TypeError(f"ids of {name!r} must be int64 (N,), got {keys.dtype} {tuple(keys.shape)}")
    return np.ascontiguousarray(keys.detach().cpu().numpy())


def _checked(
    parts: Mapping[str, TableRows], name: str, keys: torch.Tensor, state_dict: Mapping[str, Any]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    part, ids = _part(parts, name), _keys(name, keys)
    entries = [k for k in state_dict if k == f"{name}.weight" or k.endswith(f".{name}.weight")]
    if len(entries) != 1:
        raise KeyError(f"one entry must end in '{name}.weight', there are {entries}")
    weight = state_dict[entries[0]]
    shape = (len(ids), part.config.embedding_dim)
    if type(weight) not in (torch.Tensor, nn.Parameter) or tuple(weight.shape) != shape:
        got = f"{type(weight).__name__} {tuple(getattr(weight, 'shape', ()))}"
        raise ValueError(f"{entries[0]} must be a plain tensor {shape}, a row per id, got {got}")
    if len(np.unique(ids)) < len(ids):
        raise ValueError(f"ids of {name!r} repeat; give each id one row")
    return ids, np.ascontiguousarray(weight.detach().float().cpu().numpy())
