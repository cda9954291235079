"""Translates the configuration dataclasses into the engine's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np

from recsdk_core import _ext
from recsdk_core.admission import Admit
from recsdk_core.eviction import Evict
from recsdk_core.init import Constant, Custom, Initializer, Normal, TruncatedNormal, Uniform
from recsdk_core.optim import (
    FTRL,
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
from recsdk_core.outcome import Default

__all__ = [
    "engine_admission",
    "engine_default",
    "engine_dtype",
    "engine_eviction",
    "engine_initializer",
    "engine_nonfinite",
    "engine_optimizer",
    "engine_rounding",
]

_Choice = TypeVar("_Choice")

_DTYPES = {
    "float32": _ext.DType.FLOAT32,
    "bfloat16": _ext.DType.BFLOAT16,
    "float16": _ext.DType.FLOAT16,
}
_ROUNDINGS = {"stochastic": _ext.Rounding.STOCHASTIC, "nearest": _ext.Rounding.NEAREST}

_ON_FULL = {"refuse": _ext.OnFull.REFUSE, "raise": _ext.OnFull.RAISE}

_NONFINITE = {
    "apply": _ext.NonFinite.APPLY,
    "raise": _ext.NonFinite.RAISE,
    "skip": _ext.NonFinite.SKIP,
}


_KINDS: Mapping[type, _ext.OptimizerKind] = {
    SGD: _ext.OptimizerKind.SGD,
    Adagrad: _ext.OptimizerKind.ADAGRAD,
    RowwiseAdagrad: _ext.OptimizerKind.ROWWISE_ADAGRAD,
    Adam: _ext.OptimizerKind.ADAM,
    AdamW: _ext.OptimizerKind.ADAM,
    PartialRowwiseAdam: _ext.OptimizerKind.PARTIAL_ROWWISE_ADAM,
    LAMB: _ext.OptimizerKind.LAMB,
    FTRL: _ext.OptimizerKind.FTRL,
    RMSprop: _ext.OptimizerKind.RMSPROP,
}

# Fields whose name or value differs in the engine: its name, and how the value is translated.
_TRANSLATED: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "lr": ("learning_rate", float),
    "l1_regularization_strength": ("l1", float),
    "l2_regularization_strength": ("l2", float),
    "weight_decay_mode": (
        "weight_decay_mode",
        {"l2": _ext.WeightDecay.L2, "decoupled": _ext.WeightDecay.DECOUPLED}.__getitem__,
    ),
    "bias_correction": (
        "bias_correction",
        {"table": _ext.BiasCorrection.TABLE, "row": _ext.BiasCorrection.ROW}.__getitem__,
    ),
}


def engine_optimizer(optimizer: Optimizer) -> _ext.OptimizerConfig:
    """The engine's form of an optimizer; TypeError for anything else."""
    kind = _KINDS.get(type(optimizer))
    if kind is None:
        known = ", ".join(cls.__name__ for cls in _KINDS)
        raise TypeError(
            f"optimizer must be one of recsdk_core.optim.{known}; got "
            f"{optimizer!r} (translate a torch class with recsdk_core.optim.from_torch)"
        )
    config = _ext.OptimizerConfig()
    config.kind = kind
    for field in fields(optimizer):
        value = getattr(optimizer, field.name)
        if field.name == "betas":
            config.beta1, config.beta2 = value
            continue
        name, translate = _TRANSLATED.get(field.name, (field.name, _same))
        setattr(config, name, translate(value))
    return config


def _same(value: Any) -> Any:
    return value


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


def engine_eviction(eviction: Evict | None, max_rows: int | None) -> _ext.EvictConfig | None:
    """The engine's form of a rule who leaves; TypeError or ValueError for anything else."""
    if eviction is None:
        return None
    if not isinstance(eviction, Evict):
        raise TypeError(f"eviction must be an Evict, such as Evict.lru(), got {eviction!r}")
    if max_rows is None and not eviction.expires:
        raise ValueError("eviction makes room within max_rows; set max_rows too, or a ttl")
    made = _engine_order(eviction)
    made.churn_steps = eviction.churn_steps
    if eviction.churn_records is not None:
        made.churn_records = eviction.churn_records
    if eviction.places is not None:
        columns = eviction.columns
        made.set_function(
            _placing(eviction), "count" in columns, "score" in columns, "now" not in columns
        )
    return made


