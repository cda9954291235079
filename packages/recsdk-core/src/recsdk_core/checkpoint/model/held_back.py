"""What is said of rows that a copy lacks, although their batches are trained."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recsdk_core.index import Index
    from recsdk_core.table import Table

__all__ = ["warn_of_rows_held_back"]


def warn_of_rows_held_back(keys: Table | Index, copy: str) -> None:
    """Warns if a copy of the rows, called `copy`, lacks some of batches that have ended."""
    count = keys.stats().num_rows_held_back
    if count:
        warnings.warn(
            f"table {keys.name!r}: {count} new rows are not in this {copy}. Their batches have "
            "ended, but an earlier one has not: its gradients wait for others, or something keeps "
            "the output or the exception of a training forward that had no backward; drop that, "
            "as by del",
            RuntimeWarning,
            stacklevel=2,
        )
