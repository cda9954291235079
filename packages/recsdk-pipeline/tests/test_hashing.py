"""Arrays of strings are hashed as xxHash's own library does."""

from __future__ import annotations

import numpy as np
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from recsdk_pipeline.data import category_key, category_keys
from recsdk_pipeline.data.hashing import hash_bytes


def signed(number: int) -> int:
    return number - ((number >> 63) << 64)


@given(st.lists(st.binary(max_size=150)), st.integers(0, 2**64 - 1), st.binary(max_size=9))
@example([b"", b"x" * 31, b"y" * 32, b"z" * 33, b"", b"\xff" * 64], 2**64 - 1, b"")
def test_hashes_are_xxh64(strings: list[bytes], seed: int, before: bytes) -> None:
    lengths = [len(before), *map(len, strings)]
    offsets = np.cumsum(lengths, dtype=np.int64)
    data = np.frombuffer(before + b"".join(strings), np.uint8)
    expected = [signed(xxhash.xxh64_intdigest(each, seed=seed)) for each in strings]
    assert hash_bytes(data, offsets, seed=seed).tolist() == expected


@given(st.text(max_size=12), st.lists(st.text(max_size=12)))
def test_category_keys_are_the_documented_ones(feature: str, values: list[str]) -> None:
    seed = xxhash.xxh64_intdigest(feature.encode())
    expected = [signed(xxhash.xxh64_intdigest(each.encode(), seed=seed)) for each in values]
    assert category_keys(feature, values).tolist() == expected
    assert [category_key(feature, each) for each in values] == expected