def _placing(rule: Evict) -> Callable[..., None]:
    """What calls a rule's function for the engine."""
    names, places = rule.columns, rule.places
    assert places is not None

    def fill(now: int, step: Any, time: Any, count: Any, score: Any, bits_n: Any) -> None:
        columns = {"now": now, "step": step, "time": time, "count": count, "score": score}
        found = np.asarray(places(**{name: columns[name] for name in names}))
        if found.shape != step.shape or found.dtype.kind not in "iuf":
            raise ValueError(
                f"Evict.function: the function must give a number for each of {len(step)} keys, "
                f"got shape {found.shape} of {found.dtype}"
            )
        bits_n.view(np.float64)[:] = found

    return fill


def _engine_order(eviction: Evict) -> _ext.EvictConfig:
    order = _ext.EvictOrder[eviction.order.upper()]
    half_life = None if eviction.half_life is None else float(eviction.half_life)
    return _ext.EvictConfig(
        order,
        _ext.EvictClock[eviction.by.upper()],
        half_life,
        eviction.min_age,
        eviction.ttl,
        eviction.rare_ttl,
        eviction.rare_count,
        100 if eviction.expire_every is None else eviction.expire_every,
        1.0 if eviction.alpha is None else float(eviction.alpha),
        0.0 if eviction.beta is None else float(eviction.beta),
        1.0 if eviction.decay is None else float(eviction.decay),
        None if eviction.share is None else float(eviction.share),
        None if eviction.below is None else float(eviction.below),
    )


def engine_admission(admission: Admit | None) -> _ext.AdmitConfig | None:
    """The engine's form of a rule which keys get a row; TypeError for anything else."""
    if admission is None:
        return None
    if not isinstance(admission, Admit):
        raise TypeError(f"admission must be an Admit, such as Admit.count(3), got {admission!r}")
    terms = [
        _ext.AdmitTerm(
            _ext.AdmitKind[term.kind.upper()],
            1 if term.n is None else term.n,
            1.0 if term.p is None else float(term.p),
            1.0 if term.alpha is None else float(term.alpha),
            0.0 if term.beta is None else float(term.beta),
            1.0 if term.threshold is None else float(term.threshold),
        )
        for term in admission.terms()
    ]
    return _ext.AdmitConfig(terms, admission.max_records, admission.max_bytes)


def engine_default(default: Default) -> _ext.DefaultConfig:
    """The engine's form of what keys without a row read; TypeError for anything else."""
    if not isinstance(default, Default):
        raise TypeError(f"default must be a Default, as Default.constant(0.5), got {default!r}")
    kind = _ext.DefaultKind[default.kind.upper()]
    begin_with = _ext.BeginWith[default.begin_with.upper()]
    return _ext.DefaultConfig(kind, float(default.value), default.n or 1, begin_with)


def engine_on_full(on_full: str) -> _ext.OnFull:
    """The engine's form of `on_full`; ValueError for anything else."""
    return _chosen(_ON_FULL, on_full=on_full)


def engine_nonfinite(on_nonfinite: str) -> _ext.NonFinite:
    """The engine's form of `on_nonfinite`; ValueError for anything else."""
    return _chosen(_NONFINITE, on_nonfinite=on_nonfinite)


def engine_dtype(dtype: str) -> _ext.DType:
    """The engine's form of the type of stored weights; ValueError for anything else."""
    return _chosen(_DTYPES, dtype=dtype)


def engine_rounding(rounding: str) -> _ext.Rounding:
    """The engine's form of `rounding`; ValueError for anything else."""
    return _chosen(_ROUNDINGS, rounding=rounding)


def _chosen(choices: Mapping[str, _Choice], **setting: str) -> _Choice:
    """What one setting chooses, by its name; ValueError for anything else."""
    ((name, value),) = setting.items()
    if not isinstance(value, str) or value not in choices:
        *most, last = map(repr, choices)
        raise ValueError(f"{name} must be {', '.join(most)} or {last}, got {value!r}")
    return choices[value]
