"""How the rows of a table lie in a `state_dict`, and how they get from there into any layout.

Shape letters: n rows, D row width of the table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

import recsdk_core
from recsdk_core import Admit, Default, init
from recsdk_core.admission import RECORDS
from recsdk_core.checkpoint.admission_records import Records
from recsdk_core.checkpoint.model.held_back import warn_of_rows_held_back
from recsdk_core.checkpoint.replacing import NewRows
from recsdk_core.eviction import EvictionClock
from recsdk_core.nn.row_entries import (
    CLOCK,
    KEPT_OF_KEYS,
    SHARED,
    STATE,
    clock_of_entry,
    entries_of,
    records_of_entries,
    shared_of_entries,
)
from recsdk_sharding._rows.home import HeldShard, RowHome
from recsdk_sharding.placement.layout import Shard
from recsdk_sharding.placement.ranks import ranks_of_tensor

__all__ = [
    "ENTRY_PATTERN",
    "SHARD_PATTERN",
    "RowSettings",
    "SavedShard",
    "entry_of",
    "fields_of",
    "shards_of_entries",
    "prefix_of",
    "put_state",
    "rows_for",
]

SHARD_PATTERN = r"rank_(?P<rank>[0-9]+)\.(?:columns_(?P<first>[0-9]+)_(?P<last>[0-9]+)\.)?"
"""What the names of a shard's entries begin with."""

ENTRY_PATTERN = (
    r"(?P<name>keys|weight|ranks|seed|update_count|log_decay|state\..+|"
    + "|".join([CLOCK, *KEPT_OF_KEYS, *RECORDS, SHARED[0], SHARED[1], SHARED[2] + r"\..+"])
    + ")"
)
"""What follows: the name of an entry."""

_UINT64 = 2**64


def entry_of(name: str) -> str | None:
    """Which entry of a shard a name means, without the table's prefix; None: none."""
    match = re.fullmatch(SHARD_PATTERN + ENTRY_PATTERN, name)
    return None if match is None else match["name"]


def prefix_of(shard: Shard, dim: int) -> str:
    """What the names of a shard's entries begin with."""
    columns = "" if shard.columns == (0, dim) else "columns_{}_{}.".format(*shard.columns)
    return f"rank_{shard.index}.{columns}"


class RowSettings(Protocol):
    """What rows must fit that are loaded into a table; a `HashTableConfig` says it."""

    @property
    def name(self) -> str: ...

    @property
    def embedding_dim(self) -> int: ...

    @property
    def seed(self) -> int: ...

    @property
    def admission(self) -> Admit | None: ...

    @property
    def default(self) -> Default: ...

    def initializer_of(self, columns: tuple[int, int]) -> init.Initializer:
        """Makes those columns of the whole table's initial rows."""


