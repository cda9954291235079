"""Columns of training data: keys from strings, rows in a random order, numbers interleaved.

Shape letters: N strings or rows, K bytes, C columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from recsdk_core import _ext
from recsdk_core._internal.checks import int_within

__all__ = ["Shuffle", "hash_strings", "interleave"]

Array: TypeAlias = Any
"""A numpy array, a torch CPU tensor, or any DLPack CPU array."""

Column: TypeAlias = tuple[Sequence[Array], Sequence[Array]]
"""(parts, stretches): arrays that have the rows of a column, and arrays that get them."""


def hash_strings(bytes: Array, offsets: Array, seed: int = 0) -> Array:
    """XXH64 of each string, read as a signed number: int64 (N,), the same on every machine.

    `bytes`: uint8 (K,). `offsets`: int64 or int32 (N + 1,); string n is
    `bytes[offsets[n]:offsets[n + 1]]`, as Arrow lays strings out. `seed`: 0 to 2**64 - 1. The
    result is of the framework of `offsets`. No strings give no keys. Raises TypeError or ValueError
    for offsets that fall, or that do not lie within `bytes`. Cost: about 5 ns a short string,
    spread over the threads of `set_num_threads`; the result does not depend on them. Thread-safe.

    >>> import numpy as np
    >>> text = np.frombuffer(b"writerdoctor", np.uint8)
    >>> hash_strings(text, np.array([0, 6, 12])).tolist()
    [7993980258035204612, -905524740725668762]
    """
    return _ext.hash_strings(bytes, offsets, int_within("hash_strings", 0, 2**64, seed=seed))


class Shuffle:
    """A random order of N rows, each of the N! as likely, and columns put in it.

    `seed`: 0 to 2**64 - 1. The order is the same for equal arguments on every machine. Columns are
    put in it in two passes within the caches, at half the cost of gathering: some 1.5 ns an id.
    Memory: 8 bytes a row, and one column in `write`, but a pointer a row for columns of 32 bytes a
    row and more, whose rows are copied once. Thread-safe. Raises ValueError for fewer than
    0 or more than 2**32 - 1 rows.

    >>> import numpy as np
    >>> shuffle = Shuffle(4, seed=1)
    >>> ids, out = np.array([10, 11, 12, 13]), np.empty(4, np.int64)
    >>> shuffle.write([([ids[:3], ids[3:]], [out])])
    >>> bool((out == ids[shuffle.order()]).all())
    True
    """

    def __init__(self, num_rows: int, seed: int) -> None:
        number = int_within("Shuffle", 0, 2**32, num_rows=num_rows)
        self._shuffle = _ext.Shuffle(number, int_within("Shuffle", 0, 2**64, seed=seed))

    def __len__(self) -> int:
        """The number of rows."""
        return self._shuffle.num_rows

    def order(self) -> Array:
        """Return which row comes first, second and so on: int64 (N,) of numpy."""
        return self._shuffle.order()

    def write(self, columns: Sequence[Column], skip: int = 0) -> None:
        """Put columns in this order, without the first `skip` rows of it.

        The parts of a column have its N rows, one part after the other, and its stretches get
        N - skip. They are contiguous (rows,) or (rows, C) of int64, int32, float32 or uint8; of one
        column all have one dtype and C, and those of different columns have the same numbers of
        rows. Stretches overlap nothing. All is checked first: TypeError and ValueError change
        nothing. On the caller's thread.
        """
        self._shuffle.write(columns, int_within("Shuffle.write", 0, 2**63, skip=skip))


def interleave(columns: Sequence[Array], matrix: Array) -> bool:
    """Write C columns of float32 (N,) to a float32 matrix (N, C); return whether all are finite.

    At least one column. All is checked first: TypeError and ValueError change nothing. On the
    caller's thread, at half the cost of assigning column by column. Thread-safe.

    >>> import numpy as np
    >>> matrix = np.empty((2, 3), np.float32)
    >>> interleave([np.array([n, 7], np.float32) for n in range(3)], matrix)
    True
    >>> matrix.tolist()
    [[0.0, 1.0, 2.0], [7.0, 7.0, 7.0]]
    """
    return _ext.interleave(columns, matrix)
