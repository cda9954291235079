"""Which optimizers' updates are kernels, and the numbers that go to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from recsdk_core import optim
from recsdk_sharding.device.optimizers import Step

__all__ = ["Formula", "formula_of"]


@dataclass(frozen=True, kw_only=True)
class Formula:
    """One update, as the kernel knows it."""

    kind: str
    fields: tuple[str, ...]
    """Its optimizer state, by name."""
    rate: float
    eps: float = 0.0
    decay: float | None = None
    """What weights are multiplied with before; None: nothing."""
    l2: float | None = None
    """How much of the weights is added to gradients; None: nothing."""
    clip: float | None = None
    rest1: float = 0.0
    beta2: float = 0.0
    root_bias2: float = 1.0

    def state_of(self, state: Mapping[str, torch.Tensor]) -> list[torch.Tensor | None]:
        """The two fields of state that the kernel may have."""
        found: list[torch.Tensor | None] = [state[name] for name in self.fields]
        return [*found, None, None][:2]


def formula_of(step: Step) -> Formula | None:
    """The update of a step; None: torch's operators have to make it.

    That is so with `clip_norm`, `catch_up`, momentum, counts of each row's updates, and optimizers
    other than SGD, Adagrad, RowwiseAdagrad, Adam and AdamW.
    """
    optimizer = step.optimizer
    if optimizer.clip_norm is not None or getattr(optimizer, "catch_up", False):
        return None
    if type(optimizer) is optim.SGD and not optimizer.momentum:
        return Formula(kind="sgd", fields=(), rate=float(optimizer.lr), **_shared(optimizer))
    if type(optimizer) is optim.RowwiseAdagrad:
        return _adagrad(optimizer, "rowwise_adagrad", optimizer.lr)
    if type(optimizer) is optim.Adagrad:
        rate = optimizer.lr / (1 + (step.count - 1) * optimizer.lr_decay)
        return _adagrad(optimizer, "adagrad", rate)
    if type(optimizer) in (optim.Adam, optim.AdamW) and optimizer.bias_correction == "table":
        return _adam(optimizer, step.count)
    return None


def _adagrad(optimizer: optim.Adagrad | optim.RowwiseAdagrad, kind: str, rate: float) -> Formula:
    shared = _shared(optimizer)
    return Formula(kind=kind, fields=("sum",), rate=float(rate), eps=float(optimizer.eps), **shared)


def _adam(optimizer: optim.Adam, count: int) -> Formula:
    beta1, beta2 = optimizer.betas
    return Formula(
        kind="adam",
        fields=("exp_avg", "exp_avg_sq"),
        rate=float(optimizer.lr) / (1.0 - beta1**count),
        eps=float(optimizer.eps),
        rest1=1.0 - beta1,
        beta2=float(beta2),
        root_bias2=(1.0 - beta2**count) ** 0.5,
        **_shared(optimizer),
    )


def _shared(
    optimizer: optim.SGD | optim.Adagrad | optim.RowwiseAdagrad | optim.Adam,
) -> dict[str, float]:
    """Clipping and weight decay."""
    numbers: dict[str, float] = {}
    if optimizer.clip_value is not None:
        numbers["clip"] = float(optimizer.clip_value)
    if optimizer.weight_decay and optimizer.weight_decay_mode == "decoupled":
        numbers["decay"] = 1.0 - optimizer.lr * optimizer.weight_decay
    elif optimizer.weight_decay:
        numbers["l2"] = float(optimizer.weight_decay)
    return numbers
