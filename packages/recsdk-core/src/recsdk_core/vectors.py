"""Packs rows of matrices one after the other, as they travel between processes, and unpacks them.

Shape letters: K blocks, P parts of all blocks, M rows of all parts, S stretches of vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from recsdk_core import _ext
from recsdk_core._internal.checks import int_within, require_number
from recsdk_core.virtual_shards import NUM_VIRTUAL_SHARDS

__all__ = [
    "Array",
    "VectorParts",
    "VectorStretches",
    "in_huge_pages",
    "lay_out_vectors",
    "pack_vectors",
    "unpack_vectors",
]

Array: TypeAlias = Any
"""A numpy array, a torch CPU tensor, or any DLPack CPU array."""
_A = TypeVar("_A")


class VectorParts(NamedTuple):
    """Blocks, the columns of matrices, and the parts that each has: vectors one after the other.

    All are int64, but for `rows`. Block k is the columns [columns[k], columns[k] + widths[k]) of
    one of the given matrices, and has the next num_parts[k] of the parts.
    """

    matrices: Array
    """(K,): which matrix each block is of."""
    columns: Array
    """(K,): its first column."""
    widths: Array
    """(K,)."""
    num_parts: Array
    """(K,)."""
    starts: Array
    """(P,): where the first vector of each part is in what is packed."""
    begins: Array
    """(P,): the first of its `rows`."""
    counts: Array
    """(P,): how many rows it has."""
    rows: Array
    """int32 (M,), or int64 below 2^31: rows of a block. Those of a part may not occur twice."""


class VectorStretches(NamedTuple):
    """Vectors as they lie one after the other, process by process. All are int64 (S,)."""

    counts: Array
    """Which of the counts of a batch says how many vectors a stretch has."""
    widths: Array
    """Floats of each of its vectors."""
    processes: Array
    """Whose it is, from 0 on, ascending."""


def lay_out_vectors(
    counts: Array, stretches: VectorStretches, num_processes: int, multiple: int
) -> tuple[NDArray[np.int64], list[int], list[int]]:
    """Where stretches of vectors begin, if each process' floats are filled up to a `multiple`.

    Returns int64 (S,), and of each process how many floats its vectors have, and with those that
    fill up. Raises ValueError for counts that are negative or not there, and stretches that do not
    fit each other.
    """
    call, most = "lay_out_vectors", NUM_VIRTUAL_SHARDS
    number = int_within(call, 0, most + 1, num_processes=num_processes)
    filled = int_within(call, 1, 2**63, multiple=multiple)
    return _ext.lay_out_vectors(counts, _plain(stretches, "stretches"), number, filled)


def unpack_vectors(packed: Array, parts: VectorParts, matrices: Sequence[Array]) -> None:
    """Writes to each row of each block the sum of its vectors.

    `packed` is float32, one dimension; each of the `matrices` float32, whose rows are contiguous
    and have memory of their own. Vectors are added in the order of the parts; a row that no part
    has becomes 0. Blocks may not overlap.

    Everything is checked first: TypeError and ValueError change nothing. Cost: one pass over the
    vectors, spread over the thread pool; the result does not depend on the number of threads.
    """
    _ext.unpack_vectors(packed, _plain(parts, "parts"), matrices)


def pack_vectors(
    matrices: Sequence[Array], parts: VectorParts, packed: Array, divisor: float = 1.0
) -> None:
    """Writes the vectors of each part, divided by `divisor`, to their places in `packed`.

    Places that no part fills stay as they are. Parts may not overlap. Otherwise as
    `unpack_vectors`.
    """
    require_number("pack_vectors", divisor=divisor)
    _ext.pack_vectors(matrices, _plain(parts, "parts"), packed, float(divisor))


def _plain(given: Any, name: str) -> tuple[Any, ...]:
    """A named tuple without its names; TypeError for what is no tuple."""
    if not isinstance(given, tuple):
        raise TypeError(f"{name} must be a tuple of arrays, got {type(given).__name__}")
    return tuple(given)


def in_huge_pages(array: _A) -> _A:
    """The same contiguous array in new memory, which is backed by huge pages if it is large.

    It has one dimension or two, and must not have been written to. Memory of more than 32 MiB comes
    from the system each time, and small pages of it take longer to come than the results that are
    written to them. Has no effect on smaller arrays, on tensors of a device or without memory, as
    where torch traces, where the system has no huge pages, and on numbers. Raises TypeError for
    what is no array.
    """
    num_bytes = getattr(array, "nbytes", None)
    if not isinstance(num_bytes, int):
        raise TypeError(
            f"array must be a numpy array or a torch tensor, got {type(array).__name__}"
        )
    if num_bytes >= _ext.LARGE_BYTES and _is_in_memory(array):
        _ext.ask_for_huge_pages(array, num_bytes)
    return array


def _is_in_memory(array: Any) -> bool:
    """False of a tensor of a device, and of one that has a shape only, as where torch traces."""
    storage = getattr(array, "untyped_storage", None)
    return storage is None or bool(storage().device.type == "cpu")
