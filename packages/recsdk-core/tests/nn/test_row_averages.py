"""torch's AveragedModel averages rows of tables as it averages those of nn.Embedding."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from recsdk_core.nn import HashEmbedding, HashEmbeddingBag, RowOptimizer

NUM_KEYS, DIM = 6, 3
KEYS = torch.arange(NUM_KEYS)
AVERAGES: dict[str, dict[str, Any]] = {
    "swa": {},
    "ema": {"avg_fn": get_ema_avg_fn(0.9)},
    "many": {"multi_avg_fn": get_ema_multi_avg_fn(0.5)},
}


def make_pair() -> tuple[HashEmbedding, nn.Embedding]:
    """A hash module without rows, and a dense twin that has the first rows of all keys."""
    hashed, dense = HashEmbedding(DIM), nn.Embedding(NUM_KEYS, DIM)
    first = copy.deepcopy(hashed.table).find_or_insert(KEYS)
    with torch.no_grad():
        dense.weight.copy_(first)
    return hashed, dense


def train(model: Any, optimizer: torch.optim.Optimizer, keys: list[int]) -> None:
    optimizer.zero_grad()
    (model(torch.tensor(keys, dtype=torch.int64)) - 0.5).square().sum().backward()
    optimizer.step()


@given(st.lists(st.lists(st.integers(0, NUM_KEYS - 1), max_size=4), max_size=6), st.data())
@pytest.mark.parametrize("how", AVERAGES)
def test_rows_are_averaged_as_dense_ones(how: str, steps: list[list[int]], data: Any) -> None:
    """Ids that show up between averages had their first rows before."""
    hashed, dense = make_pair()
    models: list[Any] = [nn.Sequential(hashed), nn.Sequential(dense)]
    optimizers = [
        RowOptimizer(hashed, torch.optim.SGD, lr=0.1),
        torch.optim.SGD(dense.parameters(), lr=0.1),
    ]
    averaged = [AveragedModel(model, **AVERAGES[how]) for model in models]
    for keys in steps:
        is_averaged = data.draw(st.booleans())
        for model, optimizer, average in zip(models, optimizers, averaged, strict=True):
            train(model, optimizer, keys)
            if is_averaged:
                average.update_parameters(model)
    table = averaged[0].module[0].table
    torch.testing.assert_close(
        table.find_or_insert(KEYS), averaged[1].module[0].weight.detach(), rtol=1e-5, atol=1e-6
    )
    assert averaged[0].n_averaged == averaged[1].n_averaged


def test_rows_that_are_gone_leave_the_average_and_state_is_kept_by_state_dict() -> None:
    model = nn.Sequential(HashEmbeddingBag(DIM, optimizer=torch.optim.Adagrad))
    model(KEYS.reshape(1, -1)).sum().backward()
    average = AveragedModel(model)
    average.update_parameters(model)
    model[0].table.erase(KEYS[:2])
    average.update_parameters(model)
    assert sorted(average.module[0].state_dict()["keys"].tolist()) == KEYS[2:].tolist()
    other = AveragedModel(nn.Sequential(HashEmbeddingBag(DIM, optimizer=torch.optim.Adagrad)))
    other.load_state_dict(average.state_dict())
    assert torch.equal(other.module[0].table.lookup(KEYS), average.module[0].table.lookup(KEYS))
    assert other.n_averaged == 2


def test_models_that_differ_are_refused() -> None:
    average = AveragedModel(nn.Sequential(HashEmbedding(DIM)))
    with pytest.raises(ValueError, match="argument 2 is longer"):
        average.update_parameters(nn.Sequential(HashEmbedding(DIM), HashEmbedding(DIM)))
