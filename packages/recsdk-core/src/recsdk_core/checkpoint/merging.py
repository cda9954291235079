"""A chain of checkpoints as the one set of rows that it stands for.

Shape letters: N keys, D row width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recsdk_core.checkpoint.columns import whole_tables
from recsdk_core.checkpoint.manifest import TableEntry
from recsdk_core.checkpoint.owners import Owner
from recsdk_core.checkpoint.reading import Checkpoint, Progress
from recsdk_core.errors import CheckpointError
from recsdk_core.outcome import Outcome
from recsdk_core.predicates import Kept, Predicate
from recsdk_core.table import Table

__all__ = ["KeptRows", "KeySet", "Rows", "bytes_to_read", "merged_rows"]


@dataclass(frozen=True)
class Rows:
    """Some rows of a table."""

    keys: NDArray[np.int64]
    """int64 (N,)."""
    fields: dict[str, NDArray[Any]]
    """(N, width) by name, "weight" first; bfloat16 as uint16."""

    def select(self, is_wanted: NDArray[np.bool_]) -> Rows:
        """The rows of a mask (N,)."""
        if is_wanted.all():
            return self
        return Rows(self.keys[is_wanted], {k: v[is_wanted] for k, v in self.fields.items()})


class KeySet:
    """A set of 64-bit keys that takes arrays."""

    def __init__(self) -> None:
        self._table = Table(dim=1, name="keys")

    def add(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Adds keys (N,); returns which of them were new."""
        _, outcomes = self._table.map(np.ascontiguousarray(keys), insert=True)
        is_new: NDArray[np.bool_] = outcomes == Outcome.INSERTED
        return is_new

    def has(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of keys (N,) are in it."""
        _, outcomes = self._table.map(np.ascontiguousarray(keys), insert=False)
        is_found: NDArray[np.bool_] = outcomes == Outcome.FOUND
        return is_found

    def __len__(self) -> int:
        return len(self._table)


def merged_rows(
    chain: Sequence[Checkpoint],
    name: str,
    owner: Owner | None = None,
    progress: Progress | None = None,
) -> Iterator[Rows]:
    """The rows that a table has after a chain, each key once; only those of `owner`, if given.

    It reads the newest first. It keeps the deltas' keys in memory, but not the snapshot's.
    """
    owner = owner or Owner()
    seen = KeySet()
    for checkpoint in reversed(chain):
        index, entry = checkpoint.table(name)
        for rank in files_of(entry, owner):
            for block in checkpoint.blocks(index, rank):
                rows = _of_block(block, owner)
                is_new = ~seen.has(rows.keys) if checkpoint.is_snapshot else seen.add(rows.keys)
                if block.kind == "rows" and is_new.any():
                    yield rows.select(is_new)
            if progress is not None:
                progress(entry.files[rank].num_bytes)


class KeptRows:
    """The rows of a chain of which a predicate is true, by table."""

    def __init__(self, chain: Sequence[Checkpoint], where: str | Mapping[str, str] | None) -> None:
        """`where` is for all tables or by name; tables without one are whole.

        A table that is cut by columns has its own name, and its ranges lose the same rows. Rows
        that keys without one share are no table of keys: they stay whole.

        Raises ValueError for what `Predicate` refuses, what a table does not keep, and tables that
        there are not.
        """
        self._chain = chain
        tables = {table.name: table for table in whole_tables(chain[-1].manifest.tables)}
        given = where if isinstance(where, Mapping) else dict.fromkeys(tables, where)
        if not set(given) <= set(tables):
            raise ValueError(
                f"predicates must be for tables of {chain[-1].location}, which has "
                f"{', '.join(tables)}, got one for {min(set(given) - set(tables))!r}"
            )
        self._predicates: dict[str, Predicate] = {}
        for name, text in given.items():
            if text is None:
                continue
            predicate = Predicate(text)
            for part in tables[name].parts:
                predicate.require([field.name for field in part.fields], f"table {name!r}")
                self._predicates[part.name] = predicate

    def rows(
        self, name: str, owner: Owner | None = None, progress: Progress | None = None
    ) -> Iterator[Rows]:
        """Those of `merged_rows` that a table keeps."""
        predicate = self._predicates.get(name)
        for rows in merged_rows(self._chain, name, owner, progress):
            if predicate is None:
                yield rows
                continue
            is_kept = predicate.matches(self._kept(name, rows))
            if is_kept.any():
                yield rows.select(is_kept)

    def _kept(self, name: str, rows: Rows) -> Kept:
        entry = self._chain[-1].table(name)[1].eviction
        columns = {k: v.reshape(-1) for k, v in rows.fields.items() if k.startswith("evict_")}
        if entry is None:
            return Kept(columns, 0)
        rule = {setting: entry.rule.arguments.get(setting) for setting in ("half_life", "decay")}
        for setting, value in rule.items():
            if value is not None and not _is_positive(value):
                raise CheckpointError(
                    f"{self._chain[-1].location}: table {name!r}: {setting} of its rule must be "
                    f"above 0, got {value!r}; it was not saved by this library"
                )
        return Kept(columns, entry.step or 0, **rule)


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def files_of(entry: TableEntry, owner: Owner) -> list[int]:
    """The files of a table that may have keys of `owner`."""
    size = len(entry.files)
    return [rank for rank in range(size) if owner.may_share_keys(Owner(rank, size, entry.sharding))]


def bytes_to_read(
    chain: Sequence[Checkpoint], names: Sequence[str], owners: Sequence[Owner]
) -> int:
    """How many bytes `merged_rows` reads for some tables and owners."""
    total = 0
    for checkpoint in chain:
        for name in names:
            _, entry = checkpoint.table(name)
            for owner in owners:
                ranks = files_of(entry, owner)
                total += sum(entry.files[rank].num_bytes for rank in ranks)
    return total


def _of_block(block: Any, owner: Owner) -> Rows:
    """A block's keys, with rows if it has any, that belong to an owner."""
    fields = block.fields if block.kind == "rows" else {}
    rows = Rows(block.keys, fields)
    return rows if owner.world_size == 1 else rows.select(owner.owns(block.keys))
