"""Where torch makes tensors on a device by default, the host's work stays on the host."""

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


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(("is_sequence", "pooling", "is_weighted"), CASES)
def test_steps_are_the_same(
    npus: RankPool, num_ranks: int, is_sequence: bool, pooling: str, is_weighted: bool
) -> None:
    for said in npus.run(num_ranks, default_devices.differences, is_sequence, pooling, is_weighted):
        assert said == []
