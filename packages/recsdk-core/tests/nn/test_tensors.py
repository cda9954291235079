"""Torch tensors as arguments of Table: taken in place, given back as tensors."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from recsdk_core import Admit, Bags, Table, init, map_tables, optim, pool_tables, update_tables

KEYS = torch.tensor([1, -1, 2**62])


@pytest.fixture
def table() -> Table:
    return Table(2, initializer=init.Constant(value=1.0), optimizer=optim.SGD(lr=1.0))


def test_results_are_tensors(table: Table) -> None:
    offsets = torch.tensor([0, 1, 3])
    weights = torch.ones(3)
    results = [
        *table.map(KEYS, insert=True),
        *table.find_or_insert(KEYS, return_outcomes=True),
        *table.lookup(KEYS, return_outcomes=True),
        table.upsert(KEYS, torch.ones(3, 2), return_outcomes=True),
        table.apply_gradients(KEYS, torch.ones(3, 2), return_outcomes=True),
        *table.pool(KEYS, offsets, weights, return_outcomes=True),
        table.pool_backward(KEYS, offsets, torch.ones(2, 2), weights, return_weights_grad=True),
        *map_tables([(table, KEYS)], insert=False)[0],
        table.pool_rows(Bags(*table.map(KEYS, insert=False), offsets)),
        table.erase(KEYS, return_outcomes=True),
    ]
    assert all(isinstance(result, torch.Tensor) for result in results)
    kinds = {result.dtype for result in results}
    assert kinds == {torch.int64, torch.uint8, torch.float32}


def test_memory_is_shared_not_copied(table: Table) -> None:
    """A tensor that does not start its storage is read from where it starts."""
    keys = torch.arange(10)[4:7]
    table.upsert(keys, torch.arange(12.0).reshape(6, 2)[3:])
    assert table.lookup(np.array([4, 5, 6])).tolist() == [[6.0, 7.0], [8.0, 9.0], [10.0, 11.0]]


def test_numpy_and_torch_mix(table: Table) -> None:
    values = table.find_or_insert(KEYS.numpy())
    assert isinstance(values, np.ndarray)
    table.apply_gradients(KEYS.numpy(), torch.ones(3, 2))
    assert isinstance(table.pool(KEYS, np.array([0, 3])), torch.Tensor)


def test_parameters_and_tensors_that_require_gradients(table: Table) -> None:
    table.upsert(KEYS, torch.nn.Parameter(torch.zeros(3, 2)))
    assert table.lookup(KEYS).tolist() == [[0.0, 0.0]] * 3


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64, torch.int32])
def test_key_dtypes(table: Table, dtype: torch.dtype) -> None:
    table.find_or_insert(torch.tensor([1, 2]).to(dtype))
    assert 1 in table


def unaligned(dtype: torch.dtype, n: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(8 * n + 1), dtype=dtype, count=n, offset=1)


BAD = [
    (torch.tensor([1.0]), TypeError, r"torch.Tensor of torch.float32.*keys.to\(torch.int64\)"),
    (torch.tensor([True]), TypeError, "torch.bool"),
    (KEYS[::2], ValueError, r"keys must be contiguous.*keys.contiguous\(\)"),
    (
        unaligned(torch.int64, 2),
        ValueError,
        r"keys must be contiguous in C order and aligned.*pass keys.clone\(\)",
    ),
    (torch._neg_view(KEYS), ValueError, r"negated view.*pass keys.resolve_neg\(\)"),
    (KEYS.reshape(3, 1), ValueError, r"shape \(N,\), got torch.Tensor of torch.int64, shape \(3"),
    (torch.tensor(1), ValueError, r"shape \(N,\)"),
    (torch.zeros(3, dtype=torch.int64, device="meta"), ValueError, "on meta; pass keys.cpu"),
    (torch.eye(3, dtype=torch.int64).to_sparse(), ValueError, "dense.*to_dense"),
]


@pytest.mark.parametrize(("keys", "error", "message"), BAD)
def test_bad_keys(table: Table, keys: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        table.find_or_insert(keys)
    assert len(table) == 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_counts_that_are_nested() -> None:
    table = Table(2, admission=Admit.count(2))
    with pytest.raises(ValueError, match="counts must not be a nested tensor"):
        table.map(KEYS, insert=True, counts=torch.nested.nested_tensor([KEYS]))
    assert table.stats().admission_records == 0


def test_values_that_are_unaligned_or_negated(table: Table) -> None:
    with pytest.raises(ValueError, match="aligned"):
        table.upsert(KEYS[:1], unaligned(torch.float32, 2).reshape(1, 2))
    negated = torch.ones(3, 2, dtype=torch.complex64).conj().imag
    assert negated.is_neg()
    with pytest.raises(ValueError, match=r"values must not be a negated view.*resolve_neg\(\)"):
        table.upsert(KEYS, negated)
    assert len(table) == 0


@pytest.mark.parametrize("name", ["rows", "outcomes", "offsets", "weights"])
@pytest.mark.parametrize("size", [0, 2, 2**20])
def test_bags_of_a_resized_tensor(table: Table, name: str, size: int) -> None:
    # Copies: torch does not resize tensors whose memory came from elsewhere.
    rows, outcomes = (result.clone() for result in table.map(KEYS, insert=True))
    tensors = {"rows": rows, "outcomes": outcomes, "offsets": torch.tensor([0, 1, 3])}
    tensors["weights"] = torch.ones(3)
    bags = Bags(**tensors)
    out, grad = torch.zeros(2, 2), torch.ones(2, 2)
    tensors[name].resize_(size)
    calls = [
        lambda: table.pool_rows(bags),
        lambda: table.update_rows(bags, grad),
        lambda: pool_tables([(table, [(bags, out, 0)])]),
        lambda: update_tables([(table, [(bags, grad, 0)])]),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"{name} was resized after it was given"):
            call()
    assert table.update_count == 0


@pytest.mark.parametrize(
    ("torch_class", "expected"),
    [
        (torch.optim.SGD, optim.SGD()),
        (torch.optim.Adagrad, optim.Adagrad()),
        (torch.optim.Adam, optim.Adam()),
    ],
)
def test_optimizer_classes(torch_class: Any, expected: optim.Optimizer) -> None:
    assert optim.from_torch(torch_class) == expected


def test_defaults_are_those_of_torch() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    for torch_class in (
        torch.optim.SGD,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.RMSprop,
    ):
        defaults = torch_class([parameter]).defaults
        assert optim.from_torch(torch_class, defaults) == optim.from_torch(torch_class)


@pytest.mark.parametrize("torch_class", [torch.optim.NAdam, torch.optim.Rprop])
def test_unsupported_optimizer_classes(torch_class: Any) -> None:
    with pytest.raises(ValueError, match=f"{torch_class.__name__} is not supported"):
        optim.from_torch(torch_class)


def test_example_in_the_readme() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    [code] = [part for part in readme.split("```") if part.startswith("python\nimport torch")]
    names: dict[str, Any] = {}
    exec(code.removeprefix("python"), names)
    assert names["vectors"].shape == (2, 16)
    assert names["items"].table.update_count == 1


def test_examples_in_docstrings() -> None:
    result = doctest.testmod(importlib.import_module("recsdk_core.nn.modules"))
    assert result.attempted > 0
    assert result.failed == 0


def test_tensors_without_memory_are_refused(table: Table) -> None:
    table.find_or_insert(KEYS)
    freed = KEYS.clone()
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="keys has no memory"):
        table.lookup(freed)
    many = KEYS.repeat(5000)
    with FakeTensorMode(), pytest.raises(RuntimeError, match="no memory here"):
        table.lookup(many)
    assert table.lookup(many).shape == (len(many), table.dim)
    with FakeTensorMode() as mode, pytest.raises(ValueError, match="a compiler traces a model"):
        table.lookup(mode.from_tensor(KEYS))


def test_small_results_have_memory_of_their_own(table: Table) -> None:
    expected = table.find_or_insert(KEYS)
    with FakeTensorMode():
        made = table.lookup(KEYS)
    assert torch.equal(made, expected)
    made.add_(1.0)  # writable, and nobody else's
    assert torch.equal(table.lookup(KEYS), expected)
    views = [table.lookup(KEYS)[0] for _ in range(100)]  # what they belong to is gone
    assert all(torch.equal(view, expected[0]) for view in views)
    assert torch.from_numpy(expected.numpy()).data_ptr() % 64 == 0
