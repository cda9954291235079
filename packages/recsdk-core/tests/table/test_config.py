"""Initializer and optimizer configurations, and their translation from torch's."""

from __future__ import annotations

from dataclasses import fields
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recsdk_core import Admit, Default, Evict, Table, init, optim

BAD = [
    (lambda: init.Constant(value=float("inf")), "Constant: value must be finite"),
    (lambda: init.Constant(value=3.5e38), "Constant: value must be finite in single precision"),
    (lambda: init.Normal(mean=-3.5e38), "Normal: mean must be finite in single precision"),
    (lambda: Default.constant(-3.5e38), "Default: value must be finite in single precision"),
    (lambda: init.Uniform(low=1.0, high=0.0), "low must be at most high"),
    (lambda: init.Normal(stddev=-1.0), "stddev must be at least 0"),
    (lambda: init.TruncatedNormal(stddev=0.0), "TruncatedNormal: stddev must be above 0, got 0.0"),
    (lambda: init.TruncatedNormal(low=1.0, high=1.0), "low must be below high"),
    (lambda: Table(2, name="a" * 991), "Table: name must have at most 990 characters, got 991"),
    (lambda: Table(2, name="\udc80"), "Table: name must have characters of UTF-8 only"),
    (lambda: Table(2).rename("a" * 991), "Table: name must have at most 990 characters"),
    (lambda: optim.SGD(lr=-1.0), "SGD: lr must be at least 0, got -1.0"),
    (lambda: optim.Adagrad(eps=float("nan")), "Adagrad: eps must be finite"),
    (lambda: optim.RowwiseAdagrad(weight_decay=-1.0), "weight_decay must be at least 0"),
    (lambda: optim.Adam(betas=(1.0, 0.9)), r"Adam: betas\[0\] must be in \[0, 1\), got 1.0"),
    (lambda: optim.LAMB(betas=(0.9, -0.1)), r"LAMB: betas\[1\] must be in \[0, 1\), got -0.1"),
    (lambda: optim.Adam(betas=(0.9,)), "betas must be two numbers"),  # type: ignore[arg-type]
    (lambda: optim.Adam(betas=None), "betas must be two numbers"),  # type: ignore[arg-type]
    (lambda: optim.SGD(lr=10**400), "SGD: lr is too large"),
    (lambda: optim.Adam(bias_correction="key"), "'table' or 'row'"),  # type: ignore[arg-type]
    (lambda: optim.SGD(clip_value=0.0), "SGD: clip_value must be above 0, got 0.0"),
    (lambda: optim.FTRL(clip_norm=float("inf")), "FTRL: clip_norm must be finite"),
    (lambda: optim.FTRL(lr=-1.0), "FTRL: lr must be at least 0, got -1.0"),
    (lambda: init.TruncatedNormal(stddev=1e-46), "stddev must be above 0 in single precision"),
    (lambda: setattr(Table(2), "learning_rate", -1.0), "Table: learning_rate must be at least 0"),
    (lambda: setattr(Table(2), "learning_rate", 1e39), "Table: learning_rate must be finite in "),
    (lambda: optim.FTRL(beta=-1.0), "FTRL: beta must be at least 0"),
    (lambda: optim.SGD(weight_decay_mode="l1"), "'l2' or 'decoupled'"),  # type: ignore[arg-type]
    (lambda: optim.SGD(dampening=0.5), "SGD: dampening needs momentum, got 0.5"),
    (lambda: optim.SGD(momentum=0.5, dampening=1.0), r"dampening must be in \[0, 1\)"),
    (lambda: optim.SGD(nesterov=True), "SGD: nesterov needs momentum without dampening"),
    (lambda: optim.RMSprop(alpha=1.0), r"RMSprop: alpha must be in \[0, 1\), got 1.0"),
    (lambda: optim.LAMB(weight_decay=-1.0), "LAMB: weight_decay must be at least 0"),
    (lambda: optim.Adagrad(catch_up=True), "Adagrad: catch_up needs weight_decay_mode='decoupled'"),
    (lambda: optim.SGD(momentum=0.5, catch_up=True), "SGD: catch_up needs"),
    (
        lambda: optim.AdamW(lr=2.0, weight_decay=0.5, catch_up=True),
        "AdamW: catch_up needs lr . weight_decay below 1, got 1.0",
    ),
    (
        lambda: optim.SGD(lr=1.0 - 1e-9, weight_decay=1.0, catch_up=True),
        "SGD: catch_up needs lr . weight_decay below 1, got 1.0",
    ),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_bad_values(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("value", [None, "false", 1])
@pytest.mark.parametrize("name", ["SGD catch_up", "SGD nesterov", "RMSprop centered"])
def test_a_switch_is_true_or_false(name: str, value: Any) -> None:
    kind, field = name.split()
    with pytest.raises(TypeError, match=f"{kind}: {field} must be True or False, got "):
        getattr(optim, kind)(momentum=0.5, **{field: value})


@pytest.mark.parametrize("value", [None, "0.1", [0.1]])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda x: optim.SGD(lr=x), "SGD: lr"),
        (lambda x: optim.Adam(betas=(x, 0.9)), r"Adam: betas\[0\]"),
        (lambda x: optim.Adam(clip_norm=x or "none"), "Adam: clip_norm"),
        (lambda x: optim.RMSprop(alpha=x), "RMSprop: alpha"),
        (lambda x: init.Uniform(low=x, high=1.0), "Uniform: low"),
        (lambda x: init.Constant(value=x), "Constant: value"),
        (lambda x: Default.constant(x), "Default: value"),
        (lambda x: setattr(Table(2), "learning_rate", x), "Table: learning_rate"),
    ],
)
def test_what_should_be_a_number_and_is_not_is_named(make: Any, name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name} must be a number, got"):
        make(value)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"lr": None}, "argument lr must be a number, got None"),
        ({"lr": "0.1"}, "argument lr must be a number, got '0.1'"),
        ({"betas": 0.9}, "argument betas must be two numbers, got 0.9"),
        ({"betas": (0.9, "0.9")}, "argument betas must be two numbers"),
    ],
)
def test_arguments_of_torch_classes_that_are_no_numbers(kwargs: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"torch.optim.Adam: {message}"):
        optim.from_torch(torch_class("torch.optim.adam", "Adam"), kwargs)


