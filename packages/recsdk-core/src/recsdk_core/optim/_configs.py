"""One dataclass per optimizer.

In the formulas g is the summed gradient of a row, after clipping and L2 weight decay if these are
set, w its weights, t the table's update count, all element by element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from recsdk_core._internal.checks import (
    keep_plain_numbers,
    require_above_0,
    require_at_least,
    require_bool,
    require_float32,
    require_one_of,
    require_open_unit,
)

__all__ = [
    "FTRL",
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Optimizer",
    "PartialRowwiseAdam",
    "RMSprop",
    "RowwiseAdagrad",
]


@dataclass(frozen=True, kw_only=True)
class _Clipping:
    """What every optimizer does first to a summed gradient."""

    clip_value: float | None = None
    """Limits each element to +-clip_value; None: no limit."""
    clip_norm: float | None = None
    """Then scales the gradient of a row down to this Euclidean norm; None: no limit."""

    def __post_init__(self) -> None:
        keep_plain_numbers(self)
        for name in ("clip_value", "clip_norm"):
            if getattr(self, name) is not None:
                require_above_0(type(self).__name__, **{name: getattr(self, name)})

    def _require_at_least_0(self, *names: str) -> None:
        label, values = type(self).__name__, {name: getattr(self, name) for name in names}
        require_float32(label, **values)
        require_at_least(label, 0.0, **values)

    def _require_open_unit(self, **values: float) -> None:
        require_open_unit(type(self).__name__, **values)


@dataclass(frozen=True, kw_only=True)
class _Decaying(_Clipping):
    """Weight decay, which acts on a row only when it is touched."""

    weight_decay: float = 0.0
    """How fast weights decay; 0: not at all."""
    weight_decay_mode: Literal["l2", "decoupled"] = "l2"
    """"l2" adds weight_decay * w to the gradient; "decoupled" multiplies w by
    1 - lr * weight_decay before the update."""
    catch_up: bool = False
    """Whether a touched row first decays by 1 - lr * weight_decay for each update that left it out
    since its last one, with the learning rate of that update. Readers see rows as stored, without
    the decay that they have yet to catch up. Needs lr * weight_decay < 1, and the decoupled mode or
    SGD without momentum."""

    def __post_init__(self) -> None:
        super().__post_init__()
        label = type(self).__name__
        self._require_at_least_0("weight_decay")
        require_one_of(label, ("l2", "decoupled"), weight_decay_mode=self.weight_decay_mode)
        require_bool(label, catch_up=self.catch_up)
        if not self.catch_up:
            return
        if not self._decay_is_a_product():
            raise ValueError(
                f"{label}: catch_up needs weight_decay_mode='decoupled', or SGD without momentum: "
                "otherwise the updates that left a row out have no closed form"
            )
        product = float(np.float32(getattr(self, "lr", 0.0))) * float(np.float32(self.weight_decay))
        if product >= 1:
            raise ValueError(f"{label}: catch_up needs lr * weight_decay below 1, got {product}")

    def _decay_is_a_product(self) -> bool:
        return self.weight_decay_mode == "decoupled"


@dataclass(frozen=True, kw_only=True)
class SGD(_Decaying):
    """`w -= lr * g`, or with momentum `b = momentum * b + (1 - dampening) * g; w -= lr * b`.

    As torch.optim.SGD: the first gradient of a row is taken whole, and nesterov makes it
    `w -= lr * (g + momentum * b)`. State: none; with momentum `momentum_buffer` (D,), and with
    dampening `step` (1,). Raises ValueError for dampening or nesterov without what they need.
    """

    lr: float = 1e-3
    """Learning rate."""
    momentum: float = 0.0
    """Decay of the running sum of gradients; 0: no sum is kept."""
    dampening: float = 0.0
    """Share of later gradients that is left out of the sum, in [0, 1); needs momentum."""
    nesterov: bool = False
    """Nesterov's momentum, which looks ahead; needs momentum without dampening."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_at_least_0("lr", "momentum")
        self._require_open_unit(dampening=self.dampening)
        require_bool("SGD", nesterov=self.nesterov)
        if self.dampening and not self.momentum:
            raise ValueError(f"SGD: dampening needs momentum, got {self.dampening}; leave it 0")
        if self.nesterov and (not self.momentum or self.dampening):
            raise ValueError("SGD: nesterov needs momentum without dampening; leave it False")

    def _decay_is_a_product(self) -> bool:
        return self.weight_decay_mode == "decoupled" or not self.momentum


@dataclass(frozen=True, kw_only=True)
class Adagrad(_Decaying):
    """`s += g * g; w -= lr_t * g / (sqrt(s) + eps)`, as torch.optim.Adagrad.

    State: `sum` (D,). The rate is `lr_t = lr / (1 + (t - 1) * lr_decay)` with t the table's update
    count; decoupled weight decay uses lr.
    """

    lr: float = 1e-2
    """Learning rate."""
    lr_decay: float = 0.0
    """Decay of the learning rate with the table's update count."""
    initial_accumulator_value: float = 0.0
    """First value of `sum`."""
    eps: float = 1e-10
    """Added to the root."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_at_least_0("lr", "lr_decay", "initial_accumulator_value", "eps")


@dataclass(frozen=True, kw_only=True)
class RowwiseAdagrad(_Decaying):
    """`s += mean(g * g); w -= lr * g / (sqrt(s) + eps)`, s one number a row.

    As torchrec.optim.RowWiseAdagrad and fbgemm's EXACT_ROWWISE_ADAGRAD. State: `sum` (1,).
    """

    lr: float = 1e-2
    """Learning rate."""
    initial_accumulator_value: float = 0.0
    """First value of `sum`."""
    eps: float = 1e-10
    """Added to the root."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_at_least_0("lr", "initial_accumulator_value", "eps")


