"""The engine's optimizers on the rows of a device, as torch's operators.

Shape letters: R rows of the store, U distinct rows, D row width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch

from recsdk_core import optim

__all__ = ["check_optimizer", "initial_state", "update_rows"]

SupportedOptimizer: TypeAlias = optim.SGD | optim.Adagrad | optim.RowwiseAdagrad | optim.Adam
"""And their subclass AdamW."""

State: TypeAlias = Mapping[str, torch.Tensor]
"""Fields of optimizer state by name, float32 (R, width)."""


@dataclass
class _Rows:
    """The touched rows' part of the store, read once and written once."""

    weight_UD: torch.Tensor
    grad_UD: torch.Tensor
    state: dict[str, torch.Tensor]
    count: int
    """The table's update count, this update included."""


def update_rows(
    optimizer: SupportedOptimizer,
    count: int,
    store_RD: torch.Tensor,
    state: State,
    rows_U: torch.Tensor,
    grad_UD: torch.Tensor,
) -> None:
    """One optimizer update of the rows `rows_U`, which are distinct, in place.

    `count` is the table's update count, this update included.
    """
    rows = _Rows(
        weight_UD=store_RD.index_select(0, rows_U),
        grad_UD=grad_UD,
        state={name: field.index_select(0, rows_U) for name, field in state.items()},
        count=count,
    )
    if optimizer.weight_decay:
        _decay(optimizer, rows)
    _UPDATES[type(optimizer)](optimizer, rows)
    store_RD.index_copy_(0, rows_U, rows.weight_UD)
    for name, field in rows.state.items():
        state[name].index_copy_(0, rows_U, field)


def _decay(optimizer: SupportedOptimizer, rows: _Rows) -> None:
    if optimizer.weight_decay_mode == "decoupled":
        rows.weight_UD.mul_(1 - optimizer.lr * optimizer.weight_decay)
    else:
        rows.grad_UD = rows.grad_UD.add(rows.weight_UD, alpha=optimizer.weight_decay)


def _sgd(optimizer: optim.SGD, rows: _Rows) -> None:
    change_UD = rows.grad_UD
    if optimizer.momentum:
        sum_UD = rows.state["momentum_buffer"].mul_(optimizer.momentum).add_(rows.grad_UD)
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


def _adam(optimizer: optim.Adam, rows: _Rows) -> None:
    beta1, beta2 = optimizer.betas
    mean_UD = rows.state["exp_avg"].lerp_(rows.grad_UD, 1 - beta1)
    square_UD = rows.state["exp_avg_sq"].mul_(beta2)
    square_UD.addcmul_(rows.grad_UD, rows.grad_UD, value=1 - beta2)
    if optimizer.bias_correction == "table":
        rate = optimizer.lr / (1 - beta1**rows.count)
        root = 1 / math.sqrt(1 - beta2**rows.count)
        denominator_UD = square_UD.sqrt().mul_(root).add_(optimizer.eps)
        rows.weight_UD.addcdiv_(mean_UD, denominator_UD, value=-rate)
        return
    step_U1 = rows.state["step"].add_(1)
    root_U1 = _one_less_power(beta2, step_U1).rsqrt_()
    denominator_UD = square_UD.sqrt().mul_(root_U1).add_(optimizer.eps)
    denominator_UD.mul_(_one_less_power(beta1, step_U1))
    rows.weight_UD.addcdiv_(mean_UD, denominator_UD, value=-optimizer.lr)


def _one_less_power(base: float, exponent: torch.Tensor) -> torch.Tensor:
    """1 - base^exponent, exact to float32 also where the power is close to 1."""
    if base == 0.0:
        return torch.ones_like(exponent)
    return exponent.mul(math.log(base)).expm1_().neg_()


_UPDATES: Mapping[type, Callable[[Any, _Rows], None]] = {
    optim.SGD: _sgd,
    optim.Adagrad: _adagrad,
    optim.RowwiseAdagrad: _rowwise_adagrad,
    optim.Adam: _adam,
    optim.AdamW: _adam,
}
_UNSUPPORTED = ("dampening", "catch_up", "clip_value", "clip_norm")


def check_optimizer(optimizer: optim.Optimizer, table: str) -> SupportedOptimizer:
    """The optimizer; raises ValueError, naming the table, if it cannot run on a device."""
    if type(optimizer) not in _UPDATES:
        known = ", ".join(sorted(cls.__name__ for cls in _UPDATES))
        raise ValueError(
            f"table {table!r}: optimizer {type(optimizer).__name__} is not supported for rows in "
            f"device memory; supported are {known}; or keep the table on the cpu"
        )
    given = [name for name in _UNSUPPORTED if getattr(optimizer, name, None)]
    if given:
        raise ValueError(
            f"table {table!r}: {type(optimizer).__name__} with {', '.join(given)} is not supported "
            "for rows in device memory; leave it out, or keep the table on the cpu"
        )
    return cast(SupportedOptimizer, optimizer)


def initial_state(optimizer: SupportedOptimizer) -> float:
    """What every field of a new row's optimizer state begins with."""
    return float(getattr(optimizer, "initial_accumulator_value", 0.0))
