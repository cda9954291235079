"""What differs between two checkpoints, and looking at single rows.

Tables that are cut by columns are whole here.

Shape letters: N keys, D row width.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recsdk_core._internal.checks import int_within, require_callable
from recsdk_core.checkpoint import joining
from recsdk_core.checkpoint.admission_records import Records, read_records
from recsdk_core.checkpoint.columns import WholeTable, all_tables
from recsdk_core.checkpoint.merging import Rows
from recsdk_core.checkpoint.owners import Owner
from recsdk_core.checkpoint.reading import (
    Checkpoint,
    Progress,
    chain_of,
    check_chain,
    find_chain,
    read_whole,
)
from recsdk_core.errors import CheckpointError
from recsdk_core.virtual_shards import mix64

__all__ = ["TableDifference", "as_floats", "diff", "find_row", "top_rows"]


@dataclass(frozen=True, kw_only=True)
class TableDifference:
    """How a table differs between two checkpoints, `a` and `b`."""

    name: str
    """The table."""
    settings: dict[str, tuple[Any, Any]]
    """What differs beside the rows: (a, b) by name."""
    only_in_a: int
    """Keys that only `a` has."""
    only_in_b: int
    """Keys that only `b` has."""
    changed: int
    """Keys with other weights, optimizer state or metadata."""
    equal: int
    """Keys with equal rows, bit for bit."""
    examples: dict[str, list[int]]
    """The smallest keys of "only_in_a", "only_in_b" and "changed"."""

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return not (self.settings or self.only_in_a or self.only_in_b or self.changed)


def diff(
    a: Any | Sequence[Any],
    b: Any | Sequence[Any],
    *,
    num_examples: int = 5,
    progress: Progress | None = None,
) -> list[TableDifference]:
    """Compares what two checkpoints hold, row by row, whatever their world sizes and rules.

    `a` and `b` are each a checkpoint, the last delta of a chain, or the list of a chain's paths, as
    in `Table.load`; or what `open_checkpoint` or `chain_of` gave for it. Rows are compared by a
    64-bit hash of their bytes. Memory: 16 bytes a key of either. A table that ranks had cut by
    columns is one table: that takes 70 bytes a key more, and disk for its rows where the system has
    temporary files. A table that only one of both has differs from an empty one. `num_examples`, 0
    or more: how many keys of each kind are told, the smallest. `progress` is called with the number
    of bytes of files read since it was called before; what it raises ends the comparison. Raises
    CheckpointError for what is damaged or no chain, ValueError or TypeError for another argument.
    """
    shown = int_within("diff", 0, num_examples=num_examples)
    require_callable("diff", progress=progress)

    def compared(counted: Progress | None) -> list[TableDifference]:
        chains = _chain(a), _chain(b)
        names = {e.name: None for chain in chains for e in all_tables(chain[-1].manifest.tables)}
        return [_diff_table(*chains, name, shown, counted) for name in names]

    return read_whole(compared, progress)


def _chain(given: Any | Sequence[Any]) -> Sequence[Checkpoint]:
    if isinstance(given, Checkpoint):
        return find_chain(given)
    is_chain = isinstance(given, (list, tuple)) and len(given) > 0
    if is_chain and all(isinstance(each, Checkpoint) for each in given):
        check_chain(given)
        return given
    return chain_of(given)


def _diff_table(
    a: Sequence[Checkpoint],
    b: Sequence[Checkpoint],
    name: str,
    num_examples: int,
    progress: Progress | None,
) -> TableDifference:
    keys_a, hashes_a = _digests(a, name, progress)
    keys_b, hashes_b = _digests(b, name, progress)
    _, at_a, at_b = np.intersect1d(keys_a, keys_b, assume_unique=True, return_indices=True)
    is_changed = hashes_a[at_a] != hashes_b[at_b]
    found = {
        "only_in_a": np.delete(keys_a, at_a),
        "only_in_b": np.delete(keys_b, at_b),
        "changed": keys_a[at_a][is_changed],
    }
    settings = _settings(_table(a, name), _table(b, name))
    counts = _counts(a, name), _counts(b, name)
    if not counts[0].equals(counts[1]):
        told = (f"{len(part.keys)} keys, or other counts" for part in counts)
        settings["counts of keys without a row"] = next(told), next(told)
    return TableDifference(
        name=name,
        settings=settings,
        only_in_a=len(found["only_in_a"]),
        only_in_b=len(found["only_in_b"]),
        changed=len(found["changed"]),
        equal=len(at_a) - len(found["changed"]),
        examples={k: np.sort(v)[:num_examples].tolist() for k, v in found.items()},
    )


def _table(chain: Sequence[Checkpoint], name: str) -> WholeTable | None:
    return next((t for t in all_tables(chain[-1].manifest.tables) if t.name == name), None)


def _settings(table_a: WholeTable | None, table_b: WholeTable | None) -> dict[str, tuple[Any, Any]]:
    if table_a is None or table_b is None:
        return {"table": ("there" if table_a else "missing", "there" if table_b else "missing")}
    found: dict[str, tuple[Any, Any]] = {}
    if table_a.dim != table_b.dim:
        found["dim"] = table_a.dim, table_b.dim
    a, b = table_a.parts[0], table_b.parts[0]
    for what in (
        "seed",
        "initializer",
        "default_value",
        "optimizer",
        "update_count",
        "eviction",
    ):
        pair = getattr(a, what), getattr(b, what)
        if pair[0] != pair[1]:
            found[what] = (_text(pair[0]), _text(pair[1]))
    admissions = [None if e.admission is None else replace(e.admission, files=()) for e in (a, b)]
    if admissions[0] != admissions[1]:
        found["admission"] = (_text(admissions[0]), _text(admissions[1]))
    return found


def _counts(chain: Sequence[Checkpoint], name: str) -> Records:
    table = _table(chain, name)
    if table is None:
        return Records.joined([])
    return Records.joined(list(read_records(chain[-1], table.parts[0].name, Owner())))


def _text(value: Any) -> Any:
    return value if value is None or isinstance(value, (int, float)) else str(value)


def _digests(
    chain: Sequence[Checkpoint], name: str, progress: Progress | None
) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Keys and hashes of rows, in ascending order of keys."""
    table, parts = _table(chain, name), []
    if table is not None:
        rows_of_table = joining.whole_rows(chain, table, None, progress)
        parts = [(rows.keys.copy(), _hash(rows)) for rows in rows_of_table]
    keys = np.concatenate([np.empty(0, np.int64), *(keys for keys, _ in parts)])
    hashes = np.concatenate([np.empty(0, np.uint64), *(hashes for _, hashes in parts)])
    order = np.argsort(keys)
    return keys[order], hashes[order]


