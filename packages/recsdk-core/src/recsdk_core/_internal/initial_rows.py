"""Initial rows of keys, wherever they are to lie.

Shape letters: N keys, D row width.
"""

from __future__ import annotations

from recsdk_core import _ext
from recsdk_core._internal.checks import int_within, require_name
from recsdk_core._internal.config import engine_initializer
from recsdk_core._internal.keyed import INT64, UINT64, Array
from recsdk_core.init import Initializer

__all__ = ["initial_rows"]


def initial_rows(
    keys: Array, dim: int, *, initializer: Initializer, name: str, seed: int = 0
) -> Array:
    """The initial rows of keys (N,), float32 (N, D), for rows that are not in a table.

    They are those that `Table(dim, name=name, initializer=initializer, seed=seed)` gives new keys.
    `keys` are as those of a table; the result is a torch tensor if they are one, else numpy.
    Thread-safe. Raises ValueError or TypeError for a wrong argument, and what a custom initializer
    raises.

    >>> import numpy as np
    >>> from recsdk_core import Table, init, initial_rows
    >>> keys = np.array([5, -5])
    >>> rows = initial_rows(keys, 3, initializer=init.Normal(), name="user")
    >>> table = Table(dim=3, name="user", initializer=init.Normal())
    >>> bool((table.find_or_insert(keys) == rows).all())
    True
    """
    width = int_within("initial_rows", 1, INT64, dim=dim)
    number = int_within("initial_rows", 0, UINT64, seed=seed)
    require_name("initial_rows", name)
    return _ext.initial_weights(engine_initializer(initializer, width), number, name, width, keys)
