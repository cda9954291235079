"""The rows of a table as entries of a `state_dict`: plain tensors by name.

Shape letters: n rows, D row width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recsdk_core.checkpoint.replacing import NewRows

__all__ = ["ENTRIES", "STATE", "AnyName", "entries_of", "rows_of"]

STATE = "state."
"""What the names of entries of optimizer state begin with."""


ENTRIES = ("keys", "state", "update_count", "log_decay", "drawn_name")
"""What the names of entries begin with, but for that of a parameter."""


class AnyName:
    """Has an attribute of any name: to functions that look for what an entry is named after."""

    def __getattr__(self, name: str) -> AnyName:
        if name.startswith("_"):
            raise AttributeError(name)
        return self


def rows_of(table: Any) -> NewRows:
    """The rows that readers of a table see now, in ascending order of row number."""
    batches = list(table.export())
    return NewRows(
        keys=_joined([batch.keys for batch in batches], np.empty(0, np.int64)),
        weights=_joined([batch.weights for batch in batches], _no_rows(table.dim)),
        state={
            name: _joined([batch.state[name] for batch in batches], _no_rows(width))
            for name, width in table.state_fields
        },
        update_count=table.update_count,
        log_decay=table.log_decay,
    )


def entries_of(rows: NewRows, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """keys int64 (n,), weight (n, D), state.<field> float32 (n, width), update_count.

    `dtype`: of weight. With an optimizer that catches up, log_decay too.
    """
    entries = {
        "keys": torch.from_numpy(rows.keys),
        "weight": torch.from_numpy(rows.weights).to(dtype),
        "update_count": torch.tensor(rows.update_count),
        **{STATE + name: torch.from_numpy(value) for name, value in rows.state.items()},
    }
    if "log_decay" in rows.state:
        entries["log_decay"] = torch.tensor(rows.log_decay, dtype=torch.float64)
    return entries


def _no_rows(width: int) -> NDArray[np.float32]:
    return np.empty((0, width), np.float32)


def _joined(parts: Sequence[NDArray[Any]], empty: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([empty, *parts])
