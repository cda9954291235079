"""Groups of a RowOptimizer: what may be added, and optimizers that torch does not have."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from recsdk_core import optim
from recsdk_core.errors import BusyError
from recsdk_core.nn import HashEmbedding, RowOptimizer

DIM = 2
KEYS = torch.arange(4)
KINDS: dict[Any, dict[str, Any]] = {
    torch.optim.SGD: {"lr": 0.1, "momentum": 0.9},
    torch.optim.Adagrad: {"lr": 0.1, "initial_accumulator_value": 0.5},
    torch.optim.AdamW: {"lr": 0.1},
}


class Model(nn.Module):
    """Two tables and two layers."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.tables = nn.ModuleList([make(), make()])
        self.layers = nn.ModuleList([nn.Linear(DIM, 1), nn.Linear(DIM, 1)])

    def loss(self) -> torch.Tensor:
        pairs = zip(self.tables, self.layers, strict=True)
        scores = torch.stack([layer(table(KEYS)) for table, layer in pairs])
        return (scores - 1.0).square().sum()

    def rows(self) -> list[torch.Tensor]:
        return [
            each.weight.detach() if isinstance(each, nn.Embedding) else each.table.lookup(KEYS)
            for each in self.tables
        ]


def twins() -> tuple[Model, Model]:
    dense, hashed = Model(lambda: nn.Embedding(len(KEYS), DIM)), Model(lambda: HashEmbedding(DIM))
    hashed.layers.load_state_dict(dense.layers.state_dict())
    for one, other in zip(hashed.tables, dense.rows(), strict=True):
        one.table.upsert(KEYS, other.clone())
    return hashed, dense


def part_of(model: Model, number: int) -> list[nn.Parameter]:
    return [*model.tables[number].parameters(), *model.layers[number].parameters()]