@dataclass(frozen=True, kw_only=True)
class SavedShard:
    """The rows of a shard."""

    shard: Shard
    keys: NDArray[np.int64]
    weight: NDArray[np.float32]  # 16-bit weights too, which widen exactly
    dtype: torch.dtype  # of stored weights
    state: dict[str, NDArray[np.float32]]
    update_count: int
    seed: int
    log_decay: float
    metadata: dict[str, NDArray[Any]] = field(default_factory=dict)
    """What eviction keeps of the keys, (n,) each."""
    records: Records | None = None
    """What admission knows of the shard's keys without a row; None: it was saved without it."""
    clock: EvictionClock = field(default_factory=EvictionClock)
    shared: SavedShard | None = None
    """The rows that keys without one share, as those of a table of their own; None: it was saved
    without such."""

    @staticmethod
    def of_held(held: HeldShard, shard: Shard) -> SavedShard:
        """The rows that a shard has now."""
        table = held.table
        warn_of_rows_held_back(held.index, "copy")
        rows = held.rows()
        made = SavedShard(
            shard=shard,
            keys=rows.keys,
            weight=rows.weights,
            dtype=getattr(torch, table.dtype),
            state=dict(rows.state),
            update_count=rows.update_count,
            seed=table.seed,
            log_decay=rows.log_decay,
            metadata=dict(rows.metadata),
            records=rows.records,
            clock=rows.clock,
        )
        if rows.shared is None:
            return made
        own = made.of_shared(rows.shared)
        return replace(made, shared=own.select(shard.ranks.owned_by(shard.index, own.keys)))

    def of_shared(self, rows: NewRows) -> SavedShard:
        """Rows that keys without one share, beside these."""
        return replace(
            self,
            keys=rows.keys,
            weight=rows.weights,
            dtype=torch.float32,
            state=dict(rows.state),
            metadata={},
            records=None,
            clock=EvictionClock(),
        )

    @staticmethod
    def of_entries(prefix: str, entries: Mapping[str, Any], dim: int) -> SavedShard:
        """The shard whose entries had names that begin with `prefix`."""
        match = re.fullmatch(SHARD_PATTERN, prefix)
        assert match is not None
        columns = (0, dim)
        if match["first"] is not None:
            columns = (int(match["first"]), int(match["last"]))
        keys = _array(entries["keys"], np.int64)
        shared = shared_of_entries(entries)
        made = SavedShard(
            shard=Shard(ranks_of_tensor(entries["ranks"]), int(match["rank"]), columns),
            keys=keys,
            weight=_weights(entries["weight"]),
            dtype=entries["weight"].dtype,
            state={
                name.removeprefix(STATE): _array(value, np.float32)
                for name, value in entries.items()
                if name.startswith(STATE)
            },
            update_count=_array(entries["update_count"], np.int64).item(),
            seed=int(entries["seed"]) % _UINT64,
            log_decay=float(entries.get("log_decay", 0.0)),
            metadata={
                name: _array(entries[name], getattr(np, str(dtype).removeprefix("torch.")))
                for name, dtype in KEPT_OF_KEYS.items()
                if name in entries
            },
            records=records_of_entries(entries, keys, of_sketch=True),  # see check
            clock=clock_of_entry(entries[CLOCK]) if CLOCK in entries else EvictionClock(),
        )
        return made if shared is None else replace(made, shared=made.of_shared(shared))

    def tensors(self) -> dict[str, torch.Tensor]:
        """The entries of a `state_dict`."""
        return {
            **entries_of(self.new_rows(), self.dtype),
            "seed": torch.from_numpy(np.array(self.seed, dtype=np.uint64).view(np.int64)),
            "ranks": self.shard.ranks.to_tensor(),
        }

    def new_rows(self) -> NewRows:
        """The rows in the form in which homes take them."""
        return NewRows(
            keys=self.keys,
            weights=self.weight,
            state=self.state,
            update_count=self.update_count,
            log_decay=self.log_decay,
            metadata=self.metadata,
            records=self.records,
            clock=self.clock,
            shared=None if self.shared is None else self.shared.new_rows(),
        )

    def copy(self) -> SavedShard:
        """The same, in memory of its own."""
        records = None if self.records is None else Records.joined([self.records])
        shared = None if self.shared is None else self.shared.copy()
        return replace(self.select(np.arange(len(self.keys))), records=records, shared=shared)

    def check(self, wanted: RowSettings, fields: Mapping[str, int]) -> None:
        """Raises ValueError if the rows do not fit the table.

        `fields`: the width of each field of optimizer state, 0 if it is that of the shard.
        """
        if self.keys.ndim != 1:
            raise ValueError(f"keys must have shape (n,), got {self.keys.shape}")
        if self.update_count < 0:
            raise ValueError(f"update_count must be at least 0, got {self.update_count}")
        if not -math.inf < self.log_decay <= 0:
            raise ValueError(f"log_decay must be finite and 0 or less, got {self.log_decay}")
        self._check_shapes(wanted.embedding_dim, fields)
        is_exact = wanted.admission is not None and wanted.admission.max_bytes is None
        if is_exact and self.records is not None:
            both = np.intersect1d(self.records.keys, self.keys)
            if len(both):
                raise ValueError(f"{RECORDS[0]}: must not be among keys, got {both[0]} in both")
        if not self.shard.ranks.owned_by(self.shard.index, self.keys).all():
            raise ValueError(
                f"keys of the shard of rank {self.shard.index} belong to other ranks of "
                f"{self.shard.ranks}; it was renamed or changed"
            )
        if self.seed != wanted.seed:
            raise ValueError(
                f"it was saved with seed {self.seed} but is configured with {wanted.seed}; new "
                f"rows would not be those of the saved table; configure seed={self.seed}"
            )

    def _check_shapes(self, dim: int, fields: Mapping[str, int]) -> None:
        first, last = self.shard.columns
        if not 0 <= first < last <= dim:
            raise ValueError(f"it has columns {first} to {last}, the table {dim} columns")
        for name, kept in self.metadata.items():
            if kept.shape != self.keys.shape:
                raise ValueError(f"{name} must have shape {self.keys.shape}, got {kept.shape}")
        shapes = {"weight": (self.weight, last - first)}
        for name, width in fields.items():
            if name not in self.state:
                raise ValueError(
                    f"optimizer state {name!r} is missing; it was saved with {sorted(self.state)}"
                )
            shapes[STATE + name] = (self.state[name], width or last - first)
        for name, (array, width) in shapes.items():
            if array.shape != (len(self.keys), width):
                wanted = (len(self.keys), width)
                raise ValueError(f"{name} must have shape {wanted}, got {array.shape}")

    def select(self, chosen: NDArray[Any]) -> SavedShard:
        """The rows of a mask or of positions (n,); keys without a row stay."""
        return replace(
            self,
            keys=self.keys[chosen],
            weight=self.weight[chosen],
            state={name: value[chosen] for name, value in self.state.items()},
            metadata={name: value[chosen] for name, value in self.metadata.items()},
        )


