"""What a plain module cannot do is refused by name, and leaves the table as it was."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from recsdk_core import optim
from recsdk_core.nn import HashEmbedding, HashEmbeddingBag

KEYS = torch.tensor([[5, 6], [-1, 5]])
REFUSED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "trace": (lambda model: torch.jit.trace(model, (KEYS,)), "torch.jit.trace cannot record Hash"),
    "onnx": (
        lambda model: torch.onnx.export(model, (KEYS,), io.BytesIO(), dynamo=False),
        r"torch.onnx.export\(dynamo=False\) cannot record Hash.*found by key while it runs",
    ),
    "script": (torch.jit.script, "torch.jit.script cannot record Hash"),
    "share_memory": (nn.Module.share_memory, "share_memory cannot share them"),
}


@pytest.mark.filterwarnings("ignore:You are using the legacy TorchScript-based ONNX export")
@pytest.mark.parametrize("kind", [HashEmbedding, HashEmbeddingBag])
@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("what", sorted(REFUSED))
def test_what_would_go_wrong_silently_is_refused(
    kind: type[HashEmbedding | HashEmbeddingBag], is_inside: bool, what: str
) -> None:
    module = kind(4, name="item", optimizer=optim.SGD())
    model = nn.Sequential(module, nn.Linear(4, 1)) if is_inside else module
    call, message = REFUSED[what]
    with pytest.raises(RuntimeError, match=message):
        call(model)
    assert len(module.table) == 0
    model(KEYS).sum().backward()
    assert len(module.table) == 3


def test_a_table_that_nobody_trains_says_both_ways() -> None:
    module = HashEmbedding(4)
    module.eval()(KEYS)
    with torch.no_grad():
        module.train()(KEYS)
    before = module.table.lookup(KEYS.reshape(-1))
    vectors = module(KEYS)
    with pytest.raises(RuntimeError, match="pass optimizer= to its module.*make a RowOptimizer"):
        vectors.sum().backward()
    del vectors
    assert torch.equal(module.table.lookup(KEYS.reshape(-1)), before)
    module.table.set_optimizer(optim.SGD())  # what it would be by default, but said
    for each in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        each(KEYS).sum().backward()
        assert each.table.update_count == 1
    for untold in (HashEmbedding(4), copy.deepcopy(HashEmbedding(4))):
        with pytest.raises(RuntimeError, match="nobody said how to train it"):
            pickle.loads(pickle.dumps(untold))(KEYS).sum().backward()


def test_a_frozen_table_needs_no_optimizer() -> None:
    module = HashEmbeddingBag(4)
    module.weight.requires_grad_(False)
    weights = torch.ones(2, 2, requires_grad=True)
    module(KEYS, per_sample_weights=weights).sum().backward()
    assert weights.grad is not None
