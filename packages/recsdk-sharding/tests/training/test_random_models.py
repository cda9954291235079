"""Random collections, plans and batches: training equals that of dictionaries of rows.

How many examples run is the Hypothesis profile's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import random_models
import torch
from hypothesis import Phase, find, given, settings
from plans import Spec
from random_cases import LOSSES, POOLED_KINDS, SEQUENCE_KINDS, TABLES, assert_same, cases
from random_models import Case
from rank_pool import RankPool
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from worlds import whole_rows

from recsdk_sharding import HashEmbeddingCollection, HashEmbeddingConfig
from recsdk_sharding.placement.ranks import RankMap
from sampling import crossed


def is_cut_by_rows(spec: Spec) -> bool:
    return spec[0] in ("row_wise", "table_row_wise", "grid_shard")


KINDS: dict[str, Callable[[Case], bool]] = {
    **{
        f"{kind}, {'sequences' if is_sequence else 'pooled'}": (
            lambda case, kind=kind, is_sequence=is_sequence: (
                case.world_size > 1
                and case.is_sequence == is_sequence
                and kind in {spec[0] for spec in case.specs}
            )
        )
        for is_sequence, kinds in ((False, POOLED_KINDS), (True, SEQUENCE_KINDS))
        for kind in kinds
    },
    **{
        f"{codec} where rows are cut": lambda case, codec=codec: (
            case.codec == codec
            and case.world_size > 1
            and any(is_cut_by_rows(spec) for spec in case.specs)
        )
        for codec in LOSSES
    },
    "a mixed plan": lambda case: len({spec[0] for spec in case.specs}) > 2,
    "several nodes": lambda case: 1 < (case.local_size or 0) < case.world_size,
    "a feature of several tables": lambda case: any(
        sum(name in table.features for table in case.tables) > 1 for name in case.feature_names
    ),
    "several features of a table": lambda case: any(len(t.features) > 1 for t in case.tables),
    "batches per feature, mixed plan, means": lambda case: (
        case.batches_vary
        and len({spec[0] for spec in case.specs}) > 1
        and not case.is_sequence
        and any(table.is_mean for table in case.tables)
    ),
    "batches per feature of sequences": lambda case: case.batches_vary and case.is_sequence,
    "duplicates dropped": lambda case: case.drops_duplicates and case.is_sequence,
    "initial rows of ids without a row, weights that learn": lambda case: (
        case.learns_weights and any(table.count > 1 for table in case.tables)
    ),
    "initial rows of ids without a row, sequences": lambda case: (
        case.is_sequence and any(table.count > 1 for table in case.tables)
    ),
    "a rank without samples": lambda case: any(0 in step and any(step) for step in case.sizes),
    "a rank whose bags have one key each beside one whose have not": lambda case: any(
        0 < sum(random_models.has_one_key_each(case, step, r) for r in range(len(row))) < len(row)
        for step, row in enumerate(case.sizes)
        if all(row)
    ),
    "a step without samples": lambda case: any(not any(step) for step in case.sizes),
    "weighted means": lambda case: case.is_weighted and any(t.is_mean for t in case.tables),
    "weights that learn, mixed plan": lambda case: (
        case.learns_weights and len({spec[0] for spec in case.specs}) > 1
    ),
    "ids by modulo": lambda case: case.rank_rule == "modulo" and case.world_size > 1,
    **{
        name: lambda case, name=name: case.optimizer == name and case.world_size > 1
        for name in random_models.OPTIMIZERS
    },
}
"""What must have been tried; what the examples have not is looked for."""


def test_any_collection_trains_as_dictionaries_of_rows(ranks: RankPool) -> None:
    seen: list[Case] = []

    def check(case: Case) -> None:
        seen.append(case)
        assert_same(case, ranks.run(case.world_size, random_models.train_sharded, case))

    # Without shrinking: after a failure the ranks are started anew, which takes seconds.
    once = settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])
    once(given(case=cases())(check))()
    for holds in KINDS.values():
        if not any(map(holds, seen)):
            check(find(cases(), holds, settings=settings(once, max_examples=2000)))


@given(case=cases())
def test_any_unsharded_collection_trains_as_dictionaries_of_rows(case: Case) -> None:
    assert_same(replace(case, codec=None), [random_models.train_unsharded(case)])


def test_sequences_of_samples_that_share_bags() -> None:
    config = HashEmbeddingConfig(
        name="t", embedding_dim=2, num_embeddings=9, feature_names=["a", "b"]
    )
    module = HashEmbeddingCollection([config], need_indices=True).requires_grad_(False)
    batch = KeyedJaggedTensor(
        ["a", "b"],
        torch.tensor([7, 8, 9, 1, 2]),
        lengths=torch.tensor([2, 1, 0, 1, 1]),
        stride_per_key_per_rank=[[2], [3]],
        inverse_indices=(["a", "b"], torch.tensor([[1, 0, 0], [2, 1, 0]])),
    )
    found = module(batch)
    assert found["a"].lengths().tolist() == [1, 2, 2]
    assert found["a"].weights().tolist() == [9, 7, 8, 7, 8]
    assert found["b"].lengths().tolist() == [1, 1, 0]
    assert found["b"].weights().tolist() == [2, 1]
    rows = torch.from_numpy(module.tables()["t"].lookup(found["a"].weights().numpy()))
    assert torch.equal(found["a"].values(), rows)


SIZES = ((4, 0, 3), (2, 5, 1), (0, 0, 0), (3, 3, 3))
PLANS: dict[str, tuple[Spec, ...]] = {
    "row_wise": (("row_wise",),) * 3,
    "mixed": (("column_wise", [(3, 1), (5, 0)]), ("row_wise",), ("table_wise", 2)),
    "replicated": (("data_parallel",), ("table_wise", 1), ("data_parallel",)),
}


@pytest.mark.parametrize(
    ("plan", "drops_duplicates", "batches_vary"),
    crossed(PLANS, (False, True), (False, True), size=6),
)
def test_sequences(ranks: RankPool, plan: str, drops_duplicates: bool, batches_vary: bool) -> None:
    case = Case(
        TABLES,
        PLANS[plan],
        SIZES,
        is_sequence=True,
        drops_duplicates=drops_duplicates,
        batches_vary=batches_vary,
    )
    assert_same(case, ranks.run(3, random_models.train_sharded, case))


@pytest.mark.parametrize("batches_vary", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_gradients_of_weights_come_back(ranks: RankPool, plan: str, batches_vary: bool) -> None:
    case = Case(
        TABLES,
        PLANS[plan],
        SIZES,
        batches_vary=batches_vary,
        is_weighted=True,
        learns_weights=True,
    )
    assert_same(case, ranks.run(3, random_models.train_sharded, case))


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_another_batch_size_for_each_feature(ranks: RankPool, plan: str, is_weighted: bool) -> None:
    case = Case(TABLES, PLANS[plan], SIZES, batches_vary=True, is_weighted=is_weighted)
    assert_same(case, ranks.run(3, random_models.train_sharded, case))


def sent_vectors(case: Case, rank: int, tables: list[int]) -> int:
    """Bytes of the vectors of bags that have keys of row-wise tables on a rank, for other ranks."""
    ranks = RankMap(case.world_size)
    total = 0
    for step in range(len(case.sizes)):
        for other in set(range(case.world_size)) - {rank}:
            bags = random_models.bags_of(case, step, other)
            for table in (case.tables[index] for index in tables):
                for name in table.features:
                    bag_N = np.repeat(np.arange(len(bags[name].lengths)), bags[name].lengths)
                    is_own = ranks.owned_by(rank, bags[name].keys)
                    total += 4 * table.dim * len(set(bag_N[is_own].tolist()))
    return total


def test_only_vectors_that_exist_are_sent_and_counted(ranks: RankPool) -> None:
    case = Case(TABLES, PLANS["row_wise"], SIZES)
    for rank, result in enumerate(ranks.run(3, random_models.train_sharded, case)):
        stats = result["stats"]["row_wise"]
        assert stats.forward_bytes == sent_vectors(case, rank, [0, 1, 2])
        wanted = sum(
            sent_from_to(case, owner, rank) for owner in range(case.world_size) if owner != rank
        )
        assert stats.backward_bytes == wanted
        assert stats.id_bytes > 0


def sent_from_to(case: Case, owner: int, rank: int) -> int:
    """Bytes of the vectors that an owner sends to one rank."""
    alone = replace(
        case, sizes=tuple(tuple(n if r == rank else 0 for r, n in enumerate(s)) for s in case.sizes)
    )
    return sent_vectors(alone, owner, [0, 1, 2])


@pytest.mark.parametrize(
    ("codec", "plan", "is_sequence"),
    crossed(("FP16", "BF16", "INT8"), ("row_wise", "mixed"), (False, True), size=6),
)
def test_codecs_shrink_what_travels_and_lose_little(
    ranks: RankPool, codec: str, plan: str, is_sequence: bool
) -> None:
    exact = Case(TABLES, PLANS[plan], SIZES, is_sequence=is_sequence)
    expected = ranks.run(3, random_models.train_sharded, exact)
    found = ranks.run(3, random_models.train_sharded, replace(exact, codec=codec))
    rows = whole_rows([result["rows"] for result in found])
    other = whole_rows([result["rows"] for result in expected])
    differences = [
        np.abs(rows[name][key][0] - weight).max()
        for name, by_key in other.items()
        for key, (weight, _) in by_key.items()
    ]
    assert 0 < max(differences) < 10 * LOSSES[codec]
    for result, whole in zip(found, expected, strict=True):
        assert result["outputs"][0] is not None
        for kind, stats in result["stats"].items():
            bound = 0.6 if codec != "INT8" else 0.5
            padding = 2 * 3 * len(SIZES) * 40
            assert stats.forward_bytes <= bound * whole["stats"][kind].forward_bytes + padding
