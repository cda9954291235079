"""Every sharding type trains as the unsharded module does, to within float order."""

from __future__ import annotations

from dataclasses import replace

import on_ranks
import pytest
import reference
from comparing import assert_identical, assert_trained_as
from plans import NODES_OF_TWO, PLANS, TWO, replicated
from rank_pool import RankPool
from setups import ADAGRAD, CASES_OF_TYPES, SIZES
from worlds import Setup, whole_rows


@pytest.mark.parametrize(
    ("world_size", "local_size", "name", "setup"),
    CASES_OF_TYPES,
    ids=[f"{c[2]}-{c[0]}-{c[3].optimizer.__name__}" for c in CASES_OF_TYPES],
)
def test_training_equals_the_unsharded_module(
    ranks: RankPool, world_size: int, local_size: int | None, name: str, setup: Setup
) -> None:
    plan = (NODES_OF_TWO if local_size else PLANS[world_size])[name]
    setup = replace(setup, plan=plan, local_size=local_size)
    sizes = [row[:world_size] for row in SIZES]
    results = ranks.known(world_size, on_ranks.train, setup, sizes)
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
    assert_identical(moved, rows)
    assert all(result["problems"] == [] for result in found)
