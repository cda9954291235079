"""l2 beside the penalty on the weight of nn.Embedding."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from recsdk_core import Default
from recsdk_core.nn import HashEmbedding, HashEmbeddingBag, RowOptimizer, l2, row_gradients

NUM_KEYS, DIM = 5, 3
KEYS = torch.arange(NUM_KEYS)
batches = st.lists(st.lists(st.integers(0, NUM_KEYS - 1), min_size=1, max_size=4), max_size=4)


@given(batches, st.booleans(), st.booleans())
def test_equals_a_penalty_on_a_dense_weight(
    drawn: list[list[int]], last_batch: bool, is_adagrad: bool
) -> None:
    """On all rows, or on those of the batch."""
    hashed, dense = HashEmbedding(DIM), nn.Embedding(NUM_KEYS, DIM)
    hashed.table.upsert(KEYS, dense.weight.detach().clone())
    kind: Any = torch.optim.Adagrad if is_adagrad else torch.optim.SGD
    optimizers = [RowOptimizer(hashed, kind, lr=0.1), kind(dense.parameters(), lr=0.1)]
    for batch in drawn:
        keys, losses = torch.tensor(batch), []
        rows = keys.unique() if last_batch else KEYS
        for module, optimizer in zip((hashed, dense), optimizers, strict=True):
            optimizer.zero_grad()
            loss = (module(keys) - 1.0).square().sum()
            if module is hashed:
                penalty = l2(nn.ModuleList([hashed]), last_batch=last_batch)
            else:
                penalty = dense.weight[rows].square().sum()
            losses.append((loss + 0.3 * penalty).detach())
            (loss + 0.3 * penalty).backward()
            optimizer.step()
        torch.testing.assert_close(losses[0], losses[1])
        torch.testing.assert_close(hashed.table.lookup(KEYS), dense.weight.detach())


def test_evaluation_in_between_and_reused_memory_do_not_change_the_batch() -> None:
    module = HashEmbeddingBag(DIM, padding_idx=4)
    RowOptimizer(module, torch.optim.SGD, lr=0.1)
    keys = torch.tensor([[0, 1, 4, 1]])
    module(keys)
    expected = module.table.lookup(torch.tensor([0, 1])).square().sum()
    keys.fill_(3)
    module.eval()
    module(KEYS.reshape(1, -1))
    torch.testing.assert_close(l2(module).detach(), expected)
    assert len(module.table) == 2


def test_lookups_of_one_forward_are_one_batch() -> None:
    module = HashEmbedding.from_pretrained(KEYS, torch.ones(NUM_KEYS, DIM), freeze=False)
    optimizer = RowOptimizer(module, torch.optim.SGD, lr=0.1)
    for _ in range(2):
        loss = module(KEYS[:2]).sum() + module(KEYS[1:3]).sum()
        assert l2(module) == l2(module) == 3 * DIM  # asking ends no batch, the next forward does
        loss.backward()
        optimizer.zero_grad()
    module(KEYS[:1])
    assert l2(module) == DIM


def test_forwards_that_do_not_train_gather_no_keys() -> None:
    module = HashEmbedding.from_pretrained(KEYS, torch.ones(NUM_KEYS, DIM), freeze=False)
    RowOptimizer(module, torch.optim.SGD, lr=0.1)
    with torch.no_grad():
        for key in range(NUM_KEYS):
            module(KEYS[key:])
    assert l2(module) == DIM  # the last of them
    module(KEYS[:2])
    with torch.no_grad():
        module(KEYS[2:3])  # joins the batch that has begun
    module(KEYS[1:2])
    assert l2(module) == 3 * DIM


def test_forwards_that_nobody_ends_keep_a_key_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_gradients, "_MOST_KEYS", 10)
    module = HashEmbedding.from_pretrained(KEYS, torch.ones(NUM_KEYS, DIM), freeze=False)
    RowOptimizer(module, torch.optim.SGD, lr=0.1)
    for _ in range(20):
        module(KEYS)
    gradients = module.weight.gradients
    assert l2(module) == NUM_KEYS * DIM
    assert len(gradients.keys_of_last_batch()) < 30


def test_refused_keys_and_models_without_tables_add_nothing() -> None:
    module = HashEmbedding(DIM, max_rows=1, default=Default.constant(3.0))
    RowOptimizer(module, torch.optim.SGD, lr=0.1)
    module(KEYS)
    expected = module.table.lookup(KEYS[:1]).square().sum()
    torch.testing.assert_close(l2(module).detach(), expected)
    assert l2(nn.Linear(2, 2)) == 0
    assert l2(HashEmbedding(DIM).requires_grad_(False), last_batch=False) == 0


def test_what_is_refused() -> None:
    waiting = HashEmbedding(DIM, name="item")
    RowOptimizer(waiting, torch.optim.SGD, lr=0.1)
    with pytest.raises(RuntimeError, match="'item' had no forward in training mode"):
        l2(waiting)
    with pytest.raises(RuntimeError, match="'item' is a copy of one"):
        l2(copy.deepcopy(waiting), last_batch=False)
    with pytest.raises(RuntimeError, match="nobody said how to train it"):
        l2(HashEmbedding(DIM))
    fused = HashEmbedding(DIM, name="item", optimizer=torch.optim.SGD)
    fused(KEYS)
    with pytest.raises(ValueError, match="'item': l2 would be an update of its own.*weight_decay"):
        l2(fused)
    with torch.no_grad():
        assert l2(fused) > 0
    assert l2(fused.requires_grad_(False)) > 0
