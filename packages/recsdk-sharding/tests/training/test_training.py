"""Sharded training equals unsharded training and torch.optim, at any number of ranks."""

from __future__ import annotations

import numpy as np
import on_ranks
import pytest
import reference
from comparing import TOLERANCE, assert_dense_close, assert_outputs_close, assert_rows_close
from rank_pool import RankPool
from setups import SETUPS, sizes_for
from worlds import merged

from sampling import crossed


@pytest.mark.parametrize(("name", "world_size"), crossed(SETUPS, (1, 2, 4), size=9))
def test_sharded_training_equals_the_unsharded_module(
    ranks: RankPool, name: str, world_size: int
) -> None:
    setup, sizes = SETUPS[name], sizes_for(world_size)
    results = ranks.known(world_size, on_ranks.train, setup, sizes)
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
    for parts, others in zip(found["outputs"], expected["outputs"], strict=True):
        for out, other in zip(parts, others, strict=True):
            np.testing.assert_allclose(out, other, **TOLERANCE)
    for table, rows in found["rows"].items():
        for key, (weight, _) in rows.items():
            np.testing.assert_allclose(weight, expected["weights"][table][key], **TOLERANCE)