def shards_of_entries(state_dict: Mapping[str, Any], prefix: str, dim: int) -> list[SavedShard]:
    """The shards among entries whose names begin with `prefix`."""
    groups: dict[str, dict[str, Any]] = {}
    pattern = re.compile(re.escape(prefix) + f"(?P<shard>{SHARD_PATTERN})(?P<name>.+)")
    for key, value in state_dict.items():
        match = pattern.fullmatch(key)
        if match is not None:
            groups.setdefault(match["shard"], {})[match["name"]] = value
    return [SavedShard.of_entries(start, entries, dim) for start, entries in groups.items()]


def rows_for(
    shard: Shard, saved: Sequence[SavedShard], wanted: RowSettings, optimizer: Any
) -> SavedShard:
    """The rows that belong to a shard, of the saved shards of any layout.

    Rowwise optimizers keep one number for each row and column range; it becomes the mean over the
    columns. Raises ValueError for shards that do not fit, or that lack such rows.
    """
    found = _rows_for(shard, saved, wanted, optimizer)
    shared = [each.shared for each in saved if each.shared is not None]
    if shared and wanted.default.kind == "shared_rows":
        found = replace(found, shared=_rows_for(shard, shared, wanted, optimizer))
    return found if wanted.admission is not None else replace(found, records=None)


def _rows_for(
    shard: Shard, saved: Sequence[SavedShard], wanted: RowSettings, optimizer: Any
) -> SavedShard:
    """The same of rows alone, or of those that keys without one share."""
    fields = fields_of(optimizer)
    for each in saved:
        each.check(wanted, fields)
    by_columns: dict[tuple[int, int], list[SavedShard]] = {}
    for each in saved:
        by_columns.setdefault(each.shard.columns, []).append(each)
    groups = [
        _rows_of_columns(shard, by_columns[columns])
        for columns in sorted(by_columns)
        if columns[0] < shard.columns[1] and shard.columns[0] < columns[1]
    ]
    _check_columns(shard, groups)
    return replace(_recut(shard, groups, fields), shared=None)


