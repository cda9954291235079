"""From categories and counters to 64-bit ids."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from recsdk_pipeline.data.hashing import hash_bytes
from recsdk_sharding.placement.ranks import mix64

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]
Float64s = npt.NDArray[np.float64]


@lru_cache(maxsize=1 << 16)
def category_key(feature: str, value: str) -> int:
    """Return the 64-bit id of category `value` of `feature`.

    The id is XXH64, read as a signed number, of `value` in UTF-8, whose seed is XXH64 (of seed 0)
    of `feature` in UTF-8: the same on every machine, in every process and for every run. Equal
    values of different features get different ids, so features may share a table. About 0.1 ms;
    values seen lately are remembered. `category_keys` is for many. Thread-safe.

    >>> category_key("occupation", "writer")
    -5407461855750617976
    """
    return int(category_keys(feature, [value])[0])


def category_keys(feature: str, values: Sequence[str]) -> Int64s:
    """Return `category_key` of each value, shape (len(values),), in some 0.1 microseconds each."""
    encoded = [value.encode() for value in values]
    lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    data = np.frombuffer(b"".join(encoded), np.uint8)
    return hash_bytes(data, offsets, seed=feature_seed(feature))


@lru_cache(maxsize=1 << 12)
def feature_seed(feature: str) -> int:
    """Return the seed of the ids of `feature`: XXH64 of its name."""
    name = np.frombuffer(feature.encode(), np.uint8)
    (hashed,) = hash_bytes(name, np.array([0, len(name)], np.int64)).tolist()
    return int(hashed) & 0xFFFFFFFFFFFFFFFF


def stream_key(seed: int, name: str) -> np.uint64:
    """Return the key of an independent stream of random numbers called `name`."""
    text = name.encode() + b"\x1f" + str(seed).encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    key: np.uint64 = np.uint64(int.from_bytes(digest, "little"))
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
