"""Clipping of all gradients clips those of dense layers as if there were no tables."""

from __future__ import annotations

from dataclasses import replace

import clipping_on_ranks
import numpy as np
import pytest
import torch
from comparing import assert_identical
from plans import Spec
from rank_pool import RankPool
from worlds import Setup

from sampling import crossed

SETUP = Setup(torch.optim.Adagrad, {"lr": 0.1})
OF_ALL_TYPES: dict[str, Spec] = {
    "user": ("data_parallel",),
    "genre": ("column_wise", [(1, 0), (2, 1)]),
    "other": ("table_wise", 1),
}
SETUPS = {
    "by rows": SETUP,
    "of all types": replace(SETUP, plan=OF_ALL_TYPES),
    "sequences": replace(SETUP, is_sequence=True),
}
WAYS = ("plain", "TrainPipelineSparseDist")
CASES = crossed(SETUPS, WAYS, ("norm", "value"), ("torchrec", "all"), size=4)


@pytest.mark.parametrize(("name", "loop", "how", "which"), CASES)
def test_tables_are_not_clipped(
    ranks: RankPool, name: str, loop: str, how: str, which: str
) -> None:
    check(ranks, SETUPS[name], loop, how, which)


@pytest.mark.parametrize(("name", "loop", "how", "which"), CASES)
def test_tables_on_npus_are_not_clipped(
    npus: RankPool, name: str, loop: str, how: str, which: str
) -> None:
    setup = replace(SETUPS[name], device="npu", options={"num_rows": 100})
    check(npus, setup, loop, how, which)


def check(pool: RankPool, setup: Setup, loop: str, how: str, which: str) -> None:
    found = pool.run(2, clipping_on_ranks.train, setup, loop, how, which)
    expected = pool.run(2, clipping_on_ranks.train, setup, loop, how, "dense")
    free = pool.run(2, clipping_on_ranks.train, setup, loop, "none", "dense")
    for one, clipped, other in zip(found, expected, free, strict=True):
        assert one["with gradients"] == []
        assert_identical(one, clipped)
        assert not np.array_equal(one["outputs"][-1], other["outputs"][-1])