def put_state(home: RowHome, held: HeldShard, saved: SavedShard) -> None:
    """Gives loaded state to the rows of a shard that have not changed since they were loaded."""
    now = held.rows()
    made = _with_state(now, saved, getattr(torch, held.table.dtype))
    if now.shared is not None and saved.shared is not None:
        made = replace(made, shared=_with_state(now.shared, saved.shared, torch.float32))
    home.replace_rows([(held, replace(made, log_decay=saved.log_decay))])


def _with_state(now: NewRows, saved: SavedShard, dtype: torch.dtype) -> NewRows:
    if not len(saved.keys):
        return now
    order = np.argsort(saved.keys)
    places = np.searchsorted(saved.keys, now.keys, sorter=order)
    found = order[np.minimum(places, len(order) - 1)]
    stored = torch.from_numpy(saved.weight[found]).to(dtype).float().numpy()
    has_weights = (now.weights.view(np.int32) == stored.view(np.int32)).all(1)
    is_same = has_weights & (saved.keys[found] == now.keys)
    state = {
        name: np.where(is_same[:, None], saved.state[name][found], values)
        for name, values in now.state.items()
    }
    return replace(now, state=state)


def fields_of(optimizer: Any) -> dict[str, int]:
    """The width of each field of optimizer state; 0: as wide as the row."""
    if optimizer is None:
        return {}
    narrow, wide = (recsdk_core.Table(dim, optimizer=optimizer).state_fields for dim in (1, 3))
    return {
        name: width if width == other else 0
        for (name, width), (_, other) in zip(narrow, wide, strict=True)
    }


def _rows_of_columns(shard: Shard, saved: Sequence[SavedShard]) -> SavedShard:
    """The rows of one saved column range that belong to a shard."""
    _check_rows(shard, saved)
    owned = []
    for each in saved:
        is_owned = shard.ranks.owned_by(shard.index, each.keys)
        owned.append(each if is_owned.all() else each.select(is_owned))
    keys = np.concatenate([each.keys for each in owned])
    if len(np.unique(keys)) < len(keys):
        raise ValueError("a key occurs more than once; load the shards of one save only")
    return replace(
        owned[0],
        keys=keys,
        weight=np.concatenate([each.weight for each in owned]),
        state={
            name: np.concatenate([each.state[name] for each in owned]) for name in owned[0].state
        },
        metadata=_joined_metadata(owned),
        records=_owned_records(shard, saved),
        clock=_latest([each.clock for each in saved]),
        update_count=max(each.update_count for each in saved),
        log_decay=min(each.log_decay for each in saved),
    )


def _joined_metadata(parts: Sequence[SavedShard]) -> dict[str, NDArray[Any]]:
    """What eviction keeps of the keys of all parts."""
    names = [set(part.metadata) for part in parts]
    if any(own != names[0] for own in names):
        raise ValueError(
            "shards must all have the same of what eviction keeps, got "
            f"{list(map(sorted, names))}; give those of one save"
        )
    return {name: np.concatenate([part.metadata[name] for part in parts]) for name in names[0]}


def _owned_records(shard: Shard, saved: Sequence[SavedShard]) -> Records | None:
    """What admission knows of a shard's keys without a row, of all parts."""
    parts = [each.records for each in saved if each.records is not None]
    if not parts:
        return None
    if len(parts) < len(saved):
        raise ValueError(
            f"shards must all have {list(RECORDS)} or none, got them in {len(parts)} of "
            f"{len(saved)}; give those of one save"
        )
    joined = Records.joined(parts)
    return joined.select(shard.ranks.owned_by(shard.index, joined.keys))


def _latest(clocks: Sequence[EvictionClock]) -> EvictionClock:
    """The clock of a table whose shards have these: the same, unless a rank had no batch."""
    steps = [clock.step for clock in clocks if clock.step is not None]
    times = [clock.time for clock in clocks if clock.time is not None]
    return EvictionClock(step=max(steps, default=None), time=max(times, default=None))


