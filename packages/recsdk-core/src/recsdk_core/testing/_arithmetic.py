"""Sums and pooling in plain numpy float32, in the engine's order of operations."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["bag_divisor", "dot", "lane_sum", "power"]

F32 = np.float32
Floats: TypeAlias = NDArray[np.float32]


def bag_divisor(pooling: str, weights: Floats | None, count: int) -> Any:
    """What the sum of a bag of `count` keys is divided by."""
    if pooling == "sum":
        return F32(1)
    if weights is None:
        return F32(count)
    total = F32(0)
    for weight in weights:
        total += weight
    return total


def lane_sum(values: Floats) -> Any:
    """Sum in 16 lanes (lane l adds elements l, l + 16, ...), then halves of the lanes."""
    padded = np.zeros((len(values) + 15) // 16 * 16, F32)
    padded[: len(values)] = values
    lanes = np.zeros(16, F32)
    for group in padded.reshape(-1, 16):
        lanes += group
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = lanes[:half] + lanes[half:]
    return lanes[0]


def dot(a: Floats, b: Floats) -> Any:
    """Scalar product in the order of `lane_sum`."""
    return lane_sum(a * b)


def power(base: float, exponent: int) -> float:
    """base**exponent by squaring, as the engine computes it."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result
