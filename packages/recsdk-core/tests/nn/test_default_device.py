"""Where torch makes tensors on a device by default, tables still work on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from recsdk_core import init, optim
from recsdk_core.nn import HashEmbedding, HashEmbeddingBag, RowOptimizer, l2

KEYS = torch.tensor([3, -3, 7, 3, 5, 7])
OFFSETS = torch.tensor([0, 2, 2])
WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 3.0, -1.0, 0.25])
OTHERWISE: AbstractContextManager[Any] = torch.device("meta")
"""What is made there has no numbers: whatever takes some of it raises."""
CASES = st.fixed_dictionaries(
    {
        "mode": st.sampled_from(["sum", "mean", "max"]),
        "padding_idx": st.sampled_from([None, 7]),
        "weights": st.sampled_from(["none", "given", "learned"]),
        "accumulate_steps": st.sampled_from([1, 2]),
        "scales": st.booleans(),
        "optimizer": st.sampled_from(["fused", "of rows"]),
        "penalty": st.sampled_from(["none", "all rows", "last batch"]),
    }
).filter(
    lambda case: (
        not (case["weights"] != "none" and case["mode"] != "sum")
        and not (case["scales"] and case["mode"] == "max")
        and not (case["accumulate_steps"] == 2 and case["optimizer"] == "of rows")
        and not (case["penalty"] != "none" and case["optimizer"] == "fused")
    )
)


def trained(under: Callable[[], AbstractContextManager[Any]], **case: Any) -> Iterator[Any]:
    """What a module gives and has, whose calls are made under a context."""
    is_fused = case["optimizer"] == "fused"
    module = HashEmbeddingBag(
        4,
        name="a",
        mode=case["mode"],
        padding_idx=case["padding_idx"],
        accumulate_steps=case["accumulate_steps"],
        scale_grad_by_freq=case["scales"],
        initializer=init.Normal(),
        optimizer=optim.SGD(lr=0.5) if is_fused else None,
    )
    optimizer = None if is_fused else RowOptimizer(module, torch.optim.SGD, lr=0.5)
    for _ in range(2):
        weights = None
        if case["weights"] != "none":
            weights = WEIGHTS.clone().requires_grad_(case["weights"] == "learned")
        with under():
            pooled = module(KEYS, OFFSETS, weights)
            loss = pooled.square().sum()
            if case["penalty"] != "none":
                loss = loss + 0.1 * l2(module, last_batch=case["penalty"] == "last batch")
            loss.backward()
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
        yield pooled.detach().numpy()
        if weights is not None and weights.grad is not None:
            yield weights.grad.numpy()
    with under():
        yield module.eval()(KEYS, OFFSETS).detach().numpy()
    for batch in module.table.export():
        yield batch.weights


@given(case=CASES)
def test_bags_work_on_the_host(case: dict[str, Any]) -> None:
    found = list(trained(lambda: OTHERWISE, **case))
    expected = list(trained(nullcontext, **case))
    assert len(found) == len(expected)
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(own, other)


def test_embeddings_work_on_the_host() -> None:
    def run(module: nn.Module) -> torch.Tensor:
        found: torch.Tensor = module(KEYS)
        found.square().sum().backward()
        return found.detach()

    make = partial(HashEmbedding, 4, name="a", padding_idx=7, optimizer=optim.SGD(lr=0.5))
    found, expected = make(), make()
    for _ in range(2):
        with OTHERWISE:
            own = run(found)
        assert torch.equal(own, run(expected))
