"""Initial rows in plain numpy, bit-equal to the engine's.

Values come from Philox4x32-10: column c of a row takes word c % 4 of block c // 4, under the
counter (block, draw, key's low half, key's high half) and a 64-bit stream made of seed and table.

Source: J. Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011 (Philox); G. Box
and M. Muller, "A Note on the Generation of Random Normal Deviates", 1958.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recsdk_core._ext import table_hash
from recsdk_core.init import Constant, Custom, Initializer, Normal, Uniform

__all__ = ["initial_rows", "mix64"]

F32 = np.float32
Floats: TypeAlias = NDArray[np.float32]
Words: TypeAlias = NDArray[np.uint32]
_MASK32 = np.uint64(0xFFFFFFFF)


def initial_rows(
    initializer: Initializer, seed: int, name: str, keys: NDArray[np.int64], dim: int
) -> Floats:
    """First weights of keys (N,): float32 (N, dim)."""
    if isinstance(initializer, Custom):
        values = np.zeros((len(keys), dim), F32)
        initializer.fn(keys.copy(), values)
        return values
    if isinstance(initializer, Constant):
        return np.full((len(keys), dim), initializer.value, F32)
    stream = mix64(seed + 0x9E3779B97F4A7C15) ^ table_hash(name)
    words = _philox(keys, (dim + 3) // 4, stream)
    if isinstance(initializer, Uniform):
        values = _uniform(words, F32(initializer.low), F32(initializer.high))
    elif isinstance(initializer, Normal):
        values = F32(initializer.mean) + F32(initializer.stddev) * _standard_normal(words)
    else:
        raise ValueError(
            f"ReferenceTable has no model of {type(initializer).__name__}; use another"
        )
    return values.reshape(len(keys), (dim + 3) // 4 * 4)[:, :dim]


def mix64(x: int) -> int:
    """The finalizer of SplitMix64. Source: G. Steele et al., OOPSLA 2014."""
    mask = 2**64 - 1
    x &= mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def _philox(keys: NDArray[np.int64], num_blocks: int, stream: int) -> Words:
    """Random words (N, num_blocks, 4)."""
    bits = keys.view(np.uint64)[:, None]
    zeros = np.zeros((len(keys), num_blocks), np.uint64)
    counter = [
        zeros + np.arange(num_blocks, dtype=np.uint64),
        zeros,
        zeros + (bits & _MASK32),
        zeros + (bits >> np.uint64(32)),
    ]
    key0, key1 = stream & 0xFFFFFFFF, stream >> 32
    for _ in range(10):
        product0 = counter[0] * np.uint64(0xD2511F53)
        product1 = counter[2] * np.uint64(0xCD9E8D57)
        counter = [
            (product1 >> np.uint64(32)) ^ counter[1] ^ np.uint64(key0),
            product1 & _MASK32,
            (product0 >> np.uint64(32)) ^ counter[3] ^ np.uint64(key1),
            product0 & _MASK32,
        ]
        key0, key1 = (key0 + 0x9E3779B9) & 0xFFFFFFFF, (key1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(counter, axis=-1).astype(np.uint32)


def _uniform(words: Words, low: Any, high: Any) -> Floats:
    """Multiples of 2**-24 scaled to [low, high); never high itself unless low is."""
    last = np.nextafter(high, F32(-np.inf)) if high > low else high
    unit = (words >> np.uint32(8)).astype(F32) * F32(2.0**-24)
    values: Floats = np.minimum(low + (high - low) * unit, last)
    return values


def _standard_normal(words: Words) -> Floats:
    """Words 0 and 1 of a block give radii, words 2 and 3 angles."""
    uniform = ((words[..., :2] >> np.uint32(1)).astype(F32) + F32(0.5)) * F32(2.0**-31)
    radius = np.sqrt(F32(-2.0) * _natural_log(uniform))
    sine, cosine = _sine_cosine(words[..., 2:])
    return np.concatenate([radius * cosine, radius * sine], axis=-1)


def _natural_log(x: Floats) -> Floats:
    """e * ln(2) + 2 * atanh((m - 1) / (m + 1)) of x = m * 2**e, as a truncated series."""
    bits = x.view(np.int32)
    exponent = (bits - np.int32(0x3F3504F3)) >> 23
    m = (bits - (exponent << 23)).view(F32)
    e = exponent.astype(F32)
    s = (m - F32(1)) / (m + F32(1))
    z = s * s
    c3, c5, c7, c9 = (F32(1) / F32(n) for n in (3, 5, 7, 9))
    series = z * (c3 + z * (c5 + z * (c7 + z * c9)))
    twice = s + s
    result: Floats = e * F32(0.693359375) + (twice + (twice * series - e * F32(2.12194440e-4)))
    return result


def _sine_cosine(turn: Words) -> tuple[Floats, Floats]:
    """Of a fraction of a turn in 2**-32 turns, reduced exactly, as Taylor series."""
    quarter = (turn + np.uint32(0x20000000)) >> np.uint32(30)
    rest = (turn - (quarter << np.uint32(30))).view(np.int32)
    x = rest.astype(F32) * F32(1.46291807926715968e-9)
    z = x * x
    s6, s120, s5040, s362880 = (F32(1) / F32(n) for n in (6, 120, 5040, 362880))
    sine = x + x * z * (-s6 + z * (s120 + z * (-s5040 + z * s362880)))
    c24, c720, c40320, c3628800 = (F32(1) / F32(n) for n in (24, 720, 40320, 3628800))
    cosine = F32(1) + z * (F32(-0.5) + z * (c24 + z * (-c720 + z * (c40320 - z * c3628800))))
    is_swapped = (quarter & np.uint32(1)) != 0
    sine_sign = np.where((quarter & np.uint32(2)) != 0, F32(-1), F32(1))
    cosine_sign = np.where(((quarter + np.uint32(1)) & np.uint32(2)) != 0, F32(-1), F32(1))
    return (
        np.where(is_swapped, cosine, sine) * sine_sign,
        np.where(is_swapped, sine, cosine) * cosine_sign,
    )
