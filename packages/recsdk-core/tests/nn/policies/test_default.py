"""Modules whose ids without a row share rows that learn, or read initial ones."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from recsdk_core import Default, Evict, init
from recsdk_core.nn import HashEmbedding, HashEmbeddingBag, RowOptimizer

DIM = 3
IDS = torch.arange(30) * 0x9E3779B97F4A7C1
OFFSETS = torch.tensor([0, 4, 4, 13, 30])


def make(optimizer: Any = None, default: Default = Default.shared_rows(4), **config: Any) -> Any:
    return HashEmbeddingBag(
        DIM,
        name="user",
        mode="mean",
        include_last_offset=True,
        optimizer=optimizer,
        initializer=init.Uniform(low=-1.0, high=1.0),
        max_rows=8,
        default=default,
        **config,
    )


def backward(module: Any, seed: int) -> torch.Tensor:
    """One backward, of the bags in an order of the seed's."""
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(IDS)))
    out = module(IDS[order], OFFSETS)
    target = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    (out * target).sum().backward()
    return out.detach()


def shared(module: Any) -> Any:
    return module.table.shared_rows().weights


def test_a_module_is_its_dense_twin() -> None:
    module = make(torch.optim.SGD, optimizer_kwargs={"lr": 0.5})
    module(IDS, OFFSETS)
    table = module.table
    is_own = [int(each) in table for each in IDS]
    assert 0 < sum(is_own) <= 8
    twin = torch.from_numpy(table.lookup(IDS.numpy())).requires_grad_()
    index = table.map(IDS, insert=False)[0]
    keys = table.shared_rows().keys
    rows = torch.from_numpy(np.concatenate([table.lookup(IDS.numpy()), shared(module)]))
    which = torch.tensor(
        [i if own else len(IDS) + int(row) for i, (own, row) in enumerate(zip(is_own, index))]  # noqa: B905
    )
    assert len(keys) == 4
    rows = rows.requires_grad_()
    for step in range(3):
        order = torch.from_numpy(np.random.default_rng(step).permutation(len(IDS)))
        expected = torch.nn.functional.embedding_bag(
            which[order], rows, OFFSETS, mode="mean", include_last_offset=True
        )
        target = torch.linspace(-1, 1, expected.numel()).reshape(expected.shape)
        (expected * target).sum().backward()
        found = backward(module, step)
        assert torch.allclose(found, expected, atol=1e-6)
        with torch.no_grad():
            assert rows.grad is not None
            rows -= 0.5 * rows.grad
            rows.grad = None
    assert np.allclose(shared(module), rows.detach()[len(IDS) :], atol=1e-6)
    assert twin.shape == (30, DIM)


@pytest.mark.parametrize("num_backwards", [1, 3])
def test_a_row_optimizer_trains_them_with_the_sum_of_backwards(num_backwards: int) -> None:
    fused = make(torch.optim.SGD, optimizer_kwargs={"lr": 0.5}, accumulate_steps=num_backwards)
    module = make()
    optimizer = RowOptimizer(module, torch.optim.SGD, lr=0.5)
    for step in range(2):
        for number in range(num_backwards):
            backward(fused, 10 * step + number)
            backward(module, 10 * step + number)
        assert len(module.weight.grad) == len(module.table) + 4
        optimizer.step()
        optimizer.zero_grad()
    assert np.allclose(shared(module), shared(fused), atol=1e-6)
    assert np.allclose(module.table.lookup(IDS.numpy()), fused.table.lookup(IDS.numpy()), atol=1e-6)


def test_gradients_that_are_scaled_are_those_of_shared_rows_too() -> None:
    module, other = make(), make()
    optimizers = [RowOptimizer(each, torch.optim.SGD, lr=0.5) for each in (module, other)]
    backward(module, 1)
    backward(other, 1)
    before = shared(module)
    module.weight.grad = module.weight.grad * 2
    for optimizer in optimizers:
        optimizer.step()
    assert np.allclose(shared(module) - before, 2 * (shared(other) - before), atol=1e-6)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad])
def test_a_state_dict_has_them(optimizer: Any) -> None:
    module, other = make(optimizer), make(optimizer)
    backward(module, 1)
    other.load_state_dict(module.state_dict())
    copied = copy.deepcopy(module)
    for each in (module, other, copied):
        backward(each, 2)
        assert (shared(each) == shared(module)).all()
        assert (each.table.lookup(IDS.numpy()) == module.table.lookup(IDS.numpy())).all()


