"""What became of each id, on the rank that has it in its batch, as of one process that has all."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import outcomes_on_ranks
import pytest
import reference
import torch
from device_type import DEVICE_TYPE
from loops import ON_CPU
from outcomes_on_ranks import Outcomes, as_arrays
from plans import NODES_OF_TWO, TWO, Spec, same
from rank_pool import RankPool
from setups import ADAGRAD, WEIGHTED, on_npu, with_room
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from worlds import Batch, Setup, collection_of, features_of, joined, new_model

from recsdk_core import Outcome
from recsdk_sharding import HashEmbeddingBagCollection, HashEmbeddingBagConfig
from recsdk_sharding._batch.outcomes import of_repeated
from sampling import sampled

SIZES = [[4, 2], [3, 5], [0, 3], [0, 0], [2, 2]]
SEQUENCE = replace(ADAGRAD, is_sequence=True)
FOUND, INSERTED, REFUSED, MISSING = (
    Outcome.FOUND,
    Outcome.INSERTED,
    Outcome.REFUSED,
    Outcome.MISSING,
)


def expected_of(setup: Setup, sizes: list[list[int]]) -> list[list[Outcomes]]:
    """Of each rank and batch, from the unsharded module on the joined batches; then evaluated."""
    model = new_model(setup, "cpu")
    ebc = collection_of(model)
    ebc.keep_outcomes()
    by_rank: list[list[Outcomes]] = [[] for _ in sizes[0]]

    def look(batches: list[Batch]) -> None:
        model(joined(batches))
        outcomes = as_arrays(ebc.outcomes())
        for rank, found in enumerate(by_rank):
            found.append({name: _cut(name, each, batches)[rank] for name, each in outcomes.items()})

    for batches in reference.batches_of(sizes, setup.weighted):
        look(batches)
    model.eval()
    look(reference.batches_of(sizes[:1], setup.weighted, seed=9)[0])
    return by_rank


def _cut(name: str, outcomes_N: np.ndarray, batches: list[Batch]) -> list[np.ndarray]:
    """A feature's outcomes by rank."""
    counts = [len(features_of(batch)[name.partition("@")[0]][1]) for batch in batches]
    return np.split(outcomes_N, np.cumsum(counts)[:-1])


def assert_seen(results: list[Any], expected: list[list[Outcomes]]) -> None:
    for result, of_rank in zip(results, expected, strict=True):
        np.testing.assert_equal(result["seen"], of_rank[: len(result["seen"])])


def total(seen: list[Outcomes]) -> Counter[int]:
    return Counter(int(value) for batch in seen for each in batch.values() for value in each)


IN_PARTS: dict[str, Spec] = {
    name: ("column_wise", [(1, 0), (width - 1, 0)])
    for name, width in {"user": 8, "genre": 3, "other": 5}.items()
}
CASES: list[tuple[int, int | None, str, Setup]] = [
    *((2, None, f"pooled {name}", replace(WEIGHTED, plan=plan)) for name, plan in TWO.items()),
    *((4, 2, f"nodes {name}", replace(ADAGRAD, plan=p)) for name, p in NODES_OF_TWO.items()),
    (1, None, "alone", ADAGRAD),
    (1, None, "alone, in parts", replace(ADAGRAD, plan=IN_PARTS)),
    (2, None, "by rows", ADAGRAD),
    (2, None, "sequences by rows", SEQUENCE),
    (2, None, "sequences on all", replace(SEQUENCE, plan=same("data_parallel"))),
    (2, None, "sequences in parts", replace(SEQUENCE, plan=same("column_wise", [(3, 1), (5, 0)]))),
]
CHOSEN = sampled(CASES, 12)  # test_crossed_policies.py looks at outcomes too


@pytest.mark.parametrize(
    ("world_size", "local_size", "name", "setup"), CHOSEN, ids=[case[2] for case in CHOSEN]
)
def test_outcomes_are_those_of_one_process(
    ranks: RankPool, world_size: int, local_size: int | None, name: str, setup: Setup
) -> None:
    setup = with_room(replace(setup, local_size=local_size))
    sizes = [[*row, *row][:world_size] for row in SIZES]
    results = ranks.run(world_size, outcomes_on_ranks.watch, setup, sizes)
    expected = expected_of(setup, sizes)
    assert_seen(results, expected)
    assert len(results[0]["seen"]) == len(sizes) + 1
    assert set(sum((total(each) for each in expected), Counter())) >= {FOUND, INSERTED, MISSING}


@pytest.mark.parametrize("kind", ["row_wise", "data_parallel"])
def test_sequences_that_send_an_id_once_say_the_same(ranks: RankPool, kind: str) -> None:
    setup = with_room(replace(SEQUENCE, plan=same(kind)))
    results = ranks.run(2, outcomes_on_ranks.watch, setup, SIZES, "plain", True)
    assert_seen(results, expected_of(setup, SIZES))


@pytest.mark.parametrize("name", ["mixed", "data_parallel", "column_wise"])
def test_outcomes_on_a_device(npus: RankPool, name: str) -> None:
    setup = with_room(replace(WEIGHTED, plan=TWO[name]))
    results = npus.run(2, outcomes_on_ranks.watch, on_npu(setup), SIZES)
    assert_seen(results, expected_of(setup, SIZES))


@pytest.mark.parametrize(
    "how",
    [
        how
        for how, like in ON_CPU.items()
        if like == "plain" and "anew" not in how  # those evaluate in between
    ],
)
def test_a_pipeline_shows_those_of_the_batch_in_forward(ranks: RankPool, how: str) -> None:
    setup = with_room(replace(WEIGHTED, plan=TWO["mixed"]))
    results = ranks.run(2, outcomes_on_ranks.watch, setup, SIZES, how)
    assert_seen(results, expected_of(setup, SIZES))
    assert len(results[0]["seen"]) == len(SIZES)


