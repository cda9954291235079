"""Strings are hashed as xxHash's own library does."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from engine_threads import engine_threads
from hypothesis import example, given
from hypothesis import strategies as st

from recsdk_core import hash_strings


def signed(number: int) -> int:
    return number - ((number >> 63) << 64)


@given(
    st.lists(st.binary(max_size=150)),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=9),
    st.sampled_from([np.int32, np.int64]),
)
@example([b"", b"x" * 31, b"y" * 32, b"z" * 33, b"", b"\xff" * 64], 2**64 - 1, b"", np.int64)
def test_hashes_are_xxh64(strings: list[bytes], seed: int, before: bytes, kind: type) -> None:
    offsets = np.cumsum([len(before), *map(len, strings)], dtype=np.int64).astype(kind)
    text = np.frombuffer(before + b"".join(strings), np.uint8)
    expected = [signed(xxhash.xxh64_intdigest(each, seed=seed)) for each in strings]
    assert hash_strings(text, offsets, seed).tolist() == expected


def test_hashes_do_not_depend_on_threads() -> None:
    generator = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(generator.integers(0, 40, 50_000))])
    text = generator.integers(0, 256, int(offsets[-1]), np.uint8)
    with engine_threads(1):
        alone = hash_strings(text, offsets, 7)
    with engine_threads(3):
        assert (hash_strings(text, offsets, 7) == alone).all()
    chosen = range(0, 50_000, 997)
    expected = [xxhash.xxh64_intdigest(text[offsets[n] : offsets[n + 1]], 7) for n in chosen]
    assert [int(alone[n]) for n in chosen] == [signed(each) for each in expected]


def test_tensors_give_a_tensor() -> None:
    torch = pytest.importorskip("torch")
    keys = hash_strings(torch.tensor([97], dtype=torch.uint8), torch.tensor([0, 1]))
    assert keys.tolist() == [signed(xxhash.xxh64_intdigest(b"a"))]
    assert keys.dtype == torch.int64


@pytest.mark.parametrize(
    ("offsets", "kind", "text"),
    [
        ([], ValueError, "offsets must have one element more than there are strings, got none"),
        ([0, 5], ValueError, "offsets must lie within the bytes, 0 to 4, got 0 to 5"),
        ([-1, 3], ValueError, "offsets must lie within the bytes, 0 to 4, got -1 to 3"),
        (
            [0, 3, 2, 4],
            ValueError,
            "offsets must not descend, got 2 after 3 at 2; pass them in ascending",
        ),
        ([0.0, 1.0], TypeError, "offsets"),
    ],
)
def test_offsets_that_fit_no_bytes(offsets: list, kind: type[Exception], text: str) -> None:
    array = np.array(offsets, None if offsets else np.int64)
    with pytest.raises(kind, match=text):
        hash_strings(np.zeros(4, np.uint8), array)


def test_bytes_of_another_type() -> None:
    with pytest.raises(TypeError, match="uint8"):
        hash_strings(np.zeros(4, np.int64), np.array([0, 4]))
