"""16-bit weights in plain numpy, bit-equal to the engine's; float32 holds them exactly.

Shape letters: D row width.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recsdk_core._ext import table_hash
from recsdk_core.testing._initial_rows import mix64, philox

__all__ = ["random_halves", "round_nearest", "round_stochastic"]

F32 = np.float32
Floats: TypeAlias = NDArray[np.float32]
_STEP = 0x9E3779B97F4A7C15


def round_nearest(values: Floats, dtype: str) -> Floats:
    """The nearest values of a type, ties to even; what is too large becomes infinite."""
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(F32)
    if dtype == "float32":
        return values
    bits = np.ascontiguousarray(values).view(np.uint32)
    return _upper_half(bits + np.uint32(0x7FFF) + (bits >> 16 & np.uint32(1)), values)


def random_halves(seed: int, name: str, key: int, t: int, dim: int) -> NDArray[np.uint32]:
    """The 16 random bits (D,) by which update t rounds each column of a key's row."""
    stream = mix64((mix64(seed + _STEP) ^ table_hash(name)) + t * _STEP)
    words = philox(np.array([key], np.int64), (dim + 7) // 8, stream, num_rounds=7)
    halves = words.reshape(-1).astype("<u4").view("<u2")
    return halves[:dim].astype(np.uint32)


def round_stochastic(values: Floats, dtype: str, random: NDArray[np.uint32]) -> Floats:
    """One of the two neighbours of each value (D,), by 16 random bits."""
    if dtype == "float32":
        return values
    bits = np.ascontiguousarray(values).view(np.uint32)
    if dtype == "bfloat16":
        return _upper_half(bits + random, values)
    size = np.abs(values)
    is_small = size < 2.0**-14
    multiple = np.where(is_small, size, 0) * F32(2.0**24) + random.astype(F32) * F32(2.0**-16)
    small = multiple.astype(np.int32).astype(F32) * F32(2.0**-24)
    normal = ((bits + (random >> 3)) & np.uint32(0xFFFFE000)).view(F32)
    rounded = np.where(is_small, np.copysign(small, values), normal)
    return _with_special(np.where(np.abs(rounded) >= 2.0**16, F32(np.inf), rounded), values)


def _upper_half(bits: NDArray[np.uint32], values: Floats) -> Floats:
    return _with_special((bits & np.uint32(0xFFFF0000)).view(F32), values)


def _with_special(rounded: Any, values: Floats) -> Floats:
    """Rounded values, but for those that are not finite."""
    made = np.where(np.isfinite(values), np.copysign(rounded, values), values)
    return made.astype(F32)
