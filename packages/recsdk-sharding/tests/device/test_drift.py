"""Over many steps a device drifts from the cpu no further than one rounding drifts by itself."""

from __future__ import annotations

from typing import Any

import drift_on_ranks
import numpy as np
import pytest
import torch
from rank_pool import RankPool
from setups import on_npu
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from worlds import Setup

NUM_STEPS = 40
SIZES = [[8]] * NUM_STEPS
EPSILON = float(np.finfo(np.float32).eps)
LARGEST_RATIO = 8
"""Of the device's distance over a nudged run's: the two round in different places."""


def furthest(run: list[np.ndarray], base: list[np.ndarray]) -> np.ndarray:
    """The largest distance of an output, by step."""
    return np.array([np.abs(a - b).max() for a, b in zip(run, base, strict=True)])


@pytest.mark.parametrize(
    ("optimizer", "arguments"),
    [(RowWiseAdagrad, {"lr": 0.1, "eps": 1e-8}), (torch.optim.Adam, {"lr": 0.02})],
)
def test_a_device_drifts_as_one_rounding_does(
    ranks: RankPool, npus: RankPool, optimizer: type, arguments: dict[str, Any]
) -> None:
    # Room for every id: a device that is full refuses more, and outputs then differ at once.
    setup = Setup(optimizer, arguments, options={"num_rows": 10_000})
    ((base, _),) = ranks.run(1, drift_on_ranks.train, setup, SIZES)
    drift = np.full(NUM_STEPS, EPSILON)
    for nudged in range(3):
        ((run, _),) = ranks.run(1, drift_on_ranks.train, setup, SIZES, nudged)
        drift = np.maximum(drift, furthest(run, base))
    ((on_device, num_refused),) = npus.run(1, drift_on_ranks.train, on_npu(setup), SIZES)
    assert num_refused == 0
    np.testing.assert_array_less(furthest(on_device, base), LARGEST_RATIO * drift)