def _check_rows(shard: Shard, saved: Sequence[SavedShard]) -> None:
    """Raises ValueError unless the shards of a column range have all keys of a shard."""
    ranks = saved[0].shard.ranks
    if any(each.shard.ranks != ranks for each in saved):
        raise ValueError("the shards are of different saves; load those of one only")
    found = {each.shard.index for each in saved}
    missing = [
        index
        for index in range(ranks.world_size)
        if index not in found and shard.ranks.may_share_keys(shard.index, ranks, index)
    ]
    if missing:
        raise ValueError(
            f"it was saved by {ranks.world_size} rank{'s' * (ranks.world_size > 1)} with rule "
            f"{ranks.rule!r}, and the shards of ranks {missing} are missing, which may have ids "
            f"of rank {shard.index}; load them too (with torch.distributed.checkpoint, if the rule "
            "differs: pass planner=recsdk_sharding.HashLoadPlanner(all_ranks=True))"
        )


def _check_columns(shard: Shard, groups: Sequence[SavedShard]) -> None:
    """Raises ValueError unless column ranges in ascending order cover the columns of a shard."""
    reached = shard.columns[0]
    for group in groups:
        first, last = group.shard.columns
        if first > reached or (group is not groups[0] and first < reached):
            break
        reached = last
    if reached < shard.columns[1]:
        ranges = [group.shard.columns for group in groups]
        raise ValueError(
            f"columns {shard.columns[0]} to {shard.columns[1]} are wanted, but the shards have the "
            f"columns {ranges}; load all shards of one save"
        )


def _recut(shard: Shard, groups: Sequence[SavedShard], fields: Mapping[str, int]) -> SavedShard:
    """The columns of a shard, from ranges that cover them."""
    if len(groups) > 1:
        groups = [group.select(np.argsort(group.keys)) for group in groups]
        if any(not np.array_equal(group.keys, groups[0].keys) for group in groups[1:]):
            raise ValueError("the column ranges have different keys; load the shards of one save")
    cuts = [_overlap(shard.columns, group.shard.columns) for group in groups]
    state = {}
    for name, width in fields.items():
        states = [group.state[name] for group in groups]
        if width == 0:
            state[name] = _side_by_side(states, cuts)
        else:
            state[name] = _mean(states, cuts) if width == 1 else states[0]
    return replace(
        groups[0],
        shard=shard,
        weight=_side_by_side([group.weight for group in groups], cuts),
        state=state,
        update_count=max(group.update_count for group in groups),
        log_decay=min(group.log_decay for group in groups) if "log_decay" in fields else 0.0,
    )


def _overlap(wanted: tuple[int, int], found: tuple[int, int]) -> slice:
    """The columns that both have, counted from the first found."""
    return slice(max(wanted[0] - found[0], 0), min(wanted[1], found[1]) - found[0])


def _side_by_side(
    states: Sequence[NDArray[np.float32]], cuts: Sequence[slice]
) -> NDArray[np.float32]:
    columns = [each[:, cut] for each, cut in zip(states, cuts, strict=True)]
    return np.ascontiguousarray(np.concatenate(columns, axis=1))


def _mean(states: Sequence[NDArray[np.float32]], cuts: Sequence[slice]) -> NDArray[np.float32]:
    """The mean, weighted by numbers of columns; if all ranges are equal, exactly that."""
    if all(np.array_equal(each, states[0]) for each in states[1:]):
        return states[0]
    widths = np.array([cut.stop - cut.start for cut in cuts], np.float32)
    shares = widths / widths.sum()
    total: NDArray[np.float32] = sum(
        (share * each for share, each in zip(shares, states, strict=True)),
        start=np.zeros_like(states[0]),
    )
    return total


def _weights(value: torch.Tensor) -> NDArray[np.float32]:
    if value.dtype in (torch.bfloat16, torch.float16):
        value = value.float()
    return _array(value, np.float32)


def _array(value: torch.Tensor, dtype: Any) -> NDArray[Any]:
    array = value.detach().cpu().numpy()
    if array.dtype != dtype:
        raise TypeError(f"entries must be {np.dtype(dtype)}, got {array.dtype}")
    return np.ascontiguousarray(array)