OPTIMIZERS = (optim.SGD, optim.Adagrad, optim.RowwiseAdagrad, optim.Adam, optim.AdamW,
              optim.PartialRowwiseAdam, optim.LAMB, optim.FTRL, optim.RMSprop)  # fmt: skip
FLOATS = [
    (kind, field.name)
    for kind in OPTIMIZERS
    for field in fields(kind)
    if "float" in field.type and field.name != "betas"
]


@pytest.mark.parametrize(("kind", "name"), FLOATS)
@pytest.mark.parametrize("value", [1e39, 1e300, -1e300, float("inf"), float("nan"), True, "1",
                                   np.bool_(True), np.ones(1), Decimal(1)])  # fmt: skip
def test_what_float32_cannot_hold_is_refused_by_name(kind: Any, name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{kind.__name__}: {name} must be "):
        kind(**{name: value})
    with pytest.raises(ValueError, match=f"^{kind.__name__}: {name} is too large for a float"):
        kind(**{name: Fraction(10**400)})


@pytest.mark.parametrize(("kind", "name"), FLOATS)
@pytest.mark.parametrize("number", [np.float32, np.float16, np.float64, Fraction])
def test_numbers_of_any_kind_are_saved(kind: Any, name: str, number: Any, tmp_path: Path) -> None:
    needs = {"momentum": 0.5} if name == "dampening" else {}
    made = kind(**{name: number(0.25)}, **needs)
    assert made == kind(**{name: 0.25}, **needs)
    assert Table(2, name="user", optimizer=made).save(tmp_path / "one").sequence == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": optim.Adam(betas=[np.float32(0.5), 0.75])},  # type: ignore[arg-type]
        {"optimizer": optim.SGD(lr=np.int64(1))},
        {"initializer": init.Normal(mean=np.float32(0.5), stddev=np.float32(1))},
        {"initializer": init.Uniform(low=np.float32(0.5), high=np.float32(1))},
        {"initializer": init.Constant(value=np.float32(0.5))},
        {"initializer": init.TruncatedNormal(mean=np.float32(0.5))},
        {"default": Default.constant(np.float32(0.5))},  # type: ignore[arg-type]
        {"admission": Admit.probability(np.float32(0.5))},  # type: ignore[arg-type]
        {"eviction": Evict.lfu(half_life=np.float32(4)), "max_rows": 8},
    ],
)  # fmt: skip
def test_settings_with_numbers_of_numpy_are_saved(settings: Any, tmp_path: Path) -> None:
    table = Table(2, name="user", **settings)
    table.save(tmp_path / "one")
    again = Table(2, name="user", **settings)
    again.load(tmp_path / "one")
    again.save_delta(tmp_path / "two")


def test_a_custom_initializer_must_be_callable() -> None:
    with pytest.raises(TypeError, match="fn must be callable, got int"):
        init.Custom(fn=3)  # type: ignore[arg-type]


