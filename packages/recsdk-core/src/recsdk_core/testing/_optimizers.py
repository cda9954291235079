"""The optimizers in plain numpy float32, in the engine's order of operations.

Shape letters: D row width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recsdk_core import optim
from recsdk_core.testing._arithmetic import lane_sum, power

__all__ = [
    "Step",
    "exp_of_negative",
    "fresh_state",
    "log_of_ratio",
    "next_log_decay",
    "state_fields",
    "update_row",
]

F32 = np.float32
Floats: TypeAlias = NDArray[np.float32]
State: TypeAlias = dict[str, Floats]


@dataclass(frozen=True)
class Step:
    """One update of a table."""

    optimizer: Any
    """The optimizer, with the learning rate of this update."""
    t: int
    """Number of the update, 1 for the first."""
    log_decay: float
    """The table's sum of log(1 - lr * weight_decay) before the update."""

    @property
    def lr(self) -> Any:
        """Learning rate as float32."""
        return F32(self.optimizer.lr)


def state_fields(optimizer: optim.Optimizer, dim: int) -> tuple[tuple[str, int], ...]:
    """(name, width) of the optimizer's state of a row."""
    names: dict[str, int] = {}
    if isinstance(optimizer, optim.SGD | optim.RMSprop):
        if isinstance(optimizer, optim.RMSprop):
            names["square_avg"] = dim
            names |= {"grad_avg": dim} if optimizer.centered else {}
        names |= {"momentum_buffer": dim} if optimizer.momentum else {}
    elif isinstance(optimizer, optim.Adagrad | optim.RowwiseAdagrad):
        names["sum"] = dim if isinstance(optimizer, optim.Adagrad) else 1
    elif isinstance(optimizer, optim.FTRL):
        names = {"accumulator": dim, "linear": dim}
    else:
        is_rowwise = isinstance(optimizer, optim.PartialRowwiseAdam)
        names = {"exp_avg": dim, "exp_avg_sq": 1 if is_rowwise else dim}
    if _counts_rows(optimizer):
        names["step"] = 1
    if getattr(optimizer, "catch_up", False):
        names["log_decay"] = 2
    return tuple(names.items())


def _counts_rows(optimizer: Any) -> bool:
    is_by_row = getattr(optimizer, "bias_correction", "table") == "row"
    return is_by_row or bool(getattr(optimizer, "dampening", 0.0))


def fresh_state(optimizer: optim.Optimizer, dim: int) -> State:
    """State of a new row."""
    first = {"log_decay": 1.0}
    for name in ("sum", "accumulator"):
        first[name] = getattr(optimizer, "initial_accumulator_value", 0.0)
    return {
        name: np.full(width, first.get(name, 0.0), F32)
        for name, width in state_fields(optimizer, dim)
    }


def next_log_decay(optimizer: Any, log_decay: float) -> float:
    """The table's sum of logarithms after an update."""
    if not getattr(optimizer, "catch_up", False):
        return log_decay
    return log_decay + _log_one_minus(float(F32(optimizer.lr)) * float(F32(optimizer.weight_decay)))


def update_row(step: Step, weights: Floats, state: State, grad: Floats) -> None:
    """One update of one row with its summed gradient, in place."""
    optimizer = step.optimizer
    grad = _clipped(optimizer, grad)
    if getattr(optimizer, "catch_up", False):
        _catch_up(step, weights, state)
    if not isinstance(optimizer, optim.FTRL | optim.LAMB):
        decay = F32(optimizer.weight_decay)
        if optimizer.weight_decay_mode == "decoupled":
            weights *= F32(1.0 - float(step.lr) * float(decay))
        elif decay != 0:
            grad = grad + decay * weights
    _UPDATES[type(optimizer)](step, weights, state, grad)


def _clipped(optimizer: Any, grad: Floats) -> Floats:
    if optimizer.clip_value is not None:
        limit = F32(optimizer.clip_value)
        grad = np.where(grad > limit, limit, np.where(grad < -limit, -limit, grad))
    if optimizer.clip_norm is None:
        return grad
    limit, squares = F32(optimizer.clip_norm), lane_sum(grad * grad)
    if not np.isfinite(squares):  # too large for a float, or not a number
        grad = grad * F32(2.0**-80)
        shrunk: Floats = grad * (limit / np.sqrt(lane_sum(grad * grad)))
        return shrunk
    norm = np.sqrt(squares)
    return grad * (limit / norm) if norm > limit else grad