@dataclass(frozen=True, kw_only=True)
class _AdamAndKin(_Clipping):
    """What Adam, AdamW, partial rowwise Adam and LAMB share."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""
    eps: float = 1e-8
    """Added to the root."""
    bias_correction: Literal["table", "row"] = "table"
    """Whose update count corrects the bias: the table's, or one kept per row."""

    def __post_init__(self) -> None:
        super().__post_init__()
        label = type(self).__name__
        self._require_at_least_0("eps", "lr")
        if not isinstance(self.betas, Sequence) or len(self.betas) != 2:
            raise ValueError(f"{label}: betas must be two numbers, got {self.betas!r}")
        self._require_open_unit(**{f"betas[{i}]": beta for i, beta in enumerate(self.betas)})
        require_one_of(label, ("table", "row"), bias_correction=self.bias_correction)


@dataclass(frozen=True, kw_only=True)
class Adam(_AdamAndKin, _Decaying):
    """Adam with L2 weight decay, as torch.optim.Adam, on touched rows.

    State: `exp_avg` (D,), `exp_avg_sq` (D,), and `step` (1,) with `bias_correction="row"`. Raises
    ValueError unless betas are two numbers in [0, 1).
    """

    lr: float = 1e-3
    """Learning rate."""


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """Adam with decoupled weight decay, as torch.optim.AdamW, on touched rows.

    State and ValueError as of Adam.
    """

    weight_decay: float = 1e-2
    """How fast weights decay."""
    weight_decay_mode: Literal["l2", "decoupled"] = "decoupled"
    """"decoupled" multiplies w by 1 - lr * weight_decay before the update; "l2" makes it Adam."""


@dataclass(frozen=True, kw_only=True)
class PartialRowwiseAdam(_AdamAndKin, _Decaying):
    """Adam with one second moment a row: `v = b2 * v + (1 - b2) * mean(g * g)`.

    As fbgemm's PARTIAL_ROWWISE_ADAM and torchrec.optim.PartialRowWiseAdam, with fbgemm's defaults.
    State: `exp_avg` (D,), `exp_avg_sq` (1,), and `step` (1,) with `bias_correction="row"`. Raises
    ValueError unless betas are two numbers in [0, 1).
    """

    lr: float = 1e-2
    """Learning rate."""
    weight_decay_mode: Literal["l2", "decoupled"] = "decoupled"
    """"decoupled", fbgemm's, multiplies w by 1 - lr * weight_decay before the update; "l2" adds
    weight_decay * w to the gradient."""


@dataclass(frozen=True, kw_only=True)
class LAMB(_AdamAndKin):
    """Adam's direction r, scaled per row: `w -= lr * norm(w) / norm(r) * r`.

    `r = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay * w`; the ratio is 1 where a
    norm is 0. As fbgemm's LAMB and torchrec.optim.LAMB, with fbgemm's defaults. State and
    ValueError as of Adam.
    """

    lr: float = 1e-2
    """Learning rate."""
    weight_decay: float = 0.0
    """Share of the weights in the direction."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_at_least_0("weight_decay")


@dataclass(frozen=True, kw_only=True)
class FTRL(_Clipping):
    """Follow the regularized leader, proximal: weights that matter little become 0.

    `z += g - (sqrt(n + g * g) - sqrt(n)) / lr * w; n += g * g`; then w is 0 where |z| <= l1, else
    `(sign(z) * l1 - z) / ((beta + sqrt(n)) / lr + 2 * l2)`, with l1 and l2 the strengths. As
    TensorFlow's Ftrl with its names and defaults; its learning_rate_power is -0.5. State:
    `accumulator` (D,) n, `linear` (D,) z. Source: H. B. McMahan et al., "Ad Click Prediction: a
    View from the Trenches", KDD 2013, whose lambda2 is twice the l2 strength.
    """

    lr: float = 1e-3
    """Learning rate; at 0, as where a warmup begins, rows and their state stay as they are."""
    initial_accumulator_value: float = 0.1
    """First value of `accumulator`."""
    l1_regularization_strength: float = 0.0
    """Weights whose |z| does not exceed it are 0."""
    l2_regularization_strength: float = 0.0
    """L2 strength; twice of it is added to the divisor."""
    beta: float = 0.0
    """Added to the root."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_at_least_0(
            "lr",
            "initial_accumulator_value",
            "l1_regularization_strength",
            "l2_regularization_strength",
            "beta",
        )


@dataclass(frozen=True, kw_only=True)
class RMSprop(_Decaying):
    """`s = alpha * s + (1 - alpha) * g * g; w -= lr * g / (sqrt(s) + eps)`, as torch.optim.RMSprop.

    If centered, the square of the gradient's running mean is subtracted from s under the root; with
    momentum `b = momentum * b + g / (...); w -= lr * b`. State: `square_avg` (D,), `grad_avg` (D,)
    if centered, `momentum_buffer` (D,) with momentum.
    """

    lr: float = 1e-2
    """Learning rate."""
    alpha: float = 0.99
    """Decay of the running mean of squares, in [0, 1)."""
    eps: float = 1e-8
    """Added to the root."""
    momentum: float = 0.0
    """Decay of the running sum of steps; 0: no sum is kept."""
    centered: bool = False
    """Divides by the standard deviation of the gradient instead of its root mean square."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_at_least_0("lr", "eps", "momentum")
        self._require_open_unit(alpha=self.alpha)
        require_bool("RMSprop", centered=self.centered)


Optimizer: TypeAlias = (
    SGD | Adagrad | RowwiseAdagrad | Adam | AdamW | PartialRowwiseAdam | LAMB | FTRL | RMSprop
)
"""Any of the optimizers above."""
