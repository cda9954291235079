"""Every sharding type trains as the unsharded module does, to within float order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import on_ranks
import pytest
import reference
import torch
from plans import Spec
from rank_pool import RankPool
from test_training import assert_dense_close, assert_outputs_close, assert_rows_close
from worlds import Setup, assert_equal_rows, whole_rows

SGD = Setup(torch.optim.SGD, {"lr": 0.1})
ADAGRAD = Setup(torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-4})
WEIGHTED = replace(ADAGRAD, weighted=True)
ADAM = Setup(torch.optim.Adam, {"lr": 0.02, "eps": 1e-4})
SIZES = [[5, 2, 0, 4, 1], [4, 4, 4, 4, 4], [0, 3, 3, 1, 2], [0, 0, 0, 0, 0], [3, 1, 2, 2, 0]]

Plan = dict[str, Spec]


def same(*spec: Any) -> Plan:
    """One way for all tables."""
    return dict.fromkeys(("user", "genre", "other"), spec)


def columns(kind: str, places: list[int]) -> Plan:
    """Tables of widths 8, 3 and 5 cut over two or more places."""
    first, second, *_ = [*places, *places]
    last = places[-1]
    return {
        "user": (kind, [(3, first), (4, second), (1, last)]),
        "genre": (kind, [(1, second), (2, first)]),
        "other": (kind, [(5, last)]),
    }


def replicated(plan: Plan) -> list[str]:
    """Tables that every rank has all rows of."""
    return [table for table, spec in plan.items() if spec[0] == "data_parallel"]


ONE: dict[str, Plan] = {
    "table_wise": same("table_wise", 0),
    "column_wise": columns("column_wise", [0]),
    "table_row_wise": same("table_row_wise", 0),
    "grid_shard": columns("grid_shard", [0]),
    "data_parallel": same("data_parallel"),
}
TWO: dict[str, Plan] = {
    "table_wise": {**same("table_wise", 0), "genre": ("table_wise", 1)},
    "table_wise_on_one_rank": same("table_wise", 1),
    "column_wise": columns("column_wise", [0, 1]),
    "table_column_wise": columns("table_column_wise", [1, 0]),
    "table_row_wise": same("table_row_wise", 0),
    "grid_shard": columns("grid_shard", [0]),
    "data_parallel": same("data_parallel"),
    "mixed": {
        "user": ("column_wise", [(4, 1), (4, 0)]),
        "genre": ("data_parallel",),
        "other": ("row_wise",),
    },
    "mixed_more": {
        "user": ("table_wise", 1),
        "genre": ("row_wise",),
        "other": ("grid_shard", [(2, 0), (3, 0)]),
    },
}
NODES_OF_TWO: dict[str, Plan] = {
    "table_row_wise": {**same("table_row_wise", 1), "genre": ("table_row_wise", 0)},
    "grid_shard": columns("grid_shard", [0, 1]),
    "table_column_wise": columns("table_column_wise", [2, 3]),
    "mixed": {
        "user": ("grid_shard", [(4, 1), (4, 0)]),
        "genre": ("table_row_wise", 1),
        "other": ("data_parallel",),
    },
}

CASES = [
    *[(1, None, name, ADAGRAD) for name in ONE],
    *[(2, None, name, WEIGHTED) for name in TWO],
    *[(2, None, name, ADAM) for name in ("data_parallel", "column_wise", "mixed")],
    *[(3, None, name, SGD) for name in ("mixed", "column_wise")],
    *[(4, 2, name, ADAGRAD) for name in NODES_OF_TWO],
    (4, None, "mixed_more", WEIGHTED),
    (5, None, "mixed", WEIGHTED),
    (5, None, "mixed_more", ADAGRAD),
]
PLANS = {1: ONE, 2: TWO, 3: TWO, 4: {**TWO, **NODES_OF_TWO}, 5: TWO}


def assert_trained_as(
    expected: dict[str, Any], results: list[dict[str, Any]], setup: Setup
) -> None:
    """The ranks have trained what the unsharded module has."""
    assert setup.plan is not None
    rows = whole_rows([result["rows"] for result in results], replicated(setup.plan))
    assert_rows_close(rows, expected["rows"])
    assert_outputs_close(results, expected["outputs"])
    for result in results:
        assert_dense_close(result["dense"], expected["dense"])
        assert result["has_grad"] == []
        assert set(result["counts"].values()) <= {len(expected["outputs"])}


@pytest.mark.parametrize(
    ("world_size", "local_size", "name", "setup"),
    CASES,
    ids=[f"{c[2]}-{c[0]}-{c[3].optimizer.__name__}" for c in CASES],
)
def test_training_equals_the_unsharded_module(
    ranks: RankPool, world_size: int, local_size: int | None, name: str, setup: Setup
) -> None:
    plan = (NODES_OF_TWO if local_size else PLANS[world_size])[name]
    setup = replace(setup, plan=plan, local_size=local_size)
    sizes = [row[:world_size] for row in SIZES]
    results = ranks.run(world_size, on_ranks.train, setup, sizes)
    assert_trained_as(reference.train_unsharded(setup, sizes), results, setup)


MOVES = [
    (2, "mixed", None, 4, "grid_shard", 2),
    (4, "grid_shard", 2, 2, "table_wise", None),
    (2, "column_wise", None, 2, "mixed_more", None),
    (2, "data_parallel", None, 3, "column_wise", None),
]


@pytest.mark.parametrize(("world", "name", "local", "new_world", "new_name", "new_local"), MOVES)
def test_state_moves_from_any_plan_to_any_other(
    ranks: RankPool,
    world: int,
    name: str,
    local: int | None,
    new_world: int,
    new_name: str,
    new_local: int | None,
) -> None:
    plan = (NODES_OF_TWO if local else TWO)[name]
    setup = replace(ADAGRAD, plan=plan, local_size=local)
    parts = ranks.run(world, on_ranks.save, setup, [row[:world] for row in SIZES])
    state = {entry: value for part in parts for entry, value in part["state"].items()}
    new_plan = (NODES_OF_TWO if new_local else TWO)[new_name]
    new_setup = replace(ADAGRAD, plan=new_plan, local_size=new_local)
    found = ranks.run(new_world, on_ranks.load, new_setup, state)
    rows = whole_rows([part["rows"] for part in parts], replicated(plan))
    moved = whole_rows([result["rows"] for result in found], replicated(new_plan))
    for table, by_key in rows.items():
        assert_equal_rows(by_key, moved[table])
    assert all(result["problems"] == [] for result in found)
