"""Calls over the rows of many tables at once, for frameworks.

A batch is mapped once (`map_tables`); its rows are then read (`pool_tables`) and trained
(`update_tables`). Each call spreads its tables over the thread pool. `map_joined`, `pool_joined`
and `update_joined` do the same for what lies in one array of each kind.

Shape letters: N keys, B bags, C columns of a matrix, D row width, M numbers, P pieces, T tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from recsdk_core import _ext
from recsdk_core._ext import Bags, JoinedBags, Lease
from recsdk_core._internal.checks import int_within
from recsdk_core._internal.keyed import INT64, step_of

if TYPE_CHECKING:
    from recsdk_core.index import Index
    from recsdk_core.table import Table

__all__ = [
    "Bags",
    "JoinedBags",
    "KeyData",
    "StoreNumbers",
    "join_rows",
    "lease_tables",
    "map_joined",
    "map_tables",
    "pool_joined",
    "pool_tables",
    "release_leases",
    "update_joined",
    "update_tables",
]

Array: TypeAlias = Any
"""A numpy array, a torch CPU tensor, or any DLPack CPU array."""


class KeyData(NamedTuple):
    """What comes with the keys of one table, for its eviction and admission; see `Table.map`."""

    times: Array | None = None
    """int64 (N,), or (1,) for all."""
    scores: Array | None = None
    """float32 (N,)."""
    counts: Array | None = None
    """int64 (N,), or (1,) for all: how many occurrences each key stands for."""
    clicks: Array | None = None
    """int64 (N,), or (1,) for all: how often each was clicked."""
    now: int | None = None
    """The table's time from this call on."""


class StoreNumbers(NamedTuple):
    """Where `map_joined` writes row numbers, as numbers of stores that hold rows of several tables.

    The numbers are those that `join_rows` makes; there is no array between. T tables, P pieces.
    """

    out: Sequence[Array]
    """Of each store, int32 or int64 (M,), contiguous."""
    stores: Array
    """int64 (T,): which of those has each table's."""
    begins: Array
    """int64 (P,): where the numbers of each piece of keys begin there. No two may overlap."""
    first_rows: Array
    """int64 (T,): where each table's rows begin in its store."""
    default_rows: Array
    """int64 (T,): of the store, what keys without a row read, or the first of shared rows."""
    num_shared: Array
    """int64 (T,): the table's shared rows, if its default has the kind "shared_rows", else 0."""


def lease_tables(tables: Sequence[Table | Index], step: int | None = None) -> list[Lease]:
    """Opens a batch in flight in each of many tables: `Table.lease` of each, in one call.

    All or none: if one cannot be opened, those before it are released, and its error is raised.
    """
    return _ext.lease_tables(tables, step_of("lease_tables", step))


def release_leases(leases: Sequence[Lease | None]) -> None:
    """Releases many leases in one call; None, and what is released already, is left alone.

    It waits for no call that holds a table, unless somebody reads what leaves that table or its new
    rows begin with shared ones: whoever calls next finds the batch ended.
    """
    _ext.release_leases(leases)


def map_tables(
    calls: Sequence[tuple[Table | Index, Array]],
    *,
    insert: bool,
    leases: Sequence[Lease | None] | None = None,
) -> list[tuple[Array, Array]]:
    """Finds the rows of keys in many tables, and with `insert` gives a row to each unseen key.

    Each call is (table, keys (N,)), or (index, keys (N,)); each may occur once. Returns
    (rows int64 (N,), outcomes uint8 (N,)) for each. `leases` has one lease, or None, for each call.

    Each table is either done whole or unchanged; the first error is raised after the others have
    ended. Otherwise as `Table.map`.
    """
    return _ext.map_tables(calls, insert, leases)


def map_joined(
    tables: Sequence[Table | Index],
    keys: Array,
    counts: Array,
    *,
    insert: bool,
    leases: Sequence[Lease | None] | None = None,
    data: Sequence[KeyData | None] | None = None,
    begins: Array | None = None,
    num_pieces: Array | None = None,
    store: StoreNumbers | None = None,
) -> tuple[Array | None, Array]:
    """As `map_tables`, for keys of many tables that lie in one array.

    The `keys` (N,) of a table are one or more pieces: those of the first table come first. `counts`
    int64 (P,): keys of each piece. `num_pieces` int64 (T,): pieces of each table; None: one.
    `begins` int64 (P,): where each piece begins; None: one after the other, to the last key.
    `data`: what comes with the keys of each table, or None. Returns (rows int64 (M,), outcomes
    uint8 (M,)) of the keys of all pieces, one piece after the other. With many tables it takes less
    time, as there are fewer arrays. `store`: where row numbers are written in place of the first of
    these, which is None then; what it has is unspecified if the call raises. Raises ValueError for
    pieces that do not fit the tables or the keys, for data as `Table.map` does, and for a `store`
    that does not fit the pieces, lies over what else the call reads or writes, or whose numbers are
    too narrow for a table's rows.
    """
    return _ext.map_joined(tables, keys, counts, insert, leases, data, begins, num_pieces, store)


