"""Tables whose looks measure keys, by the norms of rows or a function: what they cannot do.

What they do on any number of ranks is crossed with all else in test_crossed_policies.py.
"""

from __future__ import annotations

import eviction_on_ranks
import pytest
from device_type import DEVICE_TYPE
from eviction_on_ranks import whole
from plans import Spec
from policy_batches import batches
from policy_cases import MEASURED, ROW_WISE, RULES, WIDTH, Case
from rank_pool import RankError, RankPool

from recsdk_core import Evict
from recsdk_sharding import HashEmbeddingBagConfig


def test_norms_need_whole_rows(ranks: RankPool) -> None:
    columns: Spec = ("column_wise", [(1, 0), (WIDTH - 1, 1)])
    case = Case(dict.fromkeys(RULES, columns), rules=MEASURED)
    for said in ranks.run(2, eviction_on_ranks.refusal_of, case):
        assert said.startswith("table 'user': Evict.low_norm() needs the norm of whole rows")


def test_batches_mapped_ahead_of_a_look_are_refused(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="BusyError: table 'ad': a step begins with a look at the"):
        ranks.run(1, eviction_on_ranks.map_ahead, Case(ROW_WISE, rules=MEASURED))


@pytest.mark.parametrize("looking", ["user", "full"], ids=["first", "last"])
def test_a_batch_that_is_refused_is_mapped_by_no_group(ranks: RankPool, looking: str) -> None:
    plan: dict[str, Spec] = {**ROW_WISE, looking: ("table_wise", 0)}
    rules = {**dict.fromkeys(RULES, Evict.lru()), looking: Evict.low_norm(every=2)}
    case = Case(plan, rules=rules, state={"max_rows": 900})
    refused, rows = zip(*ranks.run(2, eviction_on_ranks.map_until_refused, case), strict=True)
    assert refused == (1, 1)  # the second batch is of step 2
    [first, second] = batches(0, 2)
    found = whole(rows)
    for name, trained, untrained in zip(RULES, first, second, strict=True):
        before = {key for bag in trained for key in bag}
        assert found[name].keys() == before
        assert {key for bag in untrained for key in bag} - before


@pytest.mark.parametrize("looking", ["user", "full"], ids=["first", "last"])
def test_a_look_comes_after_a_backward_that_raised(ranks: RankPool, looking: str) -> None:
    plan: dict[str, Spec] = {**ROW_WISE, looking: ("table_wise", 0)}
    rules = {**dict.fromkeys(RULES, None), looking: Evict.low_norm(every=1)}
    case = Case(plan, rules=rules, state={"max_rows": 900, "on_nonfinite": "raise"})
    ranks.run(1, eviction_on_ranks.train_on_nan, case)


def test_a_look_meets_rows_that_no_batch_has_read(ranks: RankPool, npus: RankPool) -> None:
    rules = dict.fromkeys(RULES, Evict.low_norm(every=1, below=0.5))
    on_cpu, on_npu = Case(ROW_WISE, rules=rules), Case(ROW_WISE, rules=rules, device=DEVICE_TYPE)
    [expected] = ranks.run(1, eviction_on_ranks.look_after_drops, on_cpu)
    [found] = npus.run(1, eviction_on_ranks.look_after_drops, on_npu)
    assert found == expected
    assert all(expected.values())


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
