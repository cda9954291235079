"""Setups of dense layers that are cut over a mesh, and the comparison with a model that is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import reference
from comparing import (
    assert_dense_close,
    assert_identical,
    assert_outputs_close,
    assert_rows_close,
)
from setups import ADAGRAD
from worlds import Setup, whole_rows

MIXED = replace(
    ADAGRAD,
    plan={"user": ("table_wise", 1), "genre": ("data_parallel",), "other": ("row_wise",)},
    weighted=True,
)
STEPS = [5, 3, 1, 4]


def equal_sizes(world_size: int) -> list[list[int]]:
    return [[size] * world_size for size in STEPS]


def rows_of_mesh(shape: tuple[int, ...]) -> list[list[int]]:
    """Sizes that differ between the rows of a mesh, not within one."""
    *_, width = shape
    height = int(np.prod(shape)) // width
    return [[size + row for row in range(height) for _ in range(width)] for size in STEPS]


def assert_trained_as_uncut(
    results: list[dict[str, Any]], setup: Setup, sizes: list[list[int]]
) -> None:
    """What `tp.train` gave on all ranks is what one process gives that cuts nothing."""
    expected = reference.train_unsharded(setup, sizes)
    replicated = ["genre"] if setup.plan else []
    rows = whole_rows([result["rows"] for result in results], replicated)
    assert_rows_close(rows, expected["rows"])
    assert_outputs_close(results, expected["outputs"])
    for result in results:
        assert_dense_close(result["dense"], expected["dense"])
        assert_identical(result["dense"], results[0]["dense"])
