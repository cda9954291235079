"""Ways to shard a single bag, and the comparison with the unsharded one."""

from __future__ import annotations

from typing import Any

import bags_on_ranks
import numpy as np
from comparing import TOLERANCE, assert_rows_close
from rank_pool import RankPool
from worlds import whole_rows

SPECS: dict[str, Any] = {
    "planned": None,
    "row_wise": ("row_wise",),
    "table_wise": ("table_wise", 1),
    "column_wise": ("column_wise", [(2, 1), (4, 0)]),
    "table_column_wise": ("table_column_wise", [(1, 1), (2, 1), (3, 0)]),
    "table_row_wise": ("table_row_wise", 0),
    "grid_shard": ("grid_shard", [(6, 0)]),
    "data_parallel": ("data_parallel",),
}

CASES = [
    ("planned", "sum", False, False),
    ("row_wise", "mean", True, False),
    ("row_wise", "mean", False, True),
    ("table_wise", "sum", True, True),
    ("data_parallel", "mean", True, False),
    ("data_parallel", "sum", False, False),
]


def assert_trains(
    ranks: RankPool, spec: str, mode: str, options: dict[str, bool], device: str = "cpu"
) -> None:
    """Two ranks train what one process does, on the cpu, on their batches joined."""
    results = ranks.run(2, bags_on_ranks.train, mode, SPECS[spec], options, device)
    expected = ranks.run(2, bags_on_ranks.train_unsharded, mode, options, device)
    replicated = ["user"] if spec == "data_parallel" else []
    rows = whole_rows([result["rows"] for result in results], replicated)
    assert_rows_close(rows, expected[0]["rows"])
    for result, whole in zip(results, expected, strict=True):
        for found, wanted in zip(result["outputs"], whole["outputs"], strict=True):
            np.testing.assert_allclose(found, wanted, **TOLERANCE)
        for found, wanted in zip(result["grads"], whole["grads"], strict=True):
            assert (found is None) == (wanted is None)
            if found is not None:
                np.testing.assert_allclose(found, wanted, **TOLERANCE)
        assert result["exchanges"] == 1
        assert all(
            name.startswith("bag.collection.embedding_bags.user") for name in result["names"]
        )
