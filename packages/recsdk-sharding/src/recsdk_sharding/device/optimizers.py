"""The engine's optimizers on the rows of a device, as torch's operators.

Each is one function of `_UPDATES`. Around it is what they share: clipping, weight decay, and rows
whose gradient is not finite. Formulas: docs/concepts/optimizers.md. Touched rows are read, computed
and written back as whole matrices, and nothing waits for the device.

Shape letters: R rows of the store, U distinct rows, D row width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from recsdk_core import optim
from recsdk_sharding.device.writes import Write

__all__ = ["State", "Step", "check_optimizer", "initial_state", "update_rows"]

State: TypeAlias = Mapping[str, torch.Tensor]
"""Fields of optimizer state by name, float32 (R, width)."""

_TINY = 2.0**-80  # brings the square of any float into the range of floats


@dataclass(frozen=True)
class Step:
    """One update of a table."""

    optimizer: Any
    """One of `recsdk_core.optim`, with the learning rate of this update."""
    count: int
    """The table's update count, this update included."""
    log_decay: float = 0.0
    """The table's sum of log(1 - lr * weight_decay) before this update; see `Table.log_decay`."""

    def next_log_decay(self) -> float:
        """The sum after this update; 0 for ever without `catch_up`."""
        if not getattr(self.optimizer, "catch_up", False):
            return self.log_decay
        rate, decay = np.float32(self.optimizer.lr), np.float32(self.optimizer.weight_decay)
        return self.log_decay + math.log1p(-float(rate) * float(decay))


@dataclass
class _Rows:
    """The touched rows' part of the store, a copy."""

    weight_UD: torch.Tensor
    grad_UD: torch.Tensor
    state: dict[str, torch.Tensor]
    count: int
    """The table's update count, this update included."""


def update_rows(
    step: Step,
    store_RD: torch.Tensor,
    state: State,
    rows_U: torch.Tensor,
    grad_UD: torch.Tensor,
    places_U: torch.Tensor | None = None,
) -> list[Write]:
    """One optimizer update of the rows `rows_U`: what is to be written.

    The rows are distinct, but for one that may come again and again: it gets any values.
    `places_U`: their rows of the state; None: the same numbers. Everything is computed here,
    nothing is written: the writes that are returned only copy, which needs no memory.
    """
    places_U = rows_U if places_U is None else places_U
    rows = _Rows(
        weight_UD=store_RD.index_select(0, rows_U),
        grad_UD=_clipped(step.optimizer, grad_UD),
        state={name: field.index_select(0, places_U) for name, field in state.items()},
        count=step.count,
    )
    _decay(step, rows)
    _UPDATES[type(step.optimizer)](step.optimizer, rows)
    return [
        partial(store_RD.index_copy_, 0, rows_U, rows.weight_UD),
        *(partial(state[name].index_copy_, 0, places_U, each) for name, each in rows.state.items()),
    ]


def _clipped(optimizer: Any, grad_UD: torch.Tensor) -> torch.Tensor:
    if optimizer.clip_value is not None:
        grad_UD = grad_UD.clamp(-optimizer.clip_value, optimizer.clip_value)
    if optimizer.clip_norm is None:
        return grad_UD
    # A norm too large for a float is taken of a row scaled down; what is no number stays none.
    is_huge_U1 = ~grad_UD.square().sum(1, keepdim=True).isfinite()
    grad_UD = torch.where(is_huge_U1, grad_UD * _TINY, grad_UD)
    norm_U1 = grad_UD.square().sum(1, keepdim=True).sqrt_()
    is_longer_U1 = is_huge_U1 | (norm_U1 > optimizer.clip_norm)
    return torch.where(is_longer_U1, grad_UD * (optimizer.clip_norm / norm_U1), grad_UD)


def _decay(step: Step, rows: _Rows) -> None:
    optimizer = step.optimizer
    if getattr(optimizer, "catch_up", False):
        _catch_up(step, rows)
    mode = getattr(optimizer, "weight_decay_mode", None)  # LAMB and FTRL have ways of their own
    if mode is None or not optimizer.weight_decay:
        return
    if mode == "decoupled":
        rows.weight_UD.mul_(1 - optimizer.lr * optimizer.weight_decay)
    else:
        rows.grad_UD = rows.grad_UD.add(rows.weight_UD, alpha=optimizer.weight_decay)


