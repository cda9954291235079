"""Whether keys have room in a table whose `max_rows` divides over groups of keys.

Shape letters: n keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from recsdk_core import CapacityError
from recsdk_core.virtual_shards import eviction_group_quotas, eviction_groups_of

__all__ = ["require_room"]


def require_room(
    name: str, max_rows: int, num_groups: int, parts: Sequence[NDArray[np.int64]]
) -> None:
    """Raises CapacityError unless a table has room for all these keys, (n,) each; some may repeat.

    Cost: sorts them.
    """
    keys = np.unique(np.concatenate([part.astype(np.int64) for part in parts]))  # some uint64
    used = np.bincount(eviction_groups_of(keys, num_groups), minlength=num_groups)
    quotas = eviction_group_quotas(max_rows, num_groups)
    for group in np.flatnonzero(used > quotas).tolist():
        which = "it" if num_groups == 1 else f"group {group} of its {num_groups} groups of ids"
        raise CapacityError(
            f"table {name!r} is full: {which} takes {quotas[group]} rows of max_rows={max_rows} "
            f"and would have {used[group]}; raise max_rows"
        )
