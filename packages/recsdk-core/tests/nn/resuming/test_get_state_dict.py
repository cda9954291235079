"""torch.distributed.checkpoint.state_dict, which names entries by attributes of modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from recsdk_core.nn import HashEmbedding, RowOptimizer

NUM_KEYS, DIM = 6, 3
KEYS = torch.arange(NUM_KEYS)


def make(kind: Any = torch.optim.Adam) -> tuple[nn.Module, RowOptimizer]:
    model = nn.Sequential(HashEmbedding(DIM), nn.Linear(DIM, 1))
    return model, RowOptimizer(model, kind, lr=0.1)


def train(model: nn.Module, optimizer: RowOptimizer) -> None:
    for number in range(3):
        optimizer.zero_grad()
        model(KEYS[number:]).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_state_goes_through_a_checkpoint(kind: Any, is_flat: bool, tmp_path: Path) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    saved, resumed = make(kind), make(kind)
    train(*saved)
    names = ("model", "optimizer")
    state = dict(zip(names, get_state_dict(*saved, options=options), strict=True))
    dcp.save(state, checkpoint_id=tmp_path / "0")
    loaded = dict(zip(names, get_state_dict(*resumed, options=options), strict=True))
    dcp.load(loaded, checkpoint_id=tmp_path / "0")
    set_state_dict(
        *resumed,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
        options=options,
    )
    for each in (saved, resumed):
        train(*each)
    one, other = (each[0].state_dict() for each in (saved, resumed))
    assert list(one) == list(other)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert torch.equal(saved[0][1].weight, resumed[0][1].weight)


def test_state_of_an_optimizer_that_has_not_stepped_changes_no_row() -> None:
    model, optimizer = make()
    model(KEYS)
    before = model[0].table.lookup(KEYS)
    _, state = get_state_dict(model, optimizer)
    assert set(state["state"]) == {"0.weight", "1.weight", "1.bias"}
    assert torch.equal(model[0].table.lookup(KEYS), before)
    assert model[0].table.update_count == 0