def _catch_up(step: Step, rows: _Rows) -> None:
    """Applies the decay of the updates that left a row out.

    Its mark is the table's sum of logarithms at its last update, in two floats. Before its first
    update the mark is 1, which no such sum can be.
    """
    mark_U2 = rows.state["log_decay"]
    high_U1, low_U1 = mark_U2.narrow(1, 0, 1), mark_U2.narrow(1, 1, 1)
    high, low = _halves(step.log_decay)
    missed_U1 = ((high - high_U1) + (low - low_U1)).clamp_(max=0)
    missed_U1 = torch.where(high_U1 > 0, 0.0, missed_U1)
    rows.weight_UD.mul_(missed_U1.exp_())
    for mark_U1, value in zip((high_U1, low_U1), _halves(step.next_log_decay()), strict=True):
        mark_U1.fill_(value)


def _halves(value: float) -> tuple[float, float]:
    """A double as the sum of two floats."""
    high = float(np.float32(value))
    return high, float(np.float32(value - high))


# ---- one function for each optimizer -----------------------------------------------------------


def _sgd(optimizer: optim.SGD, rows: _Rows) -> None:
    change_UD = rows.grad_UD
    if optimizer.momentum:
        kept_UD = rows.grad_UD
        if optimizer.dampening:  # the first gradient of a row is taken whole
            step_U1 = rows.state["step"]
            kept_UD = torch.where(step_U1 == 0, kept_UD, kept_UD * (1 - optimizer.dampening))
            step_U1.add_(1)
        sum_UD = rows.state["momentum_buffer"].mul_(optimizer.momentum).add_(kept_UD)
        is_ahead = optimizer.nesterov
        change_UD = rows.grad_UD.add(sum_UD, alpha=optimizer.momentum) if is_ahead else sum_UD
    rows.weight_UD.sub_(change_UD, alpha=optimizer.lr)


def _adagrad(optimizer: optim.Adagrad, rows: _Rows) -> None:
    rate = optimizer.lr / (1 + (rows.count - 1) * optimizer.lr_decay)
    total_UD = rows.state["sum"].addcmul_(rows.grad_UD, rows.grad_UD)
    rows.weight_UD.addcdiv_(rows.grad_UD, total_UD.sqrt().add_(optimizer.eps), value=-rate)


def _rowwise_adagrad(optimizer: optim.RowwiseAdagrad, rows: _Rows) -> None:
    total_U1 = rows.state["sum"].add_(rows.grad_UD.square().mean(1, keepdim=True))
    rows.weight_UD.addcdiv_(rows.grad_UD, total_U1.sqrt().add_(optimizer.eps), value=-optimizer.lr)


_Adams: TypeAlias = optim.Adam | optim.PartialRowwiseAdam | optim.LAMB


def _adam(optimizer: optim.Adam, rows: _Rows) -> None:
    bias1, bias2 = _biases(optimizer, rows)
    mean_UD = _moved_mean(optimizer, rows)
    denominator_UD = _denominator(optimizer, _moved_square(optimizer, rows), bias2)
    rows.weight_UD.addcdiv_(mean_UD / bias1, denominator_UD, value=-optimizer.lr)


def _partial_rowwise_adam(optimizer: optim.PartialRowwiseAdam, rows: _Rows) -> None:
    bias1, bias2 = _biases(optimizer, rows)
    mean_square_U1 = rows.grad_UD.square().mean(1, keepdim=True)
    beta2 = optimizer.betas[1]
    square_U1 = rows.state["exp_avg_sq"].mul_(beta2).add_(mean_square_U1, alpha=1 - beta2)
    denominator_U1 = _denominator(optimizer, square_U1, bias2) * bias1
    rows.weight_UD.addcdiv_(_moved_mean(optimizer, rows), denominator_U1, value=-optimizer.lr)


def _lamb(optimizer: optim.LAMB, rows: _Rows) -> None:
    bias1, bias2 = _biases(optimizer, rows)
    mean_UD = _moved_mean(optimizer, rows)
    denominator_UD = _denominator(optimizer, _moved_square(optimizer, rows), bias2)
    direction_UD = (mean_UD / bias1).div_(denominator_UD)
    direction_UD.add_(rows.weight_UD, alpha=optimizer.weight_decay)
    lengths = [v.square().sum(1, keepdim=True).sqrt_() for v in (rows.weight_UD, direction_UD)]
    has_none_U1 = (lengths[0] == 0) | (lengths[1] == 0)
    trust_U1 = torch.where(has_none_U1, 1.0, lengths[0] / lengths[1])
    rows.weight_UD.sub_(direction_UD.mul_(trust_U1), alpha=optimizer.lr)


