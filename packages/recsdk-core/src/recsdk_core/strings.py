"""Keys from strings.

Shape letters: N strings, K bytes.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from recsdk_core import _ext

__all__ = ["hash_strings"]

Array: TypeAlias = Any
"""A numpy array, a torch CPU tensor, or any DLPack CPU array."""


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
    return _ext.hash_strings(bytes, offsets, seed)