def pool_tables(
    calls: Sequence[tuple[Table, Sequence[tuple[Bags, Array, int]]]],
) -> None:
    """Writes the pooled vectors of bags of many tables.

    Each call is (table, [(bags, out, column), ...]); a table may occur once. Bag b goes to
    `out[b, column : column + D]`; `out` is float32 (at least B, C), each row contiguous. No two
    blocks may write to the same place. An empty bag gives zeros. Raises ValueError or TypeError for
    what does not fit, with nothing written. Cost: reading each key's row once, on the threads of
    the pool.
    """
    _ext.pool_tables(calls)


def update_tables(
    calls: Sequence[tuple[Table, Sequence[tuple[Any, ...]]]],
) -> None:
    """Applies one optimizer update to each of many tables.

    Each call is (table, [(bags, grad, column), ...]) or with a fourth item `weights_grad`, float32
    (N,) or None; a table may occur once. The gradient of bag b is `grad[b, column : column + D]`,
    float32 (at least B, C), each row contiguous. Gradients of a row are added in the order of the
    blocks, then of their keys. `weights_grad` is filled with the gradient of the bags' weights,
    computed before the update. A table without blocks also advances its update count.

    Everything is checked first: ValueError and TypeError change nothing. Each table is either done
    whole or unchanged; the first error, such as NonFiniteError under `on_nonfinite="raise"`, is
    raised after the others have ended. Cost: reading and writing each row once, beside a sort.
    """
    _ext.update_tables(calls)


def pool_joined(
    tables: Sequence[Table],
    bags: JoinedBags,
    shape: tuple[int, ...],
    pooled: range | None = None,
    out: Array | None = None,
) -> Array:
    """The pooled vectors of many tables' bags: float32 of `shape`, (M,) or (B, C).

    In one dimension the vectors of a piece lie one after the other from its start on; in a matrix
    bag b's are columns [start, start + D) of row b. No two pieces may fill the same numbers; what
    none fills is 0. `pooled`: which starts are filled; None: all. `out`: where the result is
    written, float32 (M,), and returned; None: new memory. Raises ValueError if `bags` has not as
    many tables, or vectors that do not lie within the result, or `out` has another shape. With many
    tables it takes less time than `pool_tables`, as there are fewer arrays.
    """
    if not isinstance(shape, tuple) or len(shape) not in (1, 2):
        raise TypeError(f"pool_joined: shape must be (M,) or (B, C), got {shape!r}")
    size, *columns = [int_within("pool_joined", 0, INT64, shape=length) for length in shape]
    if not isinstance(pooled, range | None):
        raise TypeError(f"pooled must be a range of starts or None, got {type(pooled).__name__}")
    ends = None if pooled is None else (pooled.start, pooled.stop)
    for end in ends or ():  # of a range they are Python's ints
        int_within("pool_joined", -INT64, INT64, pooled=end)
    return _ext.pool_joined(tables, bags, size, columns[0] if columns else None, ends, out)


def update_joined(tables: Sequence[Table], bags: JoinedBags, grad: Array) -> None:
    """Applies one optimizer update to each of many tables.

    `grad` float32 (M,) or (B, C), of the result of `pool_joined` with all pieces; the rows of a
    matrix are contiguous. Gradients of a row are added in the order of the pieces, then of their
    keys. A table may occur once, and one without pieces also advances its update count. Otherwise
    as `update_tables`.
    """
    _ext.update_joined(tables, bags, grad)


def join_rows(
    rows: Array,
    outcomes: Array | None,
    parts: tuple[Array, Array, Array, Array, Array],
    out: Array,
) -> None:
    """Writes the rows of many tables' keys as numbers of one store that has all their rows.

    `rows` int64 or int32 (N,), `outcomes` uint8 (N,): as `map_joined` gave them; outcomes None:
    every key has a row. `parts`: (begins, counts, first rows, default rows, numbers of shared
    rows), int64 (P,) each: part p is `counts[p]` keys from `begins[p]` on, of a table whose first
    row in the store is the first of these, and whose keys without a row read the second; if it has
    shared rows, they begin there, and `rows` says which one a key reads. `out`: int32 or int64
    (M,), the keys of all parts one after the other. Raises ValueError, with `out` unspecified, if
    its size is not that of the parts, a part does not lie within `rows`, or a number is negative or
    too large for `out` or its part. Cost: one pass over the keys, on the threads of
    `set_num_threads`.
    """
    _ext.join_rows(rows, outcomes, parts, out)
