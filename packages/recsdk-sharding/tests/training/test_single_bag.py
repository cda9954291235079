"""A HashEmbeddingBag sharded on its own trains as the unsharded one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import bags_on_ranks
import numpy as np
import pytest
import torch
from comparing import TOLERANCE, assert_identical
from rank_pool import RankPool
from single_bags import CASES, SPECS, assert_trains
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from worlds import merged

from recsdk_core.nn import HashEmbeddingBag, RowOptimizer
from recsdk_sharding import HashEmbeddingBagCollection
from recsdk_sharding._modules.single_bag import HashEmbeddingBagSharder, _collection_of


@pytest.mark.parametrize(("spec", "mode", "is_weighted", "is_square"), CASES)
def test_training_equals_the_unsharded_module(
    ranks: RankPool, spec: str, mode: str, is_weighted: bool, is_square: bool
) -> None:
    options = {"is_weighted": is_weighted, "is_square": is_square}
    assert_trains(ranks, spec, mode, options)


def test_columns_start_as_those_of_the_whole_row(ranks: RankPool) -> None:
    options = {"is_weighted": False, "is_square": False}
    results = ranks.run(2, bags_on_ranks.train, "sum", SPECS["column_wise"], options)
    expected = ranks.run(2, bags_on_ranks.train_unsharded, "sum", options)
    for result, whole in zip(results, expected, strict=True):
        np.testing.assert_allclose(result["outputs"][0], whole["outputs"][0], **TOLERANCE)


def test_saver_takes_it(ranks: RankPool, tmp_path: Path) -> None:
    results = ranks.run(2, bags_on_ranks.save_and_load, str(tmp_path / "saved"))
    for result in results:
        assert_identical(result["loaded"], result["saved"])
    assert sum(map(len, merged([result["saved"] for result in results]).values())) > 3


@pytest.mark.parametrize("name", bags_on_ranks.BAD_OFFSETS)
def test_bad_offsets_end_the_step_on_all_ranks(ranks: RankPool, name: str) -> None:
    (first, unsharded, shape), (second, _, _) = ranks.run(2, bags_on_ranks.misuse, name)
    assert "offsets" in first
    assert second == f"PeerError: rank 0 failed in step 1: {first}"
    assert unsharded.partition(":")[0] == first.partition(":")[0] != "no error"
    assert shape == "(2, 6)"


def test_ranks_that_look_up_bags_in_another_order_are_told(ranks: RankPool) -> None:
    for text in ranks.run(2, bags_on_ranks.mix_up):
        assert "the ranks disagree on the batch to exchange" in text


class _Sharder:
    """Stands for one of collections, where it must not be used."""

    module_type = HashEmbeddingBagCollection
    qcomm_codecs_registry = None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "table 'user': a HashEmbeddingBag needs max_rows to be sharded on a device"),
    ],
)
def test_what_devices_do_not_have_is_refused(options: dict[str, Any], text: str) -> None:
    sharder = HashEmbeddingBagSharder(_Sharder())
    bag = HashEmbeddingBag(4, name="user", optimizer=torch.optim.SGD, **options)
    with pytest.raises(ValueError, match=text):
        sharder.shard(bag, {}, None, torch.device("cuda", 0))  # type: ignore[arg-type]


def test_a_bag_that_would_train_by_nobodys_choice_is_refused() -> None:
    sharder = HashEmbeddingBagSharder(_Sharder())
    untold, waiting = (HashEmbeddingBag(4, name="user") for _ in range(2))
    RowOptimizer(waiting, torch.optim.SGD)
    unnamed = HashEmbeddingBag(4, optimizer=torch.optim.SGD)
    bag = partial(HashEmbeddingBag, 4, name="user", optimizer=torch.optim.SGD)
    for refused, text in (
        (untold, "'user': nobody said how to train it: pass optimizer="),
        (waiting, "'user': its RowOptimizer cannot train rows that lie on other ranks"),
        (unnamed, "'unnamed_.* was given no name.*: pass name="),
        (bag(padding_idx=0), "'user': padding_idx is of modules on one process"),
        (bag(scale_grad_by_freq=True), "'user': scale_grad_by_freq is of modules on one"),
        (bag(mode="max"), "'user': mode='max' is of modules on one process"),
    ):
        with pytest.raises(ValueError, match=text):
            sharder.shard(refused, {}, None, torch.device("cpu"))  # type: ignore[arg-type]


def test_an_optimizer_on_its_parameter_is_refused_beside_its_own() -> None:
    bag = HashEmbeddingBag(4, name="user", optimizer=torch.optim.SGD)
    _apply_optimizer_in_backward(torch.optim.Adam, bag.parameters(), {"lr": 0.1})
    with pytest.raises(ValueError, match=r"'user'.*gave \['Adam'\].*SGD.*already"):
        HashEmbeddingBagSharder(_Sharder()).shard(bag, {}, None, torch.device("cpu"))  # type: ignore[arg-type]


def test_its_backwards_accumulate_as_before() -> None:
    bag = HashEmbeddingBag(4, name="user", optimizer=torch.optim.SGD, accumulate_steps=2)
    collection = _collection_of(bag)
    keys = KeyedJaggedTensor(
        ["keys"], torch.tensor([3, 5]), torch.ones(2), lengths=torch.tensor([1, 1])
    )
    counts = []
    for _ in range(4):
        collection(keys).values().sum().backward()
        counts.append(collection.tables()["user"].update_count)
    assert counts == [0, 1, 1, 2]


def test_it_is_planned_by_its_limit() -> None:
    sharder = HashEmbeddingBagSharder(_Sharder())
    (planned,) = sharder.shardable_parameters(HashEmbeddingBag(4, max_rows=9)).values()
    assert planned.shape == (9, 4)
    (planned,) = sharder.shardable_parameters(HashEmbeddingBag(4)).values()
    assert planned.shape == (1_000_000, 4)
    (planned,) = sharder.shardable_parameters(HashEmbeddingBag(50, 4, max_rows=9)).values()
    assert planned.shape == (50, 4)