def torch_class(module: str, name: str) -> type:
    """Stands for a class of torch, which need not be installed here; nn/ has the real ones."""
    return type(name, (), {"__module__": module})


def test_known_classes_and_their_defaults() -> None:
    assert optim.from_torch(torch_class("torch.optim.sgd", "SGD")) == optim.SGD()
    assert optim.from_torch(torch_class("torch.optim.adagrad", "Adagrad")) == optim.Adagrad()
    assert optim.from_torch(torch_class("torch.optim.adam", "Adam"), {}) == optim.Adam()
    rowwise = torch_class("torchrec.optim.rowwise_adagrad", "RowWiseAdagrad")
    assert optim.from_torch(rowwise, {"lr": 0.5}) == optim.RowwiseAdagrad(lr=0.5)
    adamw = torch_class("torch.optim.adamw", "AdamW")
    assert optim.from_torch(adamw, {"decoupled_weight_decay": True}) == optim.AdamW()
    momentum = {"momentum": 0.5, "nesterov": True}
    assert optim.from_torch(torch_class("torch.optim.sgd", "SGD"), momentum) == optim.SGD(
        momentum=0.5, nesterov=True
    )
    centered = torch_class("torch.optim.rmsprop", "RMSprop")
    assert optim.from_torch(centered, {"centered": True}) == optim.RMSprop(centered=True)
    placeholder = torch_class("torchrec.optim.optimizers", "PartialRowWiseAdam")
    assert optim.from_torch(placeholder) == optim.PartialRowwiseAdam()
    assert optim.from_torch(torch_class("torchrec.optim.optimizers", "LAMB")) == optim.LAMB()
    placeholder = torch_class("torchrec.optim.optimizers", "Adam")
    assert optim.from_torch(placeholder, {"eps": 1e-3}) == optim.Adam(eps=1e-3)


def test_adam_with_decoupled_decay_is_adamw_with_the_decay_of_adam() -> None:
    adam = torch_class("torch.optim.adam", "Adam")
    made = optim.from_torch(adam, {"decoupled_weight_decay": True})
    assert made == optim.AdamW(weight_decay=0.0)
    made = optim.from_torch(adam, {"decoupled_weight_decay": True, "weight_decay": 0.5})
    assert made == optim.AdamW(weight_decay=0.5)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"momentum": 0.0},
        {"foreach": True},
        {"fused": None},
        {"maximize": False},
        {"nesterov": False},
    ],
)
def test_arguments_that_change_no_number(kwargs: dict[str, Any]) -> None:
    assert optim.from_torch(torch_class("torch.optim.sgd", "SGD"), kwargs) == optim.SGD()


@pytest.mark.parametrize(
    "kwargs", [{"amsgrad": True}, {"maximize": True}, {"rho": 1}, {"differentiable": True}]
)
def test_unsupported_arguments_are_named(kwargs: dict[str, Any]) -> None:
    [(name, value)] = kwargs.items()
    with pytest.raises(ValueError, match=f"torch.optim.Adam: argument {name}={value}.*supported"):
        optim.from_torch(torch_class("torch.optim.adam", "Adam"), kwargs)


@pytest.mark.parametrize(
    ("module", "name"), [("torch.optim.nadam", "NAdam"), ("mine", "SGD"), ("builtins", "int")]
)
def test_unknown_classes_are_named(module: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"optimizer {module}.{name} is not supported"):
        optim.from_torch(torch_class(module, name), {})


def test_a_table_of_the_longest_name_is_saved(tmp_path: Path) -> None:
    table = Table(2, name="\U0001f600" * 990, default=Default.shared_rows(2))
    assert table.save(tmp_path / "one").sequence == 0


@pytest.mark.parametrize("value", [None, 1, "yes", np.ones(2), np.bool_(True)])
def test_switches_of_calls_are_true_or_false(value: Any) -> None:
    table, keys = Table(2), np.array([1])
    with pytest.raises(TypeError, match="Table.pool: insert must be True or False, got"):
        table.pool(keys, np.array([0, 1]), insert=value)
    with pytest.raises(TypeError, match="Table.export: state must be True or False, got"):
        table.export(state=value)
    assert len(table) == 0


@pytest.mark.parametrize("value", [1, 1.5, True, "sum", [1], np.ones((1, 2), np.float32)])
def test_state_that_is_no_mapping_is_refused(value: Any) -> None:
    table = Table(2, optimizer=optim.Adagrad())
    with pytest.raises(TypeError, match="state must be a mapping of arrays by field, got"):
        table.upsert(np.array([1]), np.ones((1, 2), np.float32), value)
    assert len(table) == 0
