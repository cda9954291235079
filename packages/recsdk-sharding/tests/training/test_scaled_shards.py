"""A sharded table is not trained by a loss that a GradScaler has scaled, on any rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import scaled_on_ranks
import torch
from comparing import assert_identical
from rank_pool import RankPool
from worlds import Setup

SETUP = Setup(torch.optim.Adagrad, {"lr": 0.1})


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_scaled_loss_is_refused_on_all_ranks(ranks: RankPool, world_size: int) -> None:
    check(ranks, SETUP, world_size)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_scaled_loss_is_refused_on_all_npus(npus: RankPool, world_size: int) -> None:
    check(npus, replace(SETUP, device="npu", options={"num_rows": 100}), world_size)


def check(pool: RankPool, setup: Setup, world_size: int) -> None:
    for found in pool.run(world_size, scaled_on_ranks.scaled_step, setup):
        assert "a GradScaler has scaled the loss" in found["message"]
        assert_identical(found["after"], found["before"])
        assert found["counts"] == [{1}, {1}]
