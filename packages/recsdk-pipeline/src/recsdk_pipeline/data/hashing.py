"""XXH64 of whole arrays of byte strings at once.

Source: Y. Collet, "XXH64 algorithm description", https://github.com/Cyan4973/xxHash.

Shapes: N strings.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]

_P1 = 0x9E3779B185EBCA87
_P2 = 0xC2B2AE3D27D4EB4F
_P3 = 0x165667B19E3779F9
_P4 = 0x85EBCA77C2B2AE63
_P5 = 0x27D4EB2F165667C5
_MASK = (1 << 64) - 1
_STRIPE = 32


def hash_bytes(data: Bytes, offsets: Int64s, *, seed: int = 0) -> Int64s:
    """Return XXH64 of each string, (N,), as signed 64-bit numbers.

    String n is data[offsets[n]:offsets[n + 1]], where `offsets` are (N + 1,) and never fall.
    Strings of one length are hashed together: some tens of nanoseconds each for short ones.
    """
    starts, lengths = offsets[:-1], np.diff(offsets)
    hashes = np.empty(len(lengths), np.uint64)
    order = np.argsort(lengths, kind="stable")
    ends = np.flatnonzero(np.diff(lengths[order])) + 1
    for chosen in np.split(order, ends) if len(order) else []:
        hashes[chosen] = _of_one_length(data, starts[chosen], int(lengths[chosen[0]]), seed)
    return hashes.view(np.int64)


def _of_one_length(data: Bytes, starts: Int64s, length: int, seed: int) -> UInt64s:
    state = np.full(len(starts), (seed + _P5) & _MASK, np.uint64)
    if length >= _STRIPE:
        state = _stripes(data, starts, length, seed)
    state += np.uint64(length)
    done = length // _STRIPE * _STRIPE
    for at in range(done, length - 7, 8):
        state ^= _round(np.zeros_like(state), _words(data, starts + at, "<u8"))
        state = _rotate(state, 27) * np.uint64(_P1) + np.uint64(_P4)
    at = length // 8 * 8
    if length - at >= 4:
        state ^= _words(data, starts + at, "<u4") * np.uint64(_P1)
        state = _rotate(state, 23) * np.uint64(_P2) + np.uint64(_P3)
        at += 4
    for last in range(at, length):
        state ^= _words(data, starts + last, "u1") * np.uint64(_P5)
        state = _rotate(state, 11) * np.uint64(_P1)
    return _avalanche(state)


def _stripes(data: Bytes, starts: Int64s, length: int, seed: int) -> UInt64s:
    firsts = (seed + _P1 + _P2, seed + _P2, seed, seed - _P1)
    lanes = [np.full(len(starts), first & _MASK, np.uint64) for first in firsts]
    for at in range(0, length - _STRIPE + 1, _STRIPE):
        for n in range(4):
            lanes[n] = _round(lanes[n], _words(data, starts + (at + 8 * n), "<u8"))
    state = sum(
        (_rotate(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True)),
        start=np.zeros(len(starts), np.uint64),
    )
    for lane in lanes:
        state ^= _round(np.zeros_like(lane), lane)
        state = state * np.uint64(_P1) + np.uint64(_P4)
    return state


def _words(data: Bytes, starts: Int64s, kind: str) -> UInt64s:
    """The little-endian words that begin at `starts`, at any address."""
    size = np.dtype(kind).itemsize
    words: npt.NDArray[np.uint64] = np.ndarray(
        (len(data) - size + 1,),
        kind,
        data,
        strides=(1,),  # one begins at each byte
    )
    return words[starts].astype(np.uint64)


def _round(state: UInt64s, words: UInt64s) -> UInt64s:
    mixed: UInt64s = _rotate(state + words * np.uint64(_P2), 31) * np.uint64(_P1)
    return mixed


def _rotate(values: UInt64s, bits: int) -> UInt64s:
    rotated: UInt64s = (values << np.uint64(bits)) | (values >> np.uint64(64 - bits))
    return rotated


def _avalanche(state: UInt64s) -> UInt64s:
    state ^= state >> np.uint64(33)
    state *= np.uint64(_P2)
    state ^= state >> np.uint64(29)
    state *= np.uint64(_P3)
    state ^= state >> np.uint64(32)
    return state
