"""The optimizers that are fused into the backward pass.

One update is applied per touched key and backward, with the key's summed gradient. Defaults and
formulas are those of the torch class of the same name, applied to touched rows only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from recsdk_core._internal.checks import require_at_least, require_open_unit

__all__ = ["SGD", "Adagrad", "Adam", "Optimizer", "RowwiseAdagrad", "from_torch"]


@dataclass(frozen=True, kw_only=True)
class SGD:
    """`w -= lr * g`, as torch.optim.SGD without momentum. Keeps no state."""

    lr: float = 1e-3
    """Learning rate."""
    weight_decay: float = 0.0
    """Added to the gradient times the weight, on touched rows only."""

    def __post_init__(self) -> None:
        require_at_least("SGD", 0.0, lr=self.lr, weight_decay=self.weight_decay)


@dataclass(frozen=True, kw_only=True)
class Adagrad:
    """`s += g * g; w -= lr_t * g / (sqrt(s) + eps)`, as torch.optim.Adagrad.

    State: `sum` (D,). The rate is `lr_t = lr / (1 + (t - 1) * lr_decay)` with t the table's update
    count.
    """

    lr: float = 1e-2
    """Learning rate."""
    lr_decay: float = 0.0
    """Decay of the learning rate with the table's update count."""
    weight_decay: float = 0.0
    """Added to the gradient times the weight, on touched rows only."""
    initial_accumulator_value: float = 0.0
    """First value of `sum`."""
    eps: float = 1e-10
    """Added to the root."""

    def __post_init__(self) -> None:
        require_at_least(
            "Adagrad",
            0.0,
            lr=self.lr,
            lr_decay=self.lr_decay,
            weight_decay=self.weight_decay,
            initial_accumulator_value=self.initial_accumulator_value,
            eps=self.eps,
        )


@dataclass(frozen=True, kw_only=True)
class RowwiseAdagrad:
    """`s += mean(g * g); w -= lr * g / (sqrt(s) + eps)`, s one number a row.

    As torchrec.optim.RowWiseAdagrad and fbgemm's EXACT_ROWWISE_ADAGRAD. State: `sum` (1,).
    """

    lr: float = 1e-2
    """Learning rate."""
    weight_decay: float = 0.0
    """Added to the gradient times the weight, on touched rows only."""
    initial_accumulator_value: float = 0.0
    """First value of `sum`."""
    eps: float = 1e-10
    """Added to the root."""

    def __post_init__(self) -> None:
        require_at_least(
            "RowwiseAdagrad",
            0.0,
            lr=self.lr,
            weight_decay=self.weight_decay,
            initial_accumulator_value=self.initial_accumulator_value,
            eps=self.eps,
        )


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Adam with L2 weight decay, as torch.optim.Adam, on touched rows.

    State: `exp_avg` (D,), `exp_avg_sq` (D,), and `step` (1,) with `bias_correction="row"`.
    """

    lr: float = 1e-3
    """Learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""
    eps: float = 1e-8
    """Added to the root."""
    weight_decay: float = 0.0
    """Added to the gradient times the weight, on touched rows only."""
    bias_correction: Literal["table", "row"] = "table"
    """Whose update count corrects the bias: the table's, or one kept per row."""

    def __post_init__(self) -> None:
        require_at_least("Adam", 0.0, lr=self.lr, eps=self.eps, weight_decay=self.weight_decay)
        if len(self.betas) != 2:
            raise ValueError(f"Adam: betas must be two numbers, got {self.betas!r}")
        require_open_unit("Adam", beta1=self.betas[0], beta2=self.betas[1])
        if self.bias_correction not in ("table", "row"):
            raise ValueError(
                f"Adam: bias_correction must be 'table' or 'row', got {self.bias_correction!r}"
            )


Optimizer: TypeAlias = SGD | Adagrad | RowwiseAdagrad | Adam
"""Any of the optimizers above."""


def _number(value: Any) -> float:
    """The value as a float: torch takes 0-d tensors as learning rates too."""
    return float(value)


def _betas(value: Any) -> tuple[float, float]:
    beta1, beta2 = value
    return float(beta1), float(beta2)


Converter: TypeAlias = Callable[[Any], Any]
_COMMON: Mapping[str, Converter] = {"lr": _number, "weight_decay": _number}
_ADAGRAD = {**_COMMON, "lr_decay": _number, "initial_accumulator_value": _number, "eps": _number}
_ROWWISE = {**_COMMON, "initial_accumulator_value": _number, "eps": _number}
_ADAM = {**_COMMON, "betas": _betas, "eps": _number}

# Arguments that are fine at these values because they then change no number.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "momentum": (0,),
    "dampening": (0,),
    "nesterov": (False,),
    "maximize": (False,),
    "amsgrad": (False,),
    "decoupled_weight_decay": (False,),
    "lr_decay": (0,),
    "foreach": (None, False, True),
    "fused": (None, False, True),
    "capturable": (False,),
    "differentiable": (False,),
}

_KNOWN: Mapping[tuple[str, str], tuple[type[Optimizer], Mapping[str, Converter]]] = {
    ("torch.optim", "SGD"): (SGD, _COMMON),
    ("torch.optim", "Adagrad"): (Adagrad, _ADAGRAD),
    ("torch.optim", "Adam"): (Adam, _ADAM),
    ("torchrec.optim", "SGD"): (SGD, _COMMON),
    ("torchrec.optim", "Adagrad"): (Adagrad, _ADAGRAD),
    ("torchrec.optim", "Adam"): (Adam, _ADAM),
    ("torchrec.optim", "RowWiseAdagrad"): (RowwiseAdagrad, _ROWWISE),
}


def from_torch(optimizer_class: type, kwargs: Mapping[str, Any] | None = None) -> Optimizer:
    """Translates an optimizer's torch or torchrec class and its arguments.

    Known are torch.optim.SGD, Adagrad and Adam, and torchrec.optim.SGD, Adagrad, Adam and
    RowWiseAdagrad; they are recognised by name, so torch is not imported. Missing arguments have
    the class's defaults. Flags that change no number (foreach, fused, ...) are accepted.

    Raises ValueError, naming it, for an unknown class and for an argument that is not supported
    (momentum, amsgrad, maximize, ...).
    """
    label, made, converters = _recognise(optimizer_class)
    fields: dict[str, Any] = {}
    for name, value in (kwargs or {}).items():
        if name in converters:
            fields[name] = converters[name](value)
        elif name not in _NEUTRAL or value not in _NEUTRAL[name]:
            supported = ", ".join(sorted(converters))
            raise ValueError(
                f"{label}: argument {name}={value!r} is not supported; supported are {supported}"
            )
    return made(**fields)


def _recognise(optimizer_class: type) -> tuple[str, type[Optimizer], Mapping[str, Converter]]:
    """(printable name, our class, its arguments) of a torch or torchrec class."""
    module = getattr(optimizer_class, "__module__", "")
    name = getattr(optimizer_class, "__qualname__", repr(optimizer_class))
    package = ".".join(module.split(".")[:2])
    found = _KNOWN.get((package, name))
    if found is None:
        known = ", ".join(f"{where}.{what}" for where, what in _KNOWN)
        raise ValueError(f"optimizer {module}.{name} is not supported; supported are {known}")
    return f"{package}.{name}", *found
