"""Putting a chain of checkpoints into a table: all is read and verified before a row changes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recsdk_core import _ext
from recsdk_core.checkpoint.manifest import Sharding, TableEntry
from recsdk_core.checkpoint.reading import Checkpoint, Progress
from recsdk_core.checkpoint.saving import describe
from recsdk_core.errors import CheckpointError
from recsdk_core.virtual_shards import virtual_shards

__all__ = ["ALLOWANCES", "Owner", "check_table", "stage"]

ALLOWANCES = ("initializer", "optimizer", "seed")
"""What may differ between a table and a checkpoint, if the caller says so.

"optimizer": its state is dropped and made fresh. "seed" and "initializer": rows that are made later
differ from those that the saved table would have made.
"""


@dataclass(frozen=True)
class Owner:
    """Which keys a rank owns."""

    rank: int = 0
    """This rank."""
    world_size: int = 1
    """Ranks W."""
    sharding: Sharding = field(default_factory=Sharding)
    """The rule."""

    def mask(self) -> NDArray[np.uint8] | None:
        """uint8 (65536,): 1 for virtual shards that it owns; None if the rule is another."""
        if self.world_size == 1 or self.sharding.rule != "virtual_shard":
            return None
        shards = np.arange(self.sharding.num_virtual_shards)
        owners = shards * self.world_size // self.sharding.num_virtual_shards
        mask: NDArray[np.uint8] = (owners == self.rank).astype(np.uint8)
        return mask

    def modulo(self) -> tuple[int, int] | None:
        """(rank, world size); None if the rule is another."""
        if self.world_size == 1 or self.sharding.rule != "modulo":
            return None
        return self.rank, self.world_size

    def owns(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of keys (N,) it owns."""
        unsigned = keys.view(np.uint64)
        owned: NDArray[np.bool_]
        if self.sharding.rule == "modulo":
            owned = unsigned % np.uint64(self.world_size) == np.uint64(self.rank)
        else:
            owners = virtual_shards(keys) * self.world_size // self.sharding.num_virtual_shards
            owned = owners == self.rank
        return owned

    def may_share_keys(self, other: Owner) -> bool:
        """False if both own no key in common, as far as the rules tell."""
        if self.sharding != other.sharding:
            return True
        if self.sharding.rule == "modulo":
            divisor = int(np.gcd(self.world_size, other.world_size))
            return self.rank % divisor == other.rank % divisor
        shards = self.sharding.num_virtual_shards
        low, high = _run(self, shards)
        other_low, other_high = _run(other, shards)
        return low < other_high and other_low < high


def _run(owner: Owner, shards: int) -> tuple[int, int]:
    """The virtual shards that a rank owns, from and up to."""
    low, high = (-(-(owner.rank + i) * shards // owner.world_size) for i in (0, 1))
    return low, high


def check_table(
    table: Any, fields: Sequence[Any], checkpoint: Checkpoint, name: str, allow: Collection[str]
) -> TableEntry:
    """The checkpoint's entry of a table; CheckpointError, naming both, if it does not fit."""
    unknown = sorted(set(allow) - set(ALLOWANCES))
    if unknown:
        raise ValueError(f"allow must be of {ALLOWANCES}, got {unknown}")
    _, entry = checkpoint.table(name)
    place = f"{checkpoint.location}: table {name!r}"
    if entry.dim != table.dim:
        raise CheckpointError(f"{place} was saved with dim={entry.dim}, it now has {table.dim}")
    stored, wanted = entry.fields[0].dtype, fields[0].dtype
    if stored != wanted:
        raise CheckpointError(
            f"{place} was saved with weights as {stored}, it now has {wanted}; load it into a "
            f"table with dtype={stored!r}, and copy the rows with export and upsert to change that"
        )
    optimizer = describe(table.optimizer)
    keeps_state = "optimizer" not in allow and entry.optimizer is not None
    is_same_kind = entry.optimizer is not None and entry.optimizer.kind == optimizer.kind
    if keeps_state and not (is_same_kind and entry.fields == tuple(fields)):
        raise CheckpointError(
            f"{place} was saved with {entry.optimizer}, it now has {optimizer}: their state "
            "differs; load with the same, or allow 'optimizer' to drop the saved state"
        )
    differences = {
        "seed": (entry.seed, table.seed),
        "initializer": (entry.initializer, describe(table.initializer)),
    }
    for what, (saved, now) in differences.items():
        if saved is not None and saved != now and what not in allow:
            raise CheckpointError(
                f"{place} was saved with {what} {saved}, it now has {now}: new rows would not be "
                f"those of the saved table; load with the same, or allow {what!r}"
            )
    return entry


def stage(
    engine: _ext.Table,
    chain: Sequence[Checkpoint],
    name: str,
    owner: Owner,
    *,
    drop_state: bool = False,
    progress: Progress | None = None,
) -> _ext.Restore:
    """Reads and verifies the rows of a chain that a rank owns; the table has not changed yet."""
    restore = _ext.Restore(engine)
    mask, modulo = owner.mask(), owner.modulo()
    for checkpoint in chain:
        index, entry = checkpoint.table(name)
        for rank, file in enumerate(entry.files):
            of_file = Owner(rank, len(entry.files), entry.sharding)
            if not owner.may_share_keys(of_file):
                continue
            with checkpoint.rows_file(index, rank) as rows:
                restore.add_file(rows, owned=mask, modulo=modulo, drop_state=drop_state)
            if progress is not None:
                progress(file.num_bytes)
    return restore