@pytest.mark.parametrize("rule", [{}, {"eviction": Evict.lru()}])
@pytest.mark.parametrize("is_strict", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam])
def test_their_state_waits_for_a_row_optimizer(kind: Any, is_strict: bool, rule: Any) -> None:
    def train(module: Any, optimizer: RowOptimizer, seed: int) -> None:
        optimizer.zero_grad()
        backward(module, seed)
        optimizer.step()

    module, resumed = make(**rule), make(**rule)
    optimizer = RowOptimizer(module, kind, lr=0.5)
    train(module, optimizer, 0)
    resumed.load_state_dict(copy.deepcopy(module.state_dict()), strict=is_strict)
    for made in (copy.deepcopy(resumed), resumed):
        second = RowOptimizer(made, kind, lr=0.5)
        one, other = module.state_dict(), made.state_dict()
        assert list(one) == list(other)
        assert all(torch.equal(one[name], other[name]) for name in one)
    for each in ((module, optimizer), (resumed, second)):
        train(*each, 1)
    assert np.array_equal(shared(module), shared(resumed))
    assert torch.equal(module.state_dict()["weight"], resumed.state_dict()["weight"])


def test_their_state_is_refused_by_another_row_optimizer() -> None:
    module, resumed = make(), make()
    optimizer = RowOptimizer(module, torch.optim.Adagrad, lr=0.5)
    backward(module, 0)
    optimizer.step()
    state = module.state_dict()
    resumed.load_state_dict(state)
    with pytest.raises(ValueError, match=r"state \{'sum': 3\} was loaded"):
        RowOptimizer(resumed, torch.optim.Adam, lr=0.5)
    left = {name: each for name, each in state.items() if not name.startswith("state.")}
    with pytest.raises(RuntimeError, match=r"shared_state: must be of \{\}.* leave its entries"):
        make().load_state_dict(left, strict=False)
    left.pop("shared_state.sum")
    resumed.load_state_dict(left, strict=False)
    RowOptimizer(resumed, torch.optim.Adam, lr=0.5)
    assert not resumed.state_dict()["shared_state.exp_avg"].any()


def test_a_state_dict_that_does_not_fit_changes_nothing() -> None:
    module = make(torch.optim.SGD)
    backward(module, 1)
    before = shared(module)
    for wrong, text in (
        ({"shared_keys": torch.arange(4)}, "shared_keys: 4 rows of width 3 are not the 4"),
        ({"shared_weight": torch.zeros(4, 2)}, "shared_keys: 4 rows of width 2"),
        ({"shared_weight": torch.zeros(3, 3)}, "shared_weight: must be"),
        ({"shared_weight": None}, "shared_weight: must be"),
    ):
        with pytest.raises(RuntimeError, match=text):
            module.load_state_dict({**module.state_dict(), **wrong})
    assert (shared(module) == before).all()
    given = module.state_dict()
    del given["shared_keys"]
    with pytest.raises(RuntimeError, match="Missing key.*shared_keys"):
        module.load_state_dict(given)


def test_evaluation_reads_and_writes_nothing() -> None:
    for default in (Default.shared_rows(), Default.initial_row()):
        module = make(torch.optim.SGD, default).eval()
        with torch.no_grad():
            first = module(IDS, OFFSETS)
            assert torch.equal(module(IDS, OFFSETS), first)
        assert len(module.table) == 0
        assert (shared(module) == shared(make(torch.optim.SGD, default))).all()


def test_the_norms_of_shared_rows_are_limited() -> None:
    module = HashEmbedding(DIM, name="user", max_rows=0, max_norm=0.5,
                           initializer=init.Constant(value=3.0), optimizer=torch.optim.SGD,
                           default=Default.shared_rows(2))  # fmt: skip
    assert torch.allclose(module(IDS).norm(dim=1), torch.tensor(0.5))
    assert np.allclose(np.linalg.norm(shared(module), axis=1), 0.5)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"padding_idx": 0, "default": Default.shared_rows()}, "padding_idx has no row"),
        ({"max_norm": 1.0, "default": Default.initial_row()}, "max_norm scales rows back"),
    ],
)
def test_what_does_not_go_together_is_refused(options: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        HashEmbedding(DIM, **options)


def test_rows_that_are_shared_are_not_averaged() -> None:
    module = make(torch.optim.SGD)
    with pytest.raises(ValueError, match="table 'user': rows that keys without one share are not"):
        AveragedModel(module).update_parameters(module)
