"""From optimizer classes of torch and torchrec to the engine's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from recsdk_core.optim._configs import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Optimizer,
    PartialRowwiseAdam,
    RMSprop,
    RowwiseAdagrad,
)

__all__ = ["from_torch"]


def _number(value: Any) -> float:
    """The value as a float: torch takes 0-d tensors as learning rates too."""
    if isinstance(value, (str, bool)):
        raise TypeError("a string or a truth value is no number")
    return float(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError("it is neither True nor False")
    return value


def _betas(value: Any) -> tuple[float, float]:
    beta1, beta2 = value
    return _number(beta1), _number(beta2)


Converter: TypeAlias = Callable[[Any], Any]
_COMMON: Mapping[str, Converter] = {"lr": _number, "weight_decay": _number}
_SGD = {**_COMMON, "momentum": _number, "dampening": _number, "nesterov": _flag}
_ADAGRAD = {**_COMMON, "lr_decay": _number, "initial_accumulator_value": _number, "eps": _number}
_ROWWISE = {**_COMMON, "initial_accumulator_value": _number, "eps": _number}
_ADAM = {**_COMMON, "betas": _betas, "eps": _number}
_RMSPROP = {**_COMMON, "alpha": _number, "eps": _number, "momentum": _number, "centered": _flag}

# Arguments that are accepted at these values, since they then change no number.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
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
    ("torch.optim", "SGD"): (SGD, _SGD),
    ("torch.optim", "Adagrad"): (Adagrad, _ADAGRAD),
    ("torch.optim", "Adam"): (Adam, _ADAM),
    ("torch.optim", "AdamW"): (AdamW, _ADAM),
    ("torch.optim", "RMSprop"): (RMSprop, _RMSPROP),
    ("torchrec.optim", "SGD"): (SGD, _SGD),
    ("torchrec.optim", "Adagrad"): (Adagrad, _ADAGRAD),
    ("torchrec.optim", "Adam"): (Adam, _ADAM),
    ("torchrec.optim", "RowWiseAdagrad"): (RowwiseAdagrad, _ROWWISE),
    ("torchrec.optim", "PartialRowWiseAdam"): (PartialRowwiseAdam, _ADAM),
    ("torchrec.optim", "LAMB"): (LAMB, _ADAM),
}


def from_torch(optimizer_class: type, kwargs: Mapping[str, Any] | None = None) -> Optimizer:
    """Translates an optimizer's torch or torchrec class and its arguments.

    It knows torch.optim.SGD, Adagrad, Adam, AdamW and RMSprop, and torchrec.optim.SGD, Adagrad,
    Adam, RowWiseAdagrad, PartialRowWiseAdam and LAMB. It recognizes them by name, so it does not
    import torch. Missing arguments have the class's defaults; for torchrec's stand-ins these are
    fbgemm's. Flags that change no number (foreach, fused, ...) are accepted.

    Raises ValueError, which names it, for an unknown class or an unsupported argument (amsgrad,
    maximize, ...); TypeError for an argument that should be a number and is not.
    """
    label, made, converters = _recognise(optimizer_class)
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"{label}: kwargs must be a mapping of arguments by name, got {kwargs!r}")
    given = dict(kwargs or {})
    if issubclass(made, Adam) and given.get("decoupled_weight_decay") is True:
        del given["decoupled_weight_decay"]
        if made is Adam:  # whose default is no decay
            made, given = AdamW, {"weight_decay": 0.0, **given}
    fields: dict[str, Any] = {}
    for name, value in given.items():
        if name in converters:
            fields[name] = _converted(label, name, converters[name], value)
        elif not _is_neutral(name, value):
            supported = ", ".join(sorted(converters))
            raise ValueError(
                f"{label}: argument {name}={value!r} is not supported; supported are {supported}"
            )
    return made(**fields)


def _is_neutral(name: str, value: Any) -> bool:
    is_plain = value is None or isinstance(value, (bool, int, float))
    return is_plain and value in _NEUTRAL.get(name, ())


def _converted(label: str, name: str, converter: Converter, value: Any) -> Any:
    try:
        return converter(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # RuntimeError: many numbers
        wanted = "a number"
        if converter in (_betas, _flag):
            wanted = "two numbers" if converter is _betas else "True or False"
        raise TypeError(f"{label}: argument {name} must be {wanted}, got {value!r}") from None


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
