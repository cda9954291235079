"""Translates the configuration dataclasses into the engine's."""

from __future__ import annotations

from recsdk_core import _ext
from recsdk_core.init import Constant, Custom, Initializer, Normal, TruncatedNormal, Uniform
from recsdk_core.optim import SGD, Adagrad, Adam, Optimizer, RowwiseAdagrad

__all__ = ["engine_initializer", "engine_nonfinite", "engine_optimizer"]

_NONFINITE = {
    "apply": _ext.NonFinite.APPLY,
    "raise": _ext.NonFinite.RAISE,
    "skip": _ext.NonFinite.SKIP,
}


def engine_optimizer(optimizer: Optimizer) -> _ext.OptimizerConfig:
    """The engine's form of an optimizer; TypeError for anything else."""
    config = _ext.OptimizerConfig()
    if isinstance(optimizer, SGD):
        config.kind = _ext.OptimizerKind.SGD
    elif isinstance(optimizer, Adagrad):
        config.kind = _ext.OptimizerKind.ADAGRAD
        config.lr_decay = optimizer.lr_decay
    elif isinstance(optimizer, RowwiseAdagrad):
        config.kind = _ext.OptimizerKind.ROWWISE_ADAGRAD
    elif isinstance(optimizer, Adam):
        config.kind = _ext.OptimizerKind.ADAM
        config.beta1, config.beta2 = optimizer.betas
        config.bias_correction = {
            "table": _ext.BiasCorrection.TABLE,
            "row": _ext.BiasCorrection.ROW,
        }[optimizer.bias_correction]
    else:
        raise TypeError(
            "optimizer must be one of recsdk_core.optim.SGD, Adagrad, RowwiseAdagrad, Adam; got "
            f"{optimizer!r} (translate a torch class with recsdk_core.optim.from_torch)"
        )
    config.learning_rate = optimizer.lr
    config.weight_decay = optimizer.weight_decay
    if isinstance(optimizer, (Adagrad, RowwiseAdagrad)):
        config.initial_accumulator_value = optimizer.initial_accumulator_value
    if not isinstance(optimizer, SGD):
        config.eps = optimizer.eps
    return config


def engine_initializer(initializer: Initializer, dim: int) -> _ext.InitializerConfig:
    """The engine's form of an initializer of rows of width `dim`; TypeError for anything else."""
    make = _ext.InitializerConfig
    if isinstance(initializer, Constant):
        return make.constant(initializer.value)
    if isinstance(initializer, Uniform):
        return make.uniform(initializer.low, initializer.high)
    if isinstance(initializer, Normal):
        return make.normal(initializer.mean, initializer.stddev)
    if isinstance(initializer, TruncatedNormal):
        return make.truncated_normal(
            initializer.mean, initializer.stddev, initializer.low, initializer.high
        )
    if isinstance(initializer, Custom):
        return make.custom(initializer.fn, dim)
    raise TypeError(
        "initializer must be one of recsdk_core.init.Constant, Uniform, Normal, TruncatedNormal, "
        f"Custom; got {initializer!r}"
    )


def engine_nonfinite(on_nonfinite: str) -> _ext.NonFinite:
    """The engine's form of `on_nonfinite`; ValueError for anything else."""
    if on_nonfinite not in _NONFINITE:
        raise ValueError(f"on_nonfinite must be 'apply', 'raise' or 'skip', got {on_nonfinite!r}")
    return _NONFINITE[on_nonfinite]
