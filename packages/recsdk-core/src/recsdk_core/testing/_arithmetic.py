"""Updates and pooling in plain numpy float32, in the engine's order of operations.

Shape letters: N keys, B bags, D row width.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recsdk_core.optim import SGD, Adagrad, Adam, Optimizer, RowwiseAdagrad

__all__ = ["bag_divisor", "dot", "fresh_state", "state_fields", "update_row"]

F32 = np.float32
Floats: TypeAlias = NDArray[np.float32]
State: TypeAlias = dict[str, Floats]


def state_fields(optimizer: Optimizer, dim: int) -> tuple[tuple[str, int], ...]:
    """(name, width) of the optimizer's state of a row."""
    if isinstance(optimizer, Adagrad):
        return (("sum", dim),)
    if isinstance(optimizer, RowwiseAdagrad):
        return (("sum", 1),)
    if isinstance(optimizer, Adam):
        moments = (("exp_avg", dim), ("exp_avg_sq", dim))
        return (*moments, ("step", 1)) if optimizer.bias_correction == "row" else moments
    return ()


def fresh_state(optimizer: Optimizer, dim: int) -> State:
    """State of a new row."""
    first = getattr(optimizer, "initial_accumulator_value", 0.0)
    return {name: np.full(width, first, F32) for name, width in state_fields(optimizer, dim)}


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


def update_row(optimizer: Optimizer, t: int, weights: Floats, state: State, grad: Floats) -> None:
    """Update number t of one row with its summed gradient, in place."""
    lr, decay = F32(optimizer.lr), F32(optimizer.weight_decay)
    if decay != 0:
        grad = grad + decay * weights
    if isinstance(optimizer, SGD):
        weights -= lr * grad
    elif isinstance(optimizer, Adagrad):
        rate = F32(float(lr) / (1.0 + (t - 1) * float(F32(optimizer.lr_decay))))
        state["sum"] += grad * grad
        weights -= rate * grad / (np.sqrt(state["sum"]) + F32(optimizer.eps))
    elif isinstance(optimizer, RowwiseAdagrad):
        state["sum"] += lane_sum(grad * grad) / F32(len(grad))
        weights -= (lr / (np.sqrt(state["sum"]) + F32(optimizer.eps))) * grad
    else:
        _update_adam(optimizer, t, weights, state, grad)


def _update_adam(optimizer: Adam, t: int, weights: Floats, state: State, grad: Floats) -> None:
    beta1, beta2 = optimizer.betas
    if optimizer.bias_correction == "row":
        state["step"] += F32(1)
        t = int(state["step"][0])
    rate = F32(float(F32(optimizer.lr)) / (1.0 - _power(beta1, t)))
    inverse_root = F32(1.0 / math.sqrt(1.0 - _power(beta2, t)))
    state["exp_avg"][:] = _lerp(state["exp_avg"], grad, F32(1.0 - beta1))
    state["exp_avg_sq"][:] = state["exp_avg_sq"] * F32(beta2) + F32(1.0 - beta2) * grad * grad
    denominator = np.sqrt(state["exp_avg_sq"]) * inverse_root + F32(optimizer.eps)
    weights -= rate * state["exp_avg"] / denominator


def _lerp(start: Floats, end: Floats, weight: Any) -> Floats:
    """As torch.lerp, exact at both ends."""
    difference: Floats = end - start
    if weight < 0.5:
        difference *= weight
        return start + difference
    difference *= F32(1) - weight
    return end - difference


def _power(base: float, exponent: int) -> float:
    """base**exponent by squaring."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result