def test_refused_ids_are_told_and_counted(ranks: RankPool, npus: RankPool) -> None:
    plan = {"user": ("table_wise", 1), "genre": ("row_wise",), "other": ("table_wise", 0)}
    setup = replace(
        ADAGRAD, plan=plan, options={"num_rows": 7, "max_rows": 7, "eviction_groups": 2}
    )
    on_cpu = ranks.run(2, outcomes_on_ranks.watch, setup, SIZES)
    on_device = npus.run(2, outcomes_on_ranks.watch, on_npu(setup), SIZES)
    expected = expected_of(setup, SIZES)
    for results in (on_cpu, on_device):
        counted = Counter()
        seen = Counter()
        for result, of_rank in zip(results, expected, strict=True):
            for found, batch in zip(result["seen"], of_rank, strict=True):
                for whole in ("user", "ad", "shared@other"):
                    np.testing.assert_array_equal(found[whole], batch[whole])
            counted.update(result["counts"])
            seen.update(total(result["seen"][: len(SIZES)]))
        assert counted == Counter({kind.name: seen[kind] for kind in Outcome})
        assert seen[REFUSED] > 0


def test_ranks_may_differ_in_what_they_want(ranks: RankPool) -> None:
    for plan in (None, same("data_parallel")):
        setup = with_room(replace(ADAGRAD, plan=plan))
        first, second = ranks.run(2, outcomes_on_ranks.watch_on_one_rank_only, setup, SIZES)
        np.testing.assert_equal(first["seen"][1:], expected_of(setup, SIZES)[0][1 : len(SIZES)])
        for said in (first["seen"][0], *second["seen"]):
            assert "has kept no outcomes of its last batch: call keep_outcomes()" in said


def test_a_sharded_module_keeps_what_the_unsharded_did(ranks: RankPool) -> None:
    assert ranks.run(2, outcomes_on_ranks.keep_before_sharding, ADAGRAD) == [True, True]


@pytest.mark.parametrize("is_sequence", [False, True])
def test_an_unsharded_module_tells_of_each_id(npus: RankPool, is_sequence: bool) -> None:
    setup = replace(ADAGRAD, is_sequence=is_sequence, options={"num_rows": 3, "max_rows": 3})
    keys = [[7, -1, 7], [-1, 6, 5], [5]]  # of 5 and 6, 6 is the higher by the fixed hash
    expected = [
        ([INSERTED, INSERTED, FOUND], [FOUND] * 3),
        ([FOUND, INSERTED, REFUSED], [FOUND, FOUND, REFUSED]),
        ([REFUSED], [REFUSED]),
    ]
    on_cpu = outcomes_on_ranks.watch_unsharded(setup, keys, "cpu")
    (on_device,) = npus.run(1, outcomes_on_ranks.watch_unsharded, setup, keys, DEVICE_TYPE)
    for found in (on_cpu, on_device):
        for outcomes, (user, ad) in zip(found, expected, strict=True):
            assert outcomes["user"].tolist() == user
            assert outcomes["ad"].tolist() == ad
            assert outcomes["genre"].tolist() == []


def test_they_are_told_only_if_they_are_kept() -> None:
    config = HashEmbeddingBagConfig(name="a", embedding_dim=2, num_embeddings=9)
    ebc = HashEmbeddingBagCollection([config]).eval()
    batch = KeyedJaggedTensor(["a"], torch.tensor([5]), lengths=torch.tensor([1]))
    ebc.keep_outcomes()
    ebc(batch)
    assert ebc.outcomes()["a"].tolist() == [MISSING]
    ebc.keep_outcomes(False)
    ebc(batch)
    with pytest.raises(RuntimeError, match="HashEmbeddingBagCollection has kept no outcomes"):
        ebc.outcomes()


def test_what_is_told_may_be_changed() -> None:
    """Backward goes by its own."""
    config = HashEmbeddingBagConfig(name="a", embedding_dim=2, num_embeddings=9)
    ebc = HashEmbeddingBagCollection([config])
    apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 1.0})
    ebc.keep_outcomes()
    batch = KeyedJaggedTensor(["a"], torch.tensor([5]), lengths=torch.tensor([1]))
    before = ebc(batch).values()
    ebc.outcomes()["a"].fill_(REFUSED)
    before.sum().backward()
    assert not torch.equal(ebc.eval()(batch).values(), before)


def test_the_first_of_repeated_keys_was_inserted() -> None:
    outcomes_U = torch.tensor([INSERTED, FOUND, REFUSED, INSERTED], dtype=torch.uint8)
    which_N = torch.tensor([3, 0, 1, 0, 2, 3, 2])
    found = of_repeated(outcomes_U, torch.arange(4), which_N).tolist()
    assert found == [INSERTED, INSERTED, FOUND, FOUND, REFUSED, FOUND, REFUSED]
    assert of_repeated(outcomes_U[:0], which_N[:0], which_N[:0]).tolist() == []


def test_of_equal_keys_that_were_sent_apart_the_first_sample_was_given_the_row() -> None:
    outcomes_U = torch.tensor([INSERTED, FOUND, INSERTED], dtype=torch.uint8)
    keys_U = torch.tensor([9, 9, 4])
    of_second_bag_first = of_repeated(outcomes_U, keys_U, torch.tensor([1, 0, 2]))
    assert of_second_bag_first.tolist() == [INSERTED, FOUND, INSERTED]
    assert of_repeated(outcomes_U, keys_U, torch.tensor([1, 1])).tolist() == [INSERTED, FOUND]