def _halves(value: float) -> Floats:
    """A double as the sum of two floats."""
    high = F32(value)
    return np.array([high, F32(value - float(high))], F32)


def _catch_up(step: Step, weights: Floats, state: State) -> None:
    mark, before = state["log_decay"], _halves(step.log_decay)
    if mark[0] <= 0 and (mark != before).any():
        missed = (float(before[0]) + float(before[1])) - (float(mark[0]) + float(mark[1]))
        weights *= F32(exp_of_negative(missed) if missed < 0 else 1.0)
    mark[:] = _halves(next_log_decay(step.optimizer, step.log_decay))


def _sgd(step: Step, weights: Floats, state: State, grad: Floats) -> None:
    optimizer = step.optimizer
    if optimizer.momentum:
        momentum, share = F32(optimizer.momentum), F32(1.0 - optimizer.dampening)
        if optimizer.dampening:
            share = F32(1) if state["step"][0] == 0 else share
            state["step"] += F32(1)
        state["momentum_buffer"][:] = state["momentum_buffer"] * momentum + share * grad
        buffer = state["momentum_buffer"]
        grad = grad + momentum * buffer if optimizer.nesterov else buffer
    weights -= step.lr * grad


def _adagrad(step: Step, weights: Floats, state: State, grad: Floats) -> None:
    optimizer = step.optimizer
    rate = F32(float(step.lr) / (1.0 + (step.t - 1) * float(F32(optimizer.lr_decay))))
    state["sum"] += grad * grad
    weights -= rate * grad / (np.sqrt(state["sum"]) + F32(optimizer.eps))


def _rowwise_adagrad(step: Step, weights: Floats, state: State, grad: Floats) -> None:
    state["sum"] += lane_sum(grad * grad) / F32(len(grad))
    weights -= (step.lr / (np.sqrt(state["sum"]) + F32(step.optimizer.eps))) * grad


def _biases(step: Step, state: State) -> tuple[float, float]:
    """1 - b1^t and 1 - b2^t."""
    t = step.t
    if step.optimizer.bias_correction == "row":
        state["step"] += F32(1)
        t = int(state["step"][0])
    beta1, beta2 = step.optimizer.betas
    return 1.0 - power(beta1, t), 1.0 - power(beta2, t)


def _moved_square(step: Step, state: State, square: Any) -> Floats:
    beta2 = step.optimizer.betas[1]
    state["exp_avg_sq"][:] = state["exp_avg_sq"] * F32(beta2) + square
    return state["exp_avg_sq"]


def _moved_mean(step: Step, state: State, grad: Floats) -> Floats:
    mean = state["exp_avg"]
    mean[:] = _lerp(mean, grad, F32(1.0 - step.optimizer.betas[0]))
    return mean


def _adam(step: Step, weights: Floats, state: State, grad: Floats) -> None:
    bias1, bias2 = _biases(step, state)
    rate, inverse_root = F32(float(step.lr) / bias1), F32(1.0 / math.sqrt(bias2))
    mean = _moved_mean(step, state, grad)
    square = _moved_square(step, state, F32(1.0 - step.optimizer.betas[1]) * grad * grad)
    weights -= rate * mean / (np.sqrt(square) * inverse_root + F32(step.optimizer.eps))


def _partial_rowwise_adam(step: Step, weights: Floats, state: State, grad: Floats) -> None:
    bias1, bias2 = _biases(step, state)
    rate, inverse_root = F32(float(step.lr) / bias1), F32(1.0 / math.sqrt(bias2))
    mean_square = lane_sum(grad * grad) / F32(len(grad))
    square = _moved_square(step, state, F32(1.0 - step.optimizer.betas[1]) * mean_square)
    rate = rate / (np.sqrt(square) * inverse_root + F32(step.optimizer.eps))
    weights -= rate * _moved_mean(step, state, grad)


