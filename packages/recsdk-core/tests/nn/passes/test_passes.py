"""Lookups of one table in one backward pass, and passes that follow each other."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from recsdk_core.errors import BusyError, NonFiniteError
from recsdk_core.eviction import Evict
from recsdk_core.nn import HashEmbedding, HashEmbeddingBag, RowOptimizer, row_gradients

DIM = 2
KEYS = torch.arange(4)
passes = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=6)


@given(passes, st.integers(2, 3))
def test_accumulate_steps_counts_passes_and_not_lookups(drawn: Any, steps: int) -> None:
    """Beside a dense table whose loop steps once in so many passes; each lookup is of one key."""
    options: dict[str, Any] = {"optimizer": torch.optim.SGD, "optimizer_kwargs": {"lr": 0.1}}
    hashed, dense = HashEmbedding(DIM, accumulate_steps=steps, **options), nn.Embedding(4, DIM)
    hashed.table.upsert(KEYS, dense.weight.detach().clone())
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.1)
    for number, keys in enumerate(drawn, 1):
        for module in (hashed, dense):
            losses = [(module(torch.tensor([key])) - 1.0).square().sum() for key in keys]
            torch.stack(losses).sum().backward()
        if number % steps == 0:
            optimizer.step()
            optimizer.zero_grad()
        assert hashed.table.update_count == number // steps
        torch.testing.assert_close(hashed.table.lookup(KEYS), dense.weight.detach())


def test_a_pass_that_fails_does_not_stop_the_updates() -> None:
    def fail(grad: torch.Tensor) -> None:
        raise KeyError("on purpose")

    module = HashEmbedding(DIM, optimizer=torch.optim.SGD, accumulate_steps=2)
    leaf = torch.ones(1, requires_grad=True)
    for number in range(2):
        product = leaf * 1.0
        if number == 1:
            product.register_hook(fail)  # type: ignore[no-untyped-call]
            with pytest.raises(KeyError):
                (module(KEYS) * product).sum().backward()
        else:
            (module(KEYS) * product).sum().backward()
    module(KEYS).sum().backward()
    assert module.table.update_count == 1


def test_threads_lose_no_gradient() -> None:
    module = HashEmbedding(DIM)
    RowOptimizer(module, torch.optim.SGD)
    module(KEYS)

    def train() -> None:
        for number in range(50):
            module(KEYS).sum().backward()
            if number % 5 == 0:
                assert module.weight.grad is not None

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(3) as pool:
            for each in [pool.submit(train) for _ in range(3)]:
                each.result()
    finally:
        sys.setswitchinterval(before)
    assert module.weight.grad is not None
    assert (module.weight.grad == 150).all()


def test_waiting_gradients_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """When sums are made, the joined backwards are there once, and are those that may wait."""
    module = HashEmbedding(DIM)
    RowOptimizer(module, torch.optim.SGD)
    waiting: Any = module.weight.gradients
    waiting.most_bytes, sums_of, seen = 1000, row_gradients._sums_of, []

    def watched(joined: Any, shares_rows: bool) -> Any:
        assert waiting._parts == [joined]
        assert waiting._sums is None
        seen.append(joined.num_bytes)
        return sums_of(joined, shares_rows)

    monkeypatch.setattr(row_gradients, "_sums_of", watched)
    for _ in range(100):
        module(KEYS).sum().backward()
    one = waiting._parts[0].num_bytes
    assert 1000 < max(seen) <= 1000 + 2 * one
    assert (module.weight.grad == 100).all()


@pytest.mark.parametrize("bad", [0, 1])
def test_a_step_that_raises_changes_no_table(bad: int) -> None:
    tables = [HashEmbedding(DIM, on_nonfinite="raise") for _ in range(2)]
    optimizer = RowOptimizer(nn.ModuleList(tables), torch.optim.SGD, lr=0.1)
    before = [each(KEYS).detach() for each in tables]
    optimizer.param_groups[0]["lr"] = 0.2
    for number, each in enumerate(tables):
        (each(KEYS).sum() * (float("inf") if number == bad else 1.0)).backward()
    with pytest.raises(NonFiniteError):
        optimizer.step()
    for each, rows in zip(tables, before, strict=True):
        assert torch.equal(each.table.lookup(KEYS), rows)
        assert (each.table.update_count, each.table.learning_rate) == (0, 0.1)


@pytest.mark.parametrize("how", [copy.deepcopy, pickle.dumps])
def test_an_optimizer_is_not_copied(how: Callable[[Any], Any]) -> None:
    module = HashEmbedding(DIM)
    optimizer = RowOptimizer(module, torch.optim.SGD)
    with pytest.raises(TypeError, match=r"make a RowOptimizer over the copy.*load_state_dict"):
        how((module, optimizer))


def test_dense_state_begins_as_the_class_makes_it() -> None:
    table, dense = HashEmbedding(DIM), nn.Linear(DIM, 1)
    params = [*table.parameters(), *dense.parameters()]
    optimizer = RowOptimizer(params, torch.optim.Adagrad, initial_accumulator_value=0.5)
    assert all((optimizer.state[each]["sum"] == 0.5).all() for each in dense.parameters())


def test_a_kept_graph_takes_more_backwards() -> None:
    """Beside a dense table: with and without a step and zero_grad in between."""
    hashed, dense = HashEmbedding(DIM), nn.Embedding(4, DIM)
    hashed.table.upsert(KEYS, dense.weight.detach().clone())
    options = {"lr": 0.1, "momentum": 0.5}
    optimizers = [RowOptimizer(hashed, torch.optim.SGD, **options)]
    optimizers.append(torch.optim.SGD(dense.parameters(), **options))
    for module, optimizer in zip((hashed, dense), optimizers, strict=True):
        vectors = module(torch.tensor([0, 1, 1]))
        one, other = vectors.exp().sum(), vectors.square().sum()
        one.backward(retain_graph=True)
        other.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        other.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        if module is hashed:
            with pytest.raises(BusyError):  # the graph has the rows
                module.table.check_idle()
        one.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(hashed.table.lookup(KEYS)[:2], dense.weight.detach()[:2])
    hashed.table.check_idle()


def test_a_kept_graph_keeps_its_rows_for_itself() -> None:
    """Another key may have the row of one that left only when the graph has gone."""
    module = HashEmbedding(DIM, max_rows=2, eviction=Evict.lru())
    optimizer = RowOptimizer(module, torch.optim.SGD, lr=1.0)
    old = module(torch.tensor([0, 1]))
    old.sum().backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    new = module(torch.tensor([2, 3])).detach()
    (old * 100).sum().backward()
    optimizer.step()
    assert torch.equal(module.table.lookup(torch.tensor([2, 3])), new)


def test_what_a_second_backward_cannot_do_is_said() -> None:
    fused, waiting = HashEmbedding(DIM, optimizer=torch.optim.SGD), HashEmbeddingBag(DIM)
    loss = fused(KEYS).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="has run already.*if a RowOptimizer trains"):
        loss.backward()
    assert fused.table.update_count == 1
    optimizer = RowOptimizer(waiting, torch.optim.SGD)
    weights = torch.ones(1, 4, requires_grad=True)
    loss = waiting(KEYS.reshape(1, 4), per_sample_weights=weights).sum()
    loss.backward(retain_graph=True)
    once = weights.grad.clone()  # type: ignore[union-attr]
    loss.backward(retain_graph=True)
    torch.testing.assert_close(weights.grad, 2 * once)
    optimizer.step()
    with pytest.raises(RuntimeError, match="were updated between two backwards"):
        loss.backward()


def test_gradients_that_wait_are_not_lost_by_a_load() -> None:
    module, dense = HashEmbedding(DIM, name="item"), nn.Linear(DIM, 1)
    optimizer = RowOptimizer([*module.parameters(), *dense.parameters()], torch.optim.SGD)
    model = nn.Sequential(module, dense)
    model(KEYS).sum().backward()
    saved = model.state_dict()
    with pytest.raises(RuntimeError, match=r"'item' wait for a RowOptimizer.*step or zero_grad"):
        model.load_state_dict(saved, strict=False)
    optimizer.step()
    model.load_state_dict(saved)  # what was applied is not lost
    assert torch.equal(module.table.lookup(saved["0.keys"]), saved["0.weight"])
    model(KEYS).sum().backward()
    optimizer.zero_grad()
    model.load_state_dict(saved)
