"""From categories and counters to 64-bit ids."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from recsdk_core import hash_strings
from recsdk_pipeline._internal.checks import check_text
from recsdk_sharding.placement.ranks import mix64

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]
Float64s = npt.NDArray[np.float64]


def category_key(feature: str, value: str) -> int:
    """Return the 64-bit id of category `value` of `feature`.

    The id is XXH64, read as a signed number, of `value` in UTF-8, whose seed is XXH64 (of seed 0)
    of `feature` in UTF-8: the same on every machine, in every process and for every run. Equal
    values of different features get different ids, so features may share a table. Some
    microseconds; values seen lately are remembered. `category_keys` is for many. Thread-safe.

    >>> category_key("occupation", "writer")
    -5407461855750617976
    """
    check_text("feature", feature)
    check_text("value", value)
    return _category_key(feature, value)


@lru_cache(maxsize=1 << 16)
def _category_key(feature: str, value: str) -> int:
    return int(category_keys(feature, [value])[0])


def category_keys(feature: str, values: Sequence[str] | Any) -> Int64s:
    """Return `category_key` of each value, shape (len(values),).

    `values` are strings, or a pyarrow array of strings or bytes without nulls, which is read where
    it lies: 5 nanoseconds each for short ones, on the engine's threads. Raises ValueError for an
    array with nulls, TypeError for one of another type and for what is one string. Thread-safe.
    """
    check_text("feature", feature)
    seed = feature_seed(feature)
    if isinstance(values, str):
        raise TypeError(f"values must be a list of strings, got the string {values!r}")
    if hasattr(values, "buffers") or hasattr(values, "combine_chunks"):
        return _of_arrow(values, seed)
    try:
        values = values if hasattr(values, "__len__") else list(values)
        text = "".join(values)
    except TypeError as error:
        kind = type(values).__name__
        raise TypeError(f"values must be strings or a pyarrow array, got {kind}") from error
    data = text.encode()
    is_ascii = len(data) == len(text)
    lengths = map(len, values if is_ascii else (value.encode() for value in values))
    ends = np.cumsum(np.fromiter(lengths, np.int64, len(values)))
    return _hashed(
        np.frombuffer(data, np.uint8), np.concatenate([np.zeros(1, np.int64), ends]), seed
    )


def _of_arrow(array: Any, seed: int) -> Int64s:
    import pyarrow as pa

    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if array.null_count:
        raise ValueError(f"values must have no nulls, got {array.null_count} of {len(array)}")
    if array.type not in (pa.string(), pa.binary()):
        if not any(is_text(array.type) for is_text in _texts()):
            raise TypeError(f"values must be strings or bytes, got {array.type}")
        array = array.cast(pa.large_binary())
    width = np.int64 if pa.types.is_large_binary(array.type) else np.int32
    _, offsets, data = array.buffers()
    if not len(array):
        return np.empty(0, np.int64)
    ends = np.frombuffer(offsets, width)[array.offset : array.offset + len(array) + 1]
    return _hashed(np.frombuffer(data or b"", np.uint8), ends, seed)


def _texts() -> list[Any]:
    from pyarrow import types

    return [
        types.is_large_string,
        types.is_large_binary,
        types.is_string_view,
        types.is_binary_view,
        types.is_fixed_size_binary,
    ]


def _hashed(data: Any, offsets: Any, seed: int) -> Int64s:
    keys: Int64s = hash_strings(data, offsets, seed)
    return keys


@lru_cache(maxsize=1 << 12)
def feature_seed(feature: str) -> int:
    """Return the seed of the ids of `feature`: XXH64 of its name."""
    name = np.frombuffer(feature.encode(), np.uint8)
    return int(_hashed(name, np.array([0, len(name)]), 0)[0]) & 0xFFFFFFFFFFFFFFFF


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
