"""16-bit weights in plain numpy, bit-equal to the engine's; float32 holds them exactly.

Random bits are those of a counter-based generator, see `random_halves`. Source of its multipliers:
G. Steele et al., "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014 (64 bits); C.
Wellons, "Prospecting for Hash Functions", 2018 (32 bits).

Shape letters: N keys, D row width.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recsdk_core._ext import table_hash
from recsdk_core.testing._initial_rows import mix64

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


def random_halves(
    seed: int, name: str, keys: NDArray[np.int64], t: int, dim: int
) -> NDArray[np.uint32]:
    """The 16 random bits (N, D) by which update t rounds each column of the keys' rows (N,).

    Column c takes half-word c % 2, the low one first, of word c // 2. A word is its number, mixed
    with the 64 bits that a key has in the sequence of SplitMix64 that starts at the stream made of
    seed, table and t.
    """
    stream = mix64((mix64(seed + _STEP) ^ table_hash(name)) + t * _STEP)
    own = [mix64(stream + int(key) * _STEP) for key in keys]
    first = np.array([[x & 0xFFFFFFFF] for x in own], np.uint32).reshape(-1, 1)
    second = np.array([[x >> 32] for x in own], np.uint32).reshape(-1, 1)
    words = first + np.arange((dim + 1) // 2, dtype=np.uint32) * np.uint32(0x9E3779B9)
    words = (words ^ words >> 16) * np.uint32(0x7FEB352D) ^ second
    words = (words ^ words >> 15) * np.uint32(0x846CA68B)
    words ^= words >> 16
    halves: NDArray[np.uint32] = words.astype("<u4").view("<u2")[:, :dim].astype(np.uint32)
    return halves


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
