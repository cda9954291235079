"""From categories and counters to 64-bit ids."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from recsdk_sharding.placement.ranks import mix64

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]
Float64s = npt.NDArray[np.float64]

_SEPARATOR = b"\x1f"


@lru_cache(maxsize=1 << 18)
def category_key(feature: str, value: str) -> int:
    """Return the 64-bit id of category `value` of `feature`.

    The id is the first 8 bytes, little-endian and signed, of BLAKE2b over `feature`, the byte
    0x1f and `value` in UTF-8: the same on every machine, in every process and for every run.
    Equal values of different features get different ids, so features may share a table.
    About a microsecond; values seen lately are remembered. Thread-safe.

    >>> category_key("occupation", "writer")
    -6867607171297094863
    """
    text = feature.encode() + _SEPARATOR + value.encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def category_keys(feature: str, values: list[str]) -> Int64s:
    """Return `category_key` of each value, shape (len(values),)."""
    return np.fromiter((category_key(feature, v) for v in values), np.int64, len(values))


def stream_key(seed: int, name: str) -> np.uint64:
    """Return the key of an independent stream of random numbers called `name`."""
    key: np.uint64 = np.uint64(category_key(name, str(seed)) & 0xFFFFFFFFFFFFFFFF)
    return key


def uniforms(key: np.uint64, counters: UInt64s) -> Float64s:
    """Return one number in (0, 1) per counter: a pure function of (key, counter)."""
    bits = mix64(mix64(counters ^ key) + key) >> np.uint64(12)
    numbers: Float64s = (bits.astype(np.float64) + 0.5) / float(1 << 52)
    return numbers


def normals(key: np.uint64, counters: UInt64s) -> Float64s:
    """Return one standard normal number per counter: a pure function of (key, counter).

    Source: the Box-Muller transform, its cosine branch.
    """
    radius = np.sqrt(-2.0 * np.log(uniforms(key, counters)))
    angle = 2.0 * np.pi * uniforms(key ^ np.uint64(0xA5A5A5A5A5A5A5A5), counters)
    normal: Float64s = radius * np.cos(angle)
    return normal
