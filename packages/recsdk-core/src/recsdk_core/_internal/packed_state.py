"""Optimizer state of rows, packed as the engine has it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["unpack_state"]


def unpack_state(
    packed: NDArray[np.float32], fields: tuple[tuple[str, int], ...]
) -> dict[str, NDArray[np.float32]]:
    """The fields of packed state (n, sum of widths), each contiguous."""
    ends = np.cumsum([width for _, width in fields])
    parts = np.split(packed, ends[:-1], axis=1)
    return {name: np.ascontiguousarray(part) for (name, _), part in zip(fields, parts, strict=True)}
