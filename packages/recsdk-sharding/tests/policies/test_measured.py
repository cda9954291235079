"""Tables whose looks measure keys, by the norms of rows or a function: the same on any ranks.

What unsharded tables do is compared with plain Python by the machine of tests/stateful. A row is
the number of times that it was trained.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import eviction_on_ranks
import pytest
from eviction_on_ranks import (
    DEVICE_SIZES,
    MEASURED,
    RULES,
    SIZES,
    WIDTH,
    Case,
    Rows,
    run,
    whole,
)
from plans import Spec
from rank_pool import RankError, RankPool

from recsdk_core import Evict
from recsdk_sharding import HashEmbeddingBagConfig
from sampling import IS_FULL

STEPS = 14
ROW_WISE: dict[str, Spec] = dict.fromkeys(RULES, ("row_wise",))


@pytest.fixture(scope="module")
def expected() -> Rows:
    return run(Case(None, rules=MEASURED), 0, STEPS, None, None)


def cases(world_size: int) -> list[Case]:
    last = world_size - 1
    local = 2 if world_size == 4 else world_size
    mixed: dict[str, Spec] = {
        "user": ("table_wise", last),
        "item": ("table_wise", 0),
        "ad": ("row_wise",),
        "full": ("data_parallel",),
    }
    made = [
        Case(ROW_WISE, depth=3),
        Case(mixed, depth=12),
        Case(dict.fromkeys(RULES, ("data_parallel",)), depth=5),
        Case(dict.fromkeys(RULES, ("table_row_wise", 0)), local_size=local),
        Case(ROW_WISE, is_sequence=True, depth=2),
    ]
    return [replace(case, rules=MEASURED) for case in made]


@pytest.mark.parametrize("world_size", SIZES if IS_FULL else (1, 3, 4))
def test_the_same_keys_and_rows_on_any_number_of_ranks(
    ranks: RankPool, expected: Rows, world_size: int
) -> None:
    tried = cases(world_size)
    eviction_on_ranks.assert_all_have(ranks, tried, expected, world_size, STEPS)


def test_saved_and_resumed_at_another_number_of_ranks(
    ranks: RankPool, expected: Rows, tmp_path: Path
) -> None:
    ends = [0, 4, 7, 11, STEPS]
    at: str | None = None
    for number, world_size in enumerate([1, 3, 2, 4]):
        to = str(tmp_path / str(number))
        step = ends[number], ends[number + 1]
        case = Case(ROW_WISE, depth=2, rules=MEASURED)
        parts = ranks.run(world_size, run, case, *step, at, to)
        at = to
    assert whole(parts) == expected


@pytest.mark.parametrize("world_size", DEVICE_SIZES)
def test_devices_do_the_same(npus: RankPool, expected: Rows, world_size: int) -> None:
    tried = [replace(case, device="npu") for case in cases(world_size) if case.local_size is None]
    eviction_on_ranks.assert_all_have(npus, tried, expected, world_size, STEPS)


def test_norms_need_whole_rows(ranks: RankPool) -> None:
    columns: Spec = ("column_wise", [(1, 0), (WIDTH - 1, 1)])
    case = Case(dict.fromkeys(RULES, columns), rules=MEASURED)
    for said in ranks.run(2, eviction_on_ranks.refusal_of, case):
        assert said.startswith("table 'user': Evict.low_norm() needs the norm of whole rows")


def test_batches_mapped_ahead_of_a_look_are_refused(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="BusyError: table 'ad': a step begins with a look at the"):
        ranks.run(1, eviction_on_ranks.map_ahead, Case(ROW_WISE, rules=MEASURED))


def test_gradients_that_add_up_are_refused() -> None:
    with pytest.raises(ValueError, match="accumulate_steps=2 trains rows once in several batches"):
        HashEmbeddingBagConfig(
            name="user",
            embedding_dim=2,
            num_embeddings=9,
            max_rows=9,
            feature_names=["user"],
            eviction=Evict.low_norm(),
            accumulate_steps=2,
        )