def _hash(rows: Rows) -> NDArray[np.uint64]:
    """A 64-bit hash of each row's bytes and its fields' names, uint64 (N,)."""
    total = np.zeros(len(rows.keys), np.uint64)
    for name in sorted(rows.fields):
        raw = np.ascontiguousarray(rows.fields[name]).view(np.uint8).reshape(len(rows.keys), -1)
        padded = np.pad(raw, ((0, 0), (0, -raw.shape[1] % 8)))
        words = padded.view(np.uint64)
        salt = np.uint64(int.from_bytes(name.encode()[:8], "little"))
        for column in range(words.shape[1]):
            total = mix64(total ^ mix64(words[:, column] ^ salt))
    return total


def find_row(
    chain: Sequence[Checkpoint], table: WholeTable, key: int
) -> dict[str, NDArray[Any]] | None:
    """The fields of a key's row after a chain; None if it has none.

    Reads the files of one rank for each range of columns. Raises CheckpointError if only some
    ranges have a row.
    """
    found = [_find_row(chain, part.name, key) for part in table.parts]
    there = [row for row in found if row is not None]
    if there and len(there) < len(found):
        raise CheckpointError(f"{chain[-1].location}: {joining.missing(table.name, key)}")
    return joining.fields_side_by_side(there) if there else None


def _find_row(chain: Sequence[Checkpoint], name: str, key: int) -> dict[str, NDArray[Any]] | None:
    wanted = np.array([key % 2**64], np.uint64).view(np.int64)
    for checkpoint in reversed(chain):
        index, entry = checkpoint.table(name)
        for rank in range(len(entry.files)):
            owner = Owner(rank, len(entry.files), entry.sharding)
            if not owner.owns(wanted)[0]:
                continue
            found = [  # of the whole file, which is verified at its end
                None
                if block.kind == "erased"
                else {k: v[at].copy() for k, v in block.fields.items()}
                for block in checkpoint.blocks(index, rank)
                if block.kind in ("rows", "erased")
                for at in np.flatnonzero(block.keys == wanted[0])
            ]
            if found:
                return found[0]
    return None


def top_rows(
    chain: Sequence[Checkpoint],
    table: WholeTable,
    *,
    count: int,
    by: str = "weight",
    smallest: bool = False,
    progress: Progress | None = None,
) -> list[tuple[int, float]]:
    """The `count` keys whose field `by` has the largest (smallest) L2 norm, with that norm.

    NaN counts as larger than all numbers. Of equal norms the smaller keys come first.
    """
    dtypes = {field.name: field.dtype for field in joining.whole_fields(table)}
    if by not in dtypes:
        raise ValueError(
            f"by must be a field of table {table.name!r}, {', '.join(dtypes)}, got {by!r}"
        )
    best: list[tuple[float, int, float]] = []
    for rows in joining.whole_rows(chain, table, None, progress):
        values = as_floats(rows.fields[by], dtypes[by]).astype(np.float64)
        norms = np.sqrt((values * values).sum(axis=1))
        # Infinity is the largest but one: squares of float32 are far from the end of float64.
        places = np.where(np.isinf(norms), np.finfo(np.float64).max, norms)
        places = np.where(np.isnan(norms), np.inf, places) * (1 if smallest else -1)
        at = np.lexsort((rows.keys, places))[:count]
        found = zip(places[at].tolist(), rows.keys[at].tolist(), norms[at].tolist(), strict=True)
        best = heapq.nsmallest(count, [*best, *found])
    return [(key, norm) for _, key, norm in best]


def as_floats(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """A field as numpy can calculate with it: bfloat16 as float32, others as they are."""
    if dtype != "bfloat16":
        return values
    floats: NDArray[Any] = values.view(np.uint16).astype(np.uint32) << np.uint32(16)
    return floats.view(np.float32)
