"""What each optimizer does to a row, in float64, written from the formulas of their sources.

Shape letters: D row width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recsdk_core import optim

Numbers: TypeAlias = NDArray[np.float64]


class ExactRow:
    """A row and its optimizer state; updates touch it one by one."""

    def __init__(self, weights: Any, accumulator: float) -> None:
        self.weights: Numbers = np.asarray(weights, np.float64).copy()
        self.state: dict[str, Numbers] = {}
        self.count = 0
        self._accumulator = accumulator
        self._last = 0

    def mean(self, name: str, rate: float, value: Any) -> Any:
        """Moves a running mean on, which starts at 0."""
        self.state[name] = rate * self.state.get(name, 0.0) + (1 - rate) * value
        return self.state[name]

    def total(self, name: str, value: Any) -> Any:
        """Adds to a sum, which starts at the initial accumulator value."""
        self.state[name] = self.state.get(name, self._accumulator) + value
        return self.state[name]

    def update(self, optimizer: Any, t: int, rates: list[float], grad: Any) -> None:
        """Update number t with a summed gradient (D,); `rates` has the rates of updates 1 to t."""
        lr, g = rates[-1], clipped(optimizer, np.asarray(grad, np.float64))
        decay = getattr(optimizer, "weight_decay", 0.0)
        if getattr(optimizer, "catch_up", False) and self.count:
            for missed in rates[self._last : t - 1]:
                self.weights *= 1 - missed * decay
        if getattr(optimizer, "weight_decay_mode", None) == "l2":
            g = g + decay * self.weights
        elif not isinstance(optimizer, optim.LAMB):
            self.weights *= 1 - lr * decay
        self.count += 1
        self._last = t
        if isinstance(optimizer, optim.FTRL):
            self.weights = ftrl(self, optimizer, lr, g)
        else:
            age = self.count if getattr(optimizer, "bias_correction", "") == "row" else t
            self.weights -= CHANGES[type(optimizer)](self, optimizer, lr, g, age)


def clipped(optimizer: Any, g: Numbers) -> Numbers:
    if optimizer.clip_value is not None:
        g = np.clip(g, -optimizer.clip_value, optimizer.clip_value)
    norm = float(np.linalg.norm(g))
    if optimizer.clip_norm is not None and norm > optimizer.clip_norm:
        g = g * (optimizer.clip_norm / norm)
    return g


def sgd(row: ExactRow, o: Any, lr: float, g: Numbers, t: int) -> Numbers:
    if not o.momentum:
        return lr * g
    kept = g if row.count == 1 else (1 - o.dampening) * g
    b = o.momentum * row.state.get("momentum_buffer", 0.0) + kept
    row.state["momentum_buffer"] = b
    if o.dampening:
        row.state["step"] = np.array([float(row.count)])
    return lr * (g + o.momentum * b if o.nesterov else b)


def adagrad(row: ExactRow, o: Any, lr: float, g: Numbers, t: int) -> Numbers:
    return lr / (1 + (t - 1) * o.lr_decay) * g / (np.sqrt(row.total("sum", g * g)) + o.eps)


def rowwise_adagrad(row: ExactRow, o: Any, lr: float, g: Numbers, t: int) -> Numbers:
    return lr * g / (np.sqrt(row.total("sum", np.mean(g * g, keepdims=True))) + o.eps)


def adam(row: ExactRow, o: Any, lr: float, g: Numbers, t: int) -> Numbers:
    square = np.mean(g * g, keepdims=True) if isinstance(o, optim.PartialRowwiseAdam) else g * g
    m = row.mean("exp_avg", o.betas[0], g) / (1 - o.betas[0] ** t)
    v = row.mean("exp_avg_sq", o.betas[1], square) / (1 - o.betas[1] ** t)
    if o.bias_correction == "row":
        row.state["step"] = np.array([float(row.count)])
    return lr * m / (np.sqrt(v) + o.eps)


def lamb(row: ExactRow, o: Any, lr: float, g: Numbers, t: int) -> Numbers:
    r = adam(row, o, 1.0, g, t) + o.weight_decay * row.weights
    norms = np.linalg.norm(row.weights), np.linalg.norm(r)
    return lr * (1.0 if 0 in norms else norms[0] / norms[1]) * r


def ftrl(row: ExactRow, o: Any, lr: float, g: Numbers) -> Numbers:
    if lr == 0:
        return row.weights
    before = row.state.get("accumulator", np.full_like(g, o.initial_accumulator_value))
    n = row.total("accumulator", g * g)
    z = row.state.get("linear", 0.0) + g - (np.sqrt(n) - np.sqrt(before)) / lr * row.weights
    row.state["linear"] = z
    l1, l2 = o.l1_regularization_strength, o.l2_regularization_strength
    weights = (np.sign(z) * l1 - z) / ((o.beta + np.sqrt(n)) / lr + 2 * l2)
    return np.where(np.abs(z) <= l1, 0.0, weights)


def rmsprop(row: ExactRow, o: Any, lr: float, g: Numbers, t: int) -> Numbers:
    variance = row.mean("square_avg", o.alpha, g * g)
    if o.centered:
        variance = variance - row.mean("grad_avg", o.alpha, g) ** 2
    u = g / (np.sqrt(variance) + o.eps)
    if not o.momentum:
        return lr * u
    row.state["momentum_buffer"] = o.momentum * row.state.get("momentum_buffer", 0.0) + u
    return lr * row.state["momentum_buffer"]


CHANGES: dict[type, Callable[..., Numbers]] = {
    optim.SGD: sgd,
    optim.Adagrad: adagrad,
    optim.RowwiseAdagrad: rowwise_adagrad,
    optim.Adam: adam,
    optim.AdamW: adam,
    optim.PartialRowwiseAdam: adam,
    optim.LAMB: lamb,
    optim.RMSprop: rmsprop,
}
