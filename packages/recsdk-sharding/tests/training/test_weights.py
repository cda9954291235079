"""Feature processors in front of tables, and weights of ids that learn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import on_ranks
import pytest
import reference
import torch
import weights_on_ranks
from comparing import assert_dense_close, assert_identical, assert_outputs_close, assert_rows_close
from processors import PROCESSORS, processed
from rank_pool import RankPool
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from worlds import Setup, whole_rows

from recsdk_sharding import HashEmbeddingBagCollection, HashEmbeddingBagConfig

ADAGRAD = Setup(torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-4})
SIZES = [[5, 2, 0], [4, 4, 4], [3, 0, 3], [6, 1, 2], [3, 3, 3], [0, 0, 0]]
PLANS: dict[str, Any] = {
    "row_wise": dict.fromkeys(("user", "genre", "other"), ("row_wise",)),
    "table_wise": {
        "user": ("table_wise", 1),
        "genre": ("table_wise", 1),
        "other": ("table_wise", 0),
    },
    "mixed": {
        "user": ("column_wise", [(3, 1), (5, 0)]),
        "genre": ("row_wise",),
        "other": ("data_parallel",),
    },
}
CASES = [
    *[(name, "row_wise", 2) for name in PROCESSORS],
    *[("attention", plan, 3) for plan in PLANS],
    ("positions of all", "mixed", 2),
    ("positions of each", "table_wise", 2),
    ("attention", "row_wise", 1),
]


@pytest.mark.parametrize(("processor", "plan", "world_size"), CASES)
def test_processors_train_as_unsharded(
    ranks: RankPool, processor: str, plan: str, world_size: int
) -> None:
    setup = replace(ADAGRAD, processor=processor, plan=PLANS[plan])
    sizes = [row[:world_size] for row in SIZES]
    results = ranks.run(world_size, on_ranks.train, setup, sizes)
    expected = reference.train_unsharded(setup, sizes)
    replicated = [name for name, spec in PLANS[plan].items() if spec[0] == "data_parallel"]
    assert_rows_close(whole_rows([r["rows"] for r in results], replicated), expected["rows"])
    assert_outputs_close(results, expected["outputs"])
    for result in results:
        assert_dense_close(result["dense"], expected["dense"])
        assert result["has_grad"] == []


def test_processors_in_pipelines(ranks: RankPool) -> None:
    setup = replace(ADAGRAD, processor="attention", plan=PLANS["row_wise"])
    sizes = [row[:2] for row in SIZES]
    plain = ranks.run(2, on_ranks.train, setup, sizes)
    for how in ("TrainPipelineSparseDist", "TrainPipelineFusedSparseDist"):
        assert_identical(ranks.run(2, on_ranks.train, setup, sizes, how), plain)


def test_a_pipeline_under_which_processors_would_drift_apart_is_refused(ranks: RankPool) -> None:
    setup = replace(ADAGRAD, processor="attention")
    for text in ranks.run(2, weights_on_ranks.refuse_semi_sync, setup):
        assert text.startswith("TrainPipelineSemiSync would train the feature processors of 'ebc'")
    setup = replace(ADAGRAD, processor="without parameters")
    sizes = [row[:2] for row in SIZES]
    plain = ranks.run(2, on_ranks.train, setup, sizes)
    assert_identical(ranks.run(2, on_ranks.train, setup, sizes, "TrainPipelineSemiSync"), plain)


def test_only_some_ranks_may_need_gradients_of_weights(ranks: RankPool) -> None:
    replicated = dict.fromkeys(PLANS["mixed"], ("data_parallel",))
    for plan in (PLANS["mixed"], PLANS["table_wise"], replicated):
        setup = replace(ADAGRAD, weighted=True, plan=plan)
        wanted = ranks.run(3, weights_on_ranks.gradients, setup, (0, 1, 2))
        found = ranks.run(3, weights_on_ranks.gradients, setup, (1,))
        assert [grads is None for grads in found] == [True, False, True]
        assert_identical(found[1], wanted[1])
        assert all(np.abs(grads).max() > 0 for grads in wanted)


def test_frozen_tables_give_weights_their_gradient(ranks: RankPool) -> None:
    setup = replace(ADAGRAD, weighted=True, plan=PLANS["mixed"])
    found = ranks.run(2, weights_on_ranks.gradients_of_frozen_tables, setup)
    for result in found:
        np.testing.assert_allclose(result["frozen"], result["trained"], rtol=1e-5, atol=1e-6)
        assert np.abs(result["frozen"]).max() > 0


def test_means_of_weights_that_add_up_to_nothing(ranks: RankPool) -> None:
    for found in ranks.run(2, weights_on_ranks.mean_of_nothing):
        assert not found["pooled"].any()
        assert not found["grad"].any()


def test_processors_that_do_not_fit(ranks: RankPool) -> None:
    for messages in ranks.run(1, weights_on_ranks.refusals):
        assert "its processor changed the ids" in messages[0]
        assert "must make a weight for each of 2 ids, got none" in messages[1]
        assert "must make a weight for each of 2 ids, got a tensor of shape (3,)" in messages[2]


@pytest.mark.parametrize("bad_rank", [0, 2])
def test_a_processor_that_raises_ends_the_step_on_all_ranks(ranks: RankPool, bad_rank: int) -> None:
    for rank, found in enumerate(ranks.run(3, weights_on_ranks.fail_in_a_processor, bad_rank)):
        own = "ArithmeticError: no weights today"
        if rank == bad_rank:
            assert found["text"] == own
        else:
            assert found["text"] == f"PeerError: rank {bad_rank} failed in step 2: {own}"
            assert (found["rank"], found["step"]) == (bad_rank, 2)
        assert found["counts"] == {2}


@pytest.mark.parametrize("is_dictionary", [False, True])
def test_processors_with_another_batch_size_for_each_feature(
    ranks: RankPool, is_dictionary: bool
) -> None:
    for found in ranks.run(2, weights_on_ranks.variable_batches, is_dictionary):
        np.testing.assert_allclose(found["varying"], found["expanded"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("processor", ["positions of all", "positions of each", "attention"])
def test_unsharded_processors_with_another_batch_size_for_each_feature(processor: str) -> None:
    config = HashEmbeddingBagConfig(
        name="t", embedding_dim=2, num_embeddings=9, feature_names=["a", "b"]
    )
    tables = HashEmbeddingBagCollection([config], is_weighted=True).requires_grad_(False)
    module = processed(tables, PROCESSORS[processor](["a", "b"], torch.device("cpu")))
    with torch.no_grad():  # else positions all weigh 1
        for number, parameter in enumerate(module._feature_processors.parameters(), 2):
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) + number)
    lengths, of_samples = torch.tensor([2, 1, 0, 3, 1]), torch.tensor([[1, 0, 0], [2, 1, 0]])
    shared = KeyedJaggedTensor(
        ["a", "b"],
        torch.arange(7),
        lengths=lengths,
        stride_per_key_per_rank=[[2], [3]],
        inverse_indices=(["a", "b"], of_samples),
    )
    of_each = KeyedJaggedTensor(
        ["a", "b"],
        torch.tensor([2, 0, 1, 0, 1, 6, 3, 4, 5]),
        lengths=torch.tensor([1, 2, 2, 1, 3, 0]),
    )
    found = module(shared)
    assert torch.equal(found.values(), module(of_each).values())
    assert found.values().count_nonzero() == 10


@pytest.mark.parametrize("world_size", [1, 2])
def test_processors_train_as_torchrecs(ranks: RankPool, world_size: int) -> None:
    results = ranks.run(world_size, weights_on_ranks.beside_torchrec)
    for result in results:
        for name, out in result["outputs"].items():
            np.testing.assert_allclose(out, results[0]["stock outputs"][name], rtol=1e-5)
    for result in results:
        assert_dense_close(result["weights"], result["stock weights"])
        rows = result["rows"]
        for key, row in rows.items():
            np.testing.assert_allclose(row, result["stock rows"][key], rtol=1e-4, atol=1e-5)
        assert len(rows) > 3
