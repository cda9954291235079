"""Pooling against torch.nn.EmbeddingBag: values, gradients, empty bags, mixed widths.

Shape letters: N keys, B bags, D row width.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from recsdk_core import init, optim
from recsdk_core.nn import (
    FeatureBags,
    HashEmbedding,
    HashEmbeddingBag,
    TableBags,
    gather_features,
    pool_features,
)
from recsdk_core.testing import bags

Mode = Literal["sum", "mean"]
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
DIMS = st.sampled_from([1, 2, 7, 16, 40])
EMPTY = (np.zeros(0, np.int64), np.zeros(1, np.int64), None)


def torch_bag(
    module: HashEmbeddingBag, keys: torch.Tensor
) -> tuple[torch.nn.EmbeddingBag, torch.Tensor]:
    """An nn.EmbeddingBag with the same rows, and the dense index of each key."""
    unique, index = keys.unique(return_inverse=True)
    weight = module.table.find_or_insert(unique)
    bag = torch.nn.EmbeddingBag(
        max(len(unique), 1), module.table.dim, mode=module.mode, include_last_offset=True
    )
    with torch.no_grad():
        bag.weight[: len(unique)] = weight
    return bag, index


def as_tensors(batch: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    keys, offsets, weights = batch
    return (
        torch.from_numpy(keys),
        torch.from_numpy(offsets),
        None if weights is None else torch.from_numpy(weights),
    )


@given(batch=bags(weighted=False), dim=DIMS, mode=st.sampled_from(["sum", "mean"]))
@example(batch=EMPTY, dim=3, mode="mean")
def test_forward_and_backward_equal_embedding_bag(batch: Any, dim: int, mode: Mode) -> None:
    keys, offsets, _ = as_tensors(batch)
    module = HashEmbeddingBag(
        dim,
        mode=mode,
        include_last_offset=True,
        initializer=init.Normal(),
        optimizer=optim.SGD(lr=0.5),
    )
    peer, index = torch_bag(module, keys)
    out, expected = module(keys, offsets), peer(index, offsets)
    torch.testing.assert_close(out, expected, **TOLERANCE)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    if out.numel():
        expected.backward(upstream)
        torch.optim.SGD(peer.parameters(), lr=0.5).step()
    unique = keys.unique()
    trained = peer.weight.detach()[: len(unique)]
    torch.testing.assert_close(module.table.lookup(unique), trained, **TOLERANCE)


@given(batch=bags(weighted=True), dim=DIMS)
def test_weighted_sum_equals_embedding_bag_gradients_of_weights_too(batch: Any, dim: int) -> None:
    keys, offsets, weights = as_tensors(batch)
    assert weights is not None
    module = HashEmbeddingBag(
        dim, include_last_offset=True, initializer=init.Normal(), optimizer=optim.SGD()
    )
    peer, index = torch_bag(module, keys)
    mine, theirs = weights.clone().requires_grad_(), weights.clone().requires_grad_()
    out, expected = module(keys, offsets, mine), peer(index, offsets, theirs)
    torch.testing.assert_close(out, expected, **TOLERANCE)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    if out.numel():
        expected.backward(upstream)
        torch.testing.assert_close(mine.grad, theirs.grad, **TOLERANCE)


@given(batch=bags(weighted=True), dim=DIMS)
def test_weighted_mean_divides_by_the_sum_of_weights(batch: Any, dim: int) -> None:
    keys, offsets, weights = as_tensors(batch)
    assert weights is not None
    module = HashEmbeddingBag(
        dim, mode="mean", include_last_offset=True, initializer=init.Normal(), optimizer=optim.SGD()
    )
    out = module(keys, offsets, weights)
    for b, (begin, end) in enumerate(pairwise(offsets)):
        rows_ND, part = module.table.lookup(keys[begin:end]), weights[begin:end]
        total = part.sum()
        wanted = torch.zeros(dim) if total == 0 else (part[:, None] * rows_ND).sum(0) / total
        torch.testing.assert_close(out[b], wanted, **TOLERANCE)


@given(drawn=st.lists(st.tuples(*[st.integers(-9, 9)] * 3), max_size=4))
def test_two_dimensional_keys_are_bags_of_equal_length(drawn: list[tuple[int, int, int]]) -> None:
    module = HashEmbeddingBag(4, mode="mean", optimizer=optim.SGD())
    keys = torch.tensor(drawn, dtype=torch.int64).reshape(-1, 3)
    offsets = torch.arange(len(keys)) * 3
    assert torch.equal(module(keys), module(keys.reshape(-1), offsets))


@given(batches=st.lists(bags(max_bags=4, weighted=False), min_size=1, max_size=4), data=st.data())
def test_features_of_mixed_widths_in_one_node_equal_modules_of_their_own(
    batches: list[Any], data: st.DataObject
) -> None:
    num_bags = min(len(offsets) - 1 for _, offsets, _ in batches)
    dims = [data.draw(DIMS) for _ in batches]
    together = [
        HashEmbedding(dim, name=f"t{i}", optimizer=optim.SGD()) for i, dim in enumerate(dims)
    ]
    apart = [
        HashEmbeddingBag(dim, name=f"t{i}", include_last_offset=True, optimizer=optim.SGD())
        for i, dim in enumerate(dims)
    ]
    entries, expected, column = [], [], 0
    for batch, dim, module, own in zip(batches, dims, together, apart, strict=True):
        keys, offsets, _ = as_tensors(batch)
        offsets = offsets[: num_bags + 1].clone()
        keys = keys[: offsets[-1]]
        rows, outcomes = module.table.map(keys, insert=True)
        feature = FeatureBags(rows=rows, outcomes=outcomes, offsets=offsets, column=column)
        entries.append(TableBags(table=module.table, features=[feature]))
        expected.append(own(keys, offsets))
        column += dim
    out = pool_features(entries, num_bags, column, together[0].weight)
    wanted = torch.cat(expected, dim=1)
    assert torch.equal(out, wanted)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    wanted.backward(upstream)
    for module, own in zip(together, apart, strict=True):
        for mine, theirs in zip(module.table.export(), own.table.export(), strict=True):
            np.testing.assert_array_equal(mine.keys, theirs.keys)
            np.testing.assert_array_equal(mine.weights, theirs.weights)


@given(batch=bags(weighted=False), dim=DIMS)
def test_gathered_bags_equal_pooled_bags(batch: Any, dim: int) -> None:
    keys, offsets, _ = as_tensors(batch)
    module = HashEmbedding(dim, optimizer=optim.SGD())
    rows, outcomes = module.table.map(keys, insert=True)
    feature = FeatureBags(rows=rows, outcomes=outcomes, offsets=offsets, pooling="mean")
    twice = TableBags(table=module.table, features=[feature, feature])
    gathered = gather_features([twice], module.weight)
    once = TableBags(table=module.table, features=[feature])
    pooled = pool_features([once], len(offsets) - 1, dim, module.weight)
    assert torch.equal(gathered, torch.cat([pooled, pooled]))
