"""Where torch makes tensors on a device, or of another type, by default, steps are the same."""

from __future__ import annotations

import default_devices
import pytest
from rank_pool import RankPool

CASES = [
    (False, "SUM", False),
    (False, "MEAN", False),
    (False, "SUM", True),
    (False, "MEAN", True),
    (True, "NONE", False),
]


@pytest.mark.parametrize("default", ["device", "float64", "bfloat16"])
@pytest.mark.parametrize(
    ("num_ranks", "sharding"), [(1, "row_wise"), (2, "row_wise"), (2, "column_wise")]
)
@pytest.mark.parametrize(("is_sequence", "pooling", "is_weighted"), CASES)
def test_steps_are_the_same(
    npus: RankPool,
    default: str,
    num_ranks: int,
    sharding: str,
    is_sequence: bool,
    pooling: str,
    is_weighted: bool,
) -> None:
    case = default, is_sequence, pooling, is_weighted, sharding
    for said in npus.run(num_ranks, default_devices.differences, *case):
        assert said == []
