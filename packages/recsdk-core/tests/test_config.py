"""Initializer and optimizer configurations, and their translation from torch's."""

from __future__ import annotations

from typing import Any

import pytest

from recsdk_core import init, optim

BAD = [
    (lambda: init.Constant(value=float("inf")), "Constant: value must be finite"),
    (lambda: init.Uniform(low=1.0, high=0.0), "low must be at most high"),
    (lambda: init.Normal(stddev=-1.0), "stddev must be at least 0"),
    (lambda: init.TruncatedNormal(stddev=0.0), "stddev must be greater than 0"),
    (lambda: init.TruncatedNormal(low=1.0, high=1.0), "low must be below high"),
    (lambda: optim.SGD(lr=-1.0), "SGD: lr must be at least 0, got -1.0"),
    (lambda: optim.Adagrad(eps=float("nan")), "Adagrad: eps must be finite"),
    (lambda: optim.RowwiseAdagrad(weight_decay=-1.0), "weight_decay must be at least 0"),
    (lambda: optim.Adam(betas=(1.0, 0.9)), r"beta1 must be in \[0, 1\), got 1.0"),
    (lambda: optim.Adam(betas=(0.9,)), "betas must be two numbers"),  # type: ignore[arg-type]
    (lambda: optim.Adam(bias_correction="key"), "'table' or 'row'"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_bad_values(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


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
    placeholder = torch_class("torchrec.optim.optimizers", "Adam")
    assert optim.from_torch(placeholder, {"eps": 1e-3}) == optim.Adam(eps=1e-3)


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
    ("module", "name"), [("torch.optim.adamw", "AdamW"), ("mine", "SGD"), ("builtins", "int")]
)
def test_unknown_classes_are_named(module: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"optimizer {module}.{name} is not supported"):
        optim.from_torch(torch_class(module, name), {})