def _lamb(step: Step, weights: Floats, state: State, grad: Floats) -> None:
    bias1, bias2 = _biases(step, state)
    inverse, inverse_root = F32(1.0 / bias1), F32(1.0 / math.sqrt(bias2))
    mean = _moved_mean(step, state, grad)
    square = _moved_square(step, state, F32(1.0 - step.optimizer.betas[1]) * grad * grad)
    direction = inverse * mean / (np.sqrt(square) * inverse_root + F32(step.optimizer.eps))
    direction = direction + F32(step.optimizer.weight_decay) * weights
    lengths = lane_sum(weights * weights), lane_sum(direction * direction)
    trust = F32(1) if 0 in lengths else np.sqrt(lengths[0]) / np.sqrt(lengths[1])
    weights -= (step.lr * trust) * direction


def _ftrl(step: Step, weights: Floats, state: State, grad: Floats) -> None:
    optimizer, before = step.optimizer, state["accumulator"].copy()
    if step.lr == 0:
        return
    l1, twice_l2 = (
        F32(optimizer.l1_regularization_strength),
        F32(2) * F32(optimizer.l2_regularization_strength),
    )
    state["accumulator"] += grad * grad
    root = np.sqrt(state["accumulator"])
    sigma = (root - np.sqrt(before)) / step.lr
    z = state["linear"]
    z[:] = z + grad - sigma * weights
    strength = (F32(optimizer.beta) + root) / step.lr + twice_l2
    quotient = np.where(z > l1, l1 - z, -l1 - z) / strength
    weights[:] = np.where((z <= l1) & (z >= -l1), F32(0), quotient)


def _rmsprop(step: Step, weights: Floats, state: State, grad: Floats) -> None:
    optimizer = step.optimizer
    rest = F32(1.0 - optimizer.alpha)
    square = state["square_avg"]
    square[:] = square * F32(optimizer.alpha) + rest * grad * grad
    variance = square
    if optimizer.centered:
        mean = state["grad_avg"]
        mean[:] = _lerp(mean, grad, rest)
        variance = square - mean * mean
        variance = np.where(variance < 0, F32(0), variance)
    direction = grad / (np.sqrt(variance) + F32(optimizer.eps))
    if optimizer.momentum:
        direction = direction + state["momentum_buffer"] * F32(optimizer.momentum)
        state["momentum_buffer"][:] = direction
    weights -= step.lr * direction


_UPDATES: Mapping[type, Callable[[Step, Floats, State, Floats], None]] = {
    optim.SGD: _sgd,
    optim.Adagrad: _adagrad,
    optim.RowwiseAdagrad: _rowwise_adagrad,
    optim.Adam: _adam,
    optim.AdamW: _adam,
    optim.PartialRowwiseAdam: _partial_rowwise_adam,
    optim.LAMB: _lamb,
    optim.FTRL: _ftrl,
    optim.RMSprop: _rmsprop,
}


def _lerp(start: Floats, end: Floats, weight: Any) -> Floats:
    """As torch.lerp, exact at both ends."""
    difference: Floats = end - start
    if weight < 0.5:
        difference *= weight
        return start + difference
    difference *= F32(1) - weight
    return end - difference


def log_of_ratio(z: float) -> float:
    """log((1 + z) / (1 - z))."""
    total = 0.0
    for n in range(23, 0, -2):
        total = total * (z * z) + 1.0 / n
    return 2.0 * z * total


def _log_one_minus(x: float) -> float:
    """log(1 - x)."""
    if x < 0.25:
        return log_of_ratio(-x / (2.0 - x))
    rest, doublings = 1.0 - x, 0.0
    while rest < 0.75:
        rest *= 2.0
        doublings += 1.0
    return log_of_ratio((rest - 1.0) / (rest + 1.0)) - doublings * 0.6931471805599453


def exp_of_negative(x: float) -> float:
    """exp(x), 0 where a float could not hold it."""
    if not x > -104.0:
        return 0.0
    total = 1.0
    for n in range(14, 0, -1):
        total = 1.0 + total * (x / 256.0) / n
    for _ in range(8):
        total *= total
    return total
