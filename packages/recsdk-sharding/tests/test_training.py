"""Sharded training equals unsharded training and torch.optim, at any number of ranks.

Tolerances: floats are added in another order, a few units of the last place a step. Compared are
values of size about 1 after some steps, so 2e-5 absolute and relative is ten times what was seen.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import on_ranks
import pytest
import reference
import torch
from rank_pool import RankPool
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from worlds import Setup, merged

TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}
STATE_TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}
"""Sums of squared gradients: a square doubles what earlier steps left, and they may grow."""

SETUPS = {
    "sgd": Setup(torch.optim.SGD, {"lr": 0.1}),
    "adagrad": Setup(torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-4}),
    "adagrad_weighted": Setup(torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-4}, weighted=True),
    "rowwise_adagrad": Setup(RowWiseAdagrad, {"lr": 0.1, "eps": 1e-4}),
    "adam": Setup(torch.optim.Adam, {"lr": 0.02, "eps": 1e-4}),
    "adam_defaults": Setup(torch.optim.Adam, {}),
}
SIZES = [[5, 2, 0, 4], [4, 4, 4, 4], [0, 3, 3, 1], [6, 1, 2, 0], [0, 0, 0, 0], [3, 3, 3, 3]]


def sizes_for(world_size: int) -> list[list[int]]:
    """Batch sizes of every step and rank: uneven, empty on some ranks, empty on all."""
    return [row[:world_size] for row in SIZES]


def assert_rows_close(rows: dict[str, Any], expected: dict[str, Any]) -> None:
    assert {n: set(r) for n, r in rows.items()} == {n: set(r) for n, r in expected.items()}
    for name, by_key in rows.items():
        for key, (weight, state) in by_key.items():
            other, other_state = expected[name][key]
            np.testing.assert_allclose(weight, other, **TOLERANCE)
            for field, value in state.items():
                np.testing.assert_allclose(value, other_state[field], **STATE_TOLERANCE)


def assert_outputs_close(results: list[dict[str, Any]], expected: list[list[Any]]) -> None:
    for rank, result in enumerate(results):
        for step, out in enumerate(result["outputs"]):
            np.testing.assert_allclose(out, expected[step][rank], **TOLERANCE)


def assert_dense_close(dense: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(dense) == set(expected)
    for name, value in dense.items():
        np.testing.assert_allclose(value, expected[name], **TOLERANCE)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", SETUPS)
def test_sharded_training_equals_the_unsharded_module(
    ranks: RankPool, name: str, world_size: int
) -> None:
    setup, sizes = SETUPS[name], sizes_for(world_size)
    results = ranks.run(world_size, on_ranks.train, setup, sizes)
    expected = reference.train_unsharded(setup, sizes)
    assert_rows_close(merged([r["rows"] for r in results]), expected["rows"])
    assert_outputs_close(results, expected["outputs"])
    for result in results:
        assert_dense_close(result["dense"], expected["dense"])
        assert result["has_grad"] == []
        assert set(result["counts"].values()) == {len(sizes)}


@pytest.mark.parametrize("name", SETUPS)
def test_unsharded_training_equals_torch_optim(name: str) -> None:
    setup, sizes = SETUPS[name], sizes_for(2)
    found = reference.train_unsharded(setup, sizes)
    initial = reference.initial_rows(setup, found["rows"])
    expected = reference.train_with_torch(setup, sizes, initial)
    assert_dense_close(found["dense"], expected["dense"])
    for step, parts in enumerate(found["outputs"]):
        for rank, out in enumerate(parts):
            np.testing.assert_allclose(out, expected["outputs"][step][rank], **TOLERANCE)
    for table, rows in found["rows"].items():
        for key, (weight, _) in rows.items():
            np.testing.assert_allclose(weight, expected["weights"][table][key], **TOLERANCE)
