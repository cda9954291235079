"""Setups that many tests train with, and the sizes of their batches."""

from __future__ import annotations

from dataclasses import replace

import torch
from device_type import DEVICE_TYPE
from plans import NODES_OF_TWO, ONE, TWO
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from worlds import Setup

SGD = Setup(torch.optim.SGD, {"lr": 0.1})
ADAGRAD = Setup(torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-4})
WEIGHTED = replace(ADAGRAD, weighted=True)
ADAM = Setup(torch.optim.Adam, {"lr": 0.02, "eps": 1e-4})
SETUPS = {
    "sgd": SGD,
    "adagrad": ADAGRAD,
    "adagrad_weighted": WEIGHTED,
    "rowwise_adagrad": Setup(RowWiseAdagrad, {"lr": 0.1, "eps": 1e-4}),
    "adam": ADAM,
    "adam_defaults": Setup(torch.optim.Adam, {}),
}
_SIZES = [[5, 2, 0, 4], [4, 4, 4, 4], [0, 3, 3, 1], [6, 1, 2, 0], [0, 0, 0, 0], [3, 3, 3, 3]]
SIZES = [[5, 2, 0, 4, 1], [4, 4, 4, 4, 4], [0, 3, 3, 1, 2], [0, 0, 0, 0, 0], [3, 1, 2, 2, 0]]
"""Batch sizes of every step, and rank of 5: uneven, empty on some ranks, empty on all."""
CASES_OF_TYPES = [
    *[(1, None, name, ADAGRAD) for name in ONE],
    *[(2, None, name, WEIGHTED) for name in TWO],
    *[(2, None, name, ADAM) for name in ("data_parallel", "column_wise", "mixed")],
    *[(3, None, name, SGD) for name in ("mixed", "column_wise")],
    *[(4, 2, name, ADAGRAD) for name in NODES_OF_TWO],
    (4, None, "mixed_more", WEIGHTED),
    (5, None, "mixed", WEIGHTED),
    (5, None, "mixed_more", ADAGRAD),
]
"""Every sharding type: ranks, ranks of a node, name of a plan, and setup."""


def sizes_for(world_size: int) -> list[list[int]]:
    """Batch sizes of every step and rank: uneven, empty on some ranks, empty on all."""
    return [row[:world_size] for row in _SIZES]


def on_npu(setup: Setup) -> Setup:
    """The same with its tables on a device."""
    return replace(setup, device=DEVICE_TYPE)


def with_room(setup: Setup) -> Setup:
    """The same with device memory for all keys of the batches."""
    return replace(setup, options={"num_rows": 400, **setup.options})
