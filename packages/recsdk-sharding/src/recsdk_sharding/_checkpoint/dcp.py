"""Loading through torch.distributed.checkpoint into any number of ranks.

In the `state_dict` of a model each rank's shard has names of its own, so every rank writes its
rows. To load, a rank must read the shards that it needs, whatever their sizes; only the
checkpoint's metadata has these. torch shows the metadata to the planner alone, after it has asked
the model for its state. So importing this module extends torch's default planner: it makes room for
those shards. State without hash tables stays as it is. `recsdk_core.nn.dcp` does the same for
unsharded tables, and refuses saves in which ranks have different rows under one name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from recsdk_core.nn.dcp import before_loading, holder_of, saved_tensors
from recsdk_sharding._configs.checking import check_switch
from recsdk_sharding._rows.row_state import ENTRY_PATTERN, SHARD_PATTERN
from recsdk_sharding.placement.ranks import RankMap, ranks_of_tensor

__all__ = ["HashLoadPlanner", "adapt_load_planner"]

_SHARD = re.compile(rf"(?P<prefix>(?:.*\.)?){SHARD_PATTERN}{ENTRY_PATTERN}")


class HashLoadPlanner(DefaultLoadPlanner):
    """torch's load planner, with a choice of which shards of hash tables are read.

    With `dcp.load` without a planner each rank reads the shards that may have ids that it owns: its
    own if the number of ranks is the same as in the save, else those that overlap with it. If the
    save used another rank rule this cannot be told; then pass

        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path,
                 planner=HashLoadPlanner(all_ranks=True))

    Everything else is as in `DefaultLoadPlanner`, whose keyword arguments it takes.

    Cost: memory for the shards that are read, beside the table's rows, until they are loaded.
    """

    def __init__(self, *, all_ranks: bool = False, **options: Any) -> None:
        """`all_ranks`: read all shards, which is needed if the save used another rank rule."""
        check_switch("HashLoadPlanner: all_ranks", all_ranks)
        super().__init__(**options)
        self._reads_all_shards = all_ranks


def adapt_load_planner() -> None:
    """Makes torch's default load planner make room for the shards of hash tables."""

    def make_room(
        planner: DefaultLoadPlanner, state_dict: dict[str, Any], metadata: Metadata
    ) -> None:
        reads_all = getattr(planner, "_reads_all_shards", False)
        for table in _saved_tables(metadata).values():
            _make_room(state_dict, table, reads_all)

    before_loading(make_room)


def _make_room(state_dict: dict[str, Any], saved: _SavedTable, reads_all: bool) -> None:
    """Replaces the shards that the model has now by room for the shards to read."""
    holder = holder_of(state_dict, saved.path)
    if holder is None or _has_room(holder, saved):
        return
    own = _own_shards(holder, saved.prefix)
    for name in [n for n in holder if _is_of_shard(n, saved.prefix)]:
        del holder[name]
    for number, shard in saved.shards.items():
        if reads_all or any(_needs(rank, ranks, saved, number) for rank, ranks in own):
            for name, entry in shard.items():
                holder[name] = torch.empty(entry.size, dtype=entry.properties.dtype)


def _has_room(holder: Mapping[str, Any], saved: _SavedTable) -> bool:
    """Whether the state was made from the checkpoint, as torch does to convert one."""
    wanted = {name: entry.size for shard in saved.shards.values() for name, entry in shard.items()}
    found = {n: v.shape for n, v in holder.items() if _is_of_shard(n, saved.prefix)}
    return found == wanted


def _needs(rank: int, ranks: RankMap, saved: _SavedTable, number: int) -> bool:
    """Whether a shard of this rank may have rows of a saved one.

    The saved ranks may have had whole groups, or not if the table had no limit then.
    """
    world_size, shards = max(saved.shards) + 1, ranks.num_virtual_shards
    found = [RankMap(world_size, ranks.rule)]
    if world_size <= shards:
        found.append(RankMap.of_groups(world_size, ranks.rule, shards))
    return any(ranks.may_share_keys(rank, each, number) for each in found)


@dataclass
class _SavedTable:
    """The entries of one table in a checkpoint."""

    path: tuple[Any, ...]
    """Keys of the nested dicts that lead to its entries."""
    prefix: str
    """The prefix of their names."""
    shards: dict[int, dict[str, TensorStorageMetadata]] = field(default_factory=dict)
    """The entries of each shard of the rows, of all columns, by name."""


def _saved_tables(metadata: Metadata) -> dict[Any, _SavedTable]:
    found: dict[Any, _SavedTable] = {}
    for path, name, entry in saved_tensors(metadata):
        shard = _SHARD.fullmatch(name)
        if shard is not None:
            key = (*path, shard["prefix"])
            table = found.setdefault(key, _SavedTable(path, shard["prefix"]))
            table.shards.setdefault(int(shard["rank"]), {})[name] = entry
    return found


def _own_shards(holder: Mapping[str, Any], prefix: str) -> list[tuple[int, RankMap]]:
    """The number and rule of this rank's shards, from the model's entries."""
    found = []
    for name, value in holder.items():
        shard = _SHARD.fullmatch(name)
        if shard is not None and shard["prefix"] == prefix and shard["name"] == "ranks":
            found.append((int(shard["rank"]), ranks_of_tensor(value)))
    return found


def _is_of_shard(name: str, prefix: str) -> bool:
    shard = _SHARD.fullmatch(name)
    return shard is not None and shard["prefix"] == prefix