@pytest.mark.parametrize("first", ["tables", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_added_group_trains_from_then_on(kind: Any, first: str) -> None:
    """Beside an optimizer of its own for what comes later, whose rate is another."""
    hashed, dense = twins()
    begun = [part_of(model, 0)[: 1 if first == "tables" else 3] for model in (hashed, dense)]
    added = [part_of(model, 1) for model in (hashed, dense)]
    optimizer = RowOptimizer(begun[0], kind, **KINDS[kind])
    expected = [kind(begun[1], **KINDS[kind])]
    hashed.tables[1].weight.requires_grad_(False)
    for number in range(4):
        if number == 2:
            hashed.tables[1].weight.requires_grad_(True)
            optimizer.zero_grad()
            optimizer.add_param_group({"params": added[0], "lr": 0.05})
            expected.append(kind(added[1], **{**KINDS[kind], "lr": 0.05}))
        for model, optimizers in ((hashed, [optimizer]), (dense, expected)):
            for each in optimizers:
                each.zero_grad()
            model.loss().backward()
            for each in optimizers:
                each.step()
    for one, other in zip(
        [*hashed.rows(), *hashed.layers.parameters()],
        [*dense.rows(), *dense.layers.parameters()],
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)
    assert len(optimizer.state_dict()["param_groups"]) == 2


def test_a_group_that_cannot_be_added_changes_nothing() -> None:
    hashed, _ = twins()
    optimizer = RowOptimizer(part_of(hashed, 0), torch.optim.SGD, lr=0.1)
    other = RowOptimizer(hashed.tables[1], torch.optim.SGD, lr=0.3)
    hashed.loss().backward()
    fused = HashEmbedding(DIM, name="fused", optimizer=torch.optim.SGD)
    for params, error in ((fused.weight, ValueError), (hashed.tables[1].weight, BusyError)):
        with pytest.raises(error):
            optimizer.add_param_group({"params": [hashed.layers[1].weight, params]})
    assert len(optimizer.param_groups) == 1
    before = hashed.layers[1].weight.detach().clone()
    optimizer.step()
    other.step()
    assert torch.equal(hashed.layers[1].weight, before)
    assert [each.table.update_count for each in hashed.tables] == [1, 1]


@pytest.mark.parametrize("kind", get_args(optim.Optimizer))
def test_optimizers_of_our_own_update_as_they_do_in_backward(kind: Any) -> None:
    options = {"lr": 0.2, "clip_norm": 0.5}
    waiting = HashEmbedding(DIM, name="item")
    fused = HashEmbedding(DIM, name="item", optimizer=kind(**options))
    optimizer = RowOptimizer(waiting.parameters(), kind, **options)
    for rate in (0.2, 0.1, 0.1):
        fused.table.learning_rate = optimizer.param_groups[0]["lr"] = rate
        for module in (waiting, fused):
            (module(KEYS) - 1.0).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(waiting.table.lookup(KEYS), fused.table.lookup(KEYS))
    assert waiting.table.optimizer == fused.table.optimizer


def test_optimizers_of_our_own_train_tables_only() -> None:
    table = HashEmbedding(DIM)
    model = nn.Sequential(table, nn.Linear(DIM, 1))
    with pytest.raises(ValueError, match=r"FTRL trains tables only.*dense parameter \(1, 2\)"):
        RowOptimizer(model, optim.FTRL, lr=0.1)
    with pytest.raises(TypeError, match=r"takes a class.*RowOptimizer\(params, SGD, lr=0.1\)"):
        RowOptimizer(table, optim.SGD(lr=0.1))  # type: ignore[arg-type]


def test_only_what_changed_is_named() -> None:
    module = HashEmbedding(DIM, name="item")
    optimizer = RowOptimizer(module, torch.optim.Adam, lr=0.1)
    optimizer.param_groups[0].update(lr=0.2, eps=0.5)
    with pytest.raises(ValueError, match=r"is made, and eps 1e-08 is now 0.5; a scheduler"):
        optimizer.step()


def test_a_rate_is_seen_in_any_form() -> None:
    """A tensor that changes in place, a rate that somebody set in the table, another optimizer."""
    module = HashEmbedding(DIM, name="item")
    optimizer = RowOptimizer(module, torch.optim.SGD, lr=torch.tensor(0.5))

    def step() -> float:
        optimizer.zero_grad()
        before = module(KEYS).detach()
        module(KEYS).sum().backward()
        optimizer.step()
        return float((before - module.table.lookup(KEYS)).mean())

    assert step() == pytest.approx(0.5)
    optimizer.param_groups[0]["lr"].fill_(0.25)
    assert step() == pytest.approx(0.25)
    for rate in (0.125, 0.5, 0.5):
        optimizer.param_groups[0]["lr"] = rate
        assert step() == pytest.approx(rate)
    module.table.learning_rate = 3.0
    assert step() == pytest.approx(0.5)
    optimizer.zero_grad()
    module.table.set_optimizer(optim.SGD(lr=0.5, momentum=0.9))
    with pytest.raises(ValueError, match=r"momentum 0.9 is now 0"):
        step()


def test_hooks_see_one_step_of_tables_and_dense_parameters() -> None:
    seen: list[object] = []
    hooks = [
        register_optimizer_step_pre_hook(lambda which, *_: seen.append(which)),
        register_optimizer_step_post_hook(lambda which, *_: seen.append(which)),
    ]
    try:
        for model, make in zip(twins(), (RowOptimizer, torch.optim.SGD), strict=True):
            params = (model, torch.optim.SGD) if make is RowOptimizer else (model.parameters(),)
            optimizer = make(*params, lr=0.1)
            optimizer.register_step_post_hook(lambda *_: seen.append("own"))
            model.loss().backward()
            optimizer.step()
            assert seen == [optimizer, "own", optimizer]
            seen.clear()
    finally:
        for hook in hooks:
            hook.remove()


def test_gradients_stay_if_a_new_optimizer_is_refused() -> None:
    model, _ = twins()
    optimizer = RowOptimizer(model, torch.optim.SGD, lr=0.1)
    model.loss().backward()
    optimizer.step()
    model.tables[1](KEYS).sum().backward()
    before = [each.weight.grad.clone() for each in model.tables]
    with pytest.raises(BusyError, match=r"step\(\) or zero_grad\(\)"):
        RowOptimizer(model, torch.optim.Adagrad, lr=0.1)
    for each, grad in zip(model.tables, before, strict=True):
        assert torch.equal(each.weight.grad, grad)
    optimizer.step()
    RowOptimizer(model, torch.optim.Adagrad, lr=0.1)
    assert all(each.weight.grad is None for each in model.tables)