def _biases(optimizer: _Adams, rows: _Rows) -> tuple[Any, Any]:
    """1 - b1^t and 1 - b2^t: numbers, or (U, 1) with t counted for each row."""
    beta1, beta2 = optimizer.betas
    if optimizer.bias_correction == "table":
        return 1 - beta1**rows.count, 1 - beta2**rows.count
    step_U1 = rows.state["step"].add_(1)
    return _one_less_power(beta1, step_U1), _one_less_power(beta2, step_U1)


def _one_less_power(base: float, exponent: torch.Tensor) -> torch.Tensor:
    """1 - base^exponent, exact to float32 also where the power is close to 1."""
    if base == 0.0:
        return torch.ones_like(exponent)
    return exponent.mul(math.log(base)).expm1_().neg_()


def _moved_mean(optimizer: _Adams, rows: _Rows) -> torch.Tensor:
    return rows.state["exp_avg"].lerp_(rows.grad_UD, 1 - optimizer.betas[0])


def _moved_square(optimizer: _Adams, rows: _Rows) -> torch.Tensor:
    beta2, grad_UD = optimizer.betas[1], rows.grad_UD
    return rows.state["exp_avg_sq"].mul_(beta2).addcmul_(grad_UD, grad_UD, value=1 - beta2)


def _denominator(optimizer: _Adams, square: torch.Tensor, bias2: Any) -> torch.Tensor:
    return square.sqrt().div_(bias2**0.5).add_(optimizer.eps)


def _ftrl(optimizer: optim.FTRL, rows: _Rows) -> None:
    if np.float32(optimizer.lr) == 0:  # what is divided by it has no value
        return
    grad_UD, linear_UD = rows.grad_UD, rows.state["linear"]
    root_before_UD = rows.state["accumulator"].sqrt()
    root_UD = rows.state["accumulator"].addcmul_(grad_UD, grad_UD).sqrt()
    sigma_UD = (root_UD - root_before_UD).div_(optimizer.lr)
    linear_UD.add_(grad_UD).addcmul_(sigma_UD, rows.weight_UD, value=-1)
    l1, l2 = optimizer.l1_regularization_strength, optimizer.l2_regularization_strength
    strength_UD = root_UD.add_(optimizer.beta).div_(optimizer.lr).add_(2 * l2)
    shrunk_UD = torch.where(linear_UD > l1, l1 - linear_UD, -l1 - linear_UD)
    # Written so that a sum that is not a number reaches the weight.
    is_small_UD = (linear_UD <= l1) & (linear_UD >= -l1)
    rows.weight_UD = torch.where(is_small_UD, 0.0, shrunk_UD / strength_UD)


def _rmsprop(optimizer: optim.RMSprop, rows: _Rows) -> None:
    grad_UD, rest = rows.grad_UD, 1 - optimizer.alpha
    variance_UD = rows.state["square_avg"].mul_(optimizer.alpha)
    variance_UD.addcmul_(grad_UD, grad_UD, value=rest)
    if optimizer.centered:
        mean_UD = rows.state["grad_avg"].lerp_(grad_UD, rest)
        variance_UD = variance_UD.addcmul(mean_UD, mean_UD, value=-1)
        variance_UD = torch.where(variance_UD < 0, 0.0, variance_UD)  # by rounding
    direction_UD = grad_UD / variance_UD.sqrt().add_(optimizer.eps)
    if optimizer.momentum:
        buffer_UD = rows.state["momentum_buffer"].mul_(optimizer.momentum)
        direction_UD = buffer_UD.add_(direction_UD)
    rows.weight_UD.sub_(direction_UD, alpha=optimizer.lr)


_UPDATES: Mapping[type, Callable[[Any, _Rows], None]] = {
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


def check_optimizer(optimizer: optim.Optimizer, table: str) -> optim.Optimizer:
    """The optimizer; raises ValueError, naming the table, if it cannot run on a device."""
    if type(optimizer) not in _UPDATES:
        known = ", ".join(sorted(cls.__name__ for cls in _UPDATES))
        raise ValueError(
            f"table {table!r}: optimizer {type(optimizer).__name__} is not supported for rows in "
            f"device memory; supported are {known}; or keep the table on the cpu"
        )
    return optimizer


def initial_state(optimizer: optim.Optimizer, field: str) -> float:
    """What a field of a new row's optimizer state begins with."""
    if field in ("sum", "accumulator"):
        return float(getattr(optimizer, "initial_accumulator_value", 0.0))
    return 1.0 if field == "log_decay" else 0.0
