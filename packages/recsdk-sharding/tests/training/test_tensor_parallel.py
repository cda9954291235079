"""Dense layers cut over ranks beside sharded tables train as a model that is not cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import tensor_parallel_on_ranks as tp
from comparing import (
    TOLERANCE,
    assert_dense_close,
    assert_identical,
)
from meshes import MIXED, assert_trained_as_uncut, equal_sizes, rows_of_mesh
from rank_pool import RankPool
from setups import ADAGRAD
from worlds import Setup, joined, new_model, whole_rows

from sampling import crossed, sampled


class Pools:
    """A pool for each number of ranks: torch keeps what it learned of a mesh for a process's life,
    so that a process cannot be in another world later."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def run(self, world_size: int, *call: Any) -> list[Any]:
        if world_size not in self._pools:
            self._pools[world_size] = RankPool(world_size)
        return self._pools[world_size].run(world_size, *call)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pools]:
    """Processes for worlds of 2 and 4 ranks."""
    pools = Pools()
    yield pools
    pools.close()


CASES = [
    ((2,), "whole", ADAGRAD, "plain"),
    ((2,), "half", MIXED, "plain"),
    ((2,), "chained", ADAGRAD, "plain"),
    ((2,), "half", ADAGRAD, "pipeline"),
    ((2,), "whole", ADAGRAD, "pipeline"),
    ((4,), "whole", MIXED, "plain"),
    ((2, 2), "whole", ADAGRAD, "plain"),
    ((2, 2), "half", MIXED, "pipeline"),
    ((1, 2), "half", ADAGRAD, "plain"),
    ((2, 1), "whole", ADAGRAD, "plain"),
]
CHOSEN = sampled(CASES, 7)


@pytest.mark.parametrize(
    ("shape", "plan", "setup", "how"),
    CHOSEN,
    ids=[f"{'x'.join(map(str, c[0]))}-{c[1]}-{c[3]}" for c in CHOSEN],
)
def test_training_equals_that_of_a_model_that_is_not_cut(
    ranks: Pools, shape: tuple[int, ...], plan: str, setup: Setup, how: str
) -> None:
    sizes = rows_of_mesh(shape)
    results = ranks.run(int(np.prod(shape)), tp.train, setup, shape, plan, sizes, how)
    assert_trained_as_uncut(results, setup, sizes)
    is_cut = {
        name.rpartition("over.")[2]: kind == "DTensor" for name, kind in results[0]["kinds"].items()
    }
    last = plan != "half"
    assert is_cut == {"0.weight": True, "0.bias": True, "2.weight": last, "2.bias": last}


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_dense_weights_start_as_those_of_the_first_rank(
    ranks: Pools, shape: tuple[int, ...]
) -> None:
    world_size = int(np.prod(shape))
    arguments = ADAGRAD, shape, "half", equal_sizes(world_size)[:1], "seeded"
    results = ranks.run(world_size, tp.train, *arguments)
    for result in results:
        assert_identical(result["dense"], results[0]["dense"])


@pytest.mark.parametrize(
    ("call", "shape"), crossed([tp.accumulate, tp.thaw], [(2,), (2, 2)], size=2)
)
def test_gradients_of_several_backwards_add_up(
    ranks: Pools, shape: tuple[int, ...], call: Any
) -> None:
    setup = replace(ADAGRAD, arguments={"lr": 0.0, "eps": 1e-4})  # the same rows in each
    sizes = equal_sizes(int(np.prod(shape)))
    results = ranks.run(int(np.prod(shape)), call, setup, shape, sizes)
    model = new_model(setup, "cpu")
    for row, batches in zip(sizes, reference.batches_of(sizes, False), strict=True):
        reference.mean_loss(model(joined(batches))[1], row).backward()
    expected = {f"over.{n}": p.grad.numpy() for n, p in model.over.named_parameters()}
    for result in results:
        assert set(result) == set(expected)
        for name, grad in result.items():
            np.testing.assert_allclose(grad, expected[name], **TOLERANCE)


UNSAFE_ON_GLOO = {
    "c10d::allgather_coalesced_",
    "c10d::allgather_into_tensor_coalesced_",
    "c10d::allreduce_coalesced_",
}
"""What gloo has names of more than 15 letters for, which its threads write without a lock."""


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_gloo_is_asked_for_nothing_that_it_does_unsafely(
    ranks: Pools, shape: tuple[int, ...]
) -> None:
    world_size = int(np.prod(shape))
    for found in ranks.run(world_size, tp.collectives, ADAGRAD, shape, equal_sizes(world_size)):
        assert "c10d::_allgather_base_" in found
        assert not found & UNSAFE_ON_GLOO


def test_a_dense_part_under_fsdp2_trains_as_one_that_is_whole(ranks: Pools) -> None:
    sizes = equal_sizes(2)
    results = ranks.run(2, tp.shard_parameters, ADAGRAD, sizes)
    assert_trained_as_uncut(results, ADAGRAD, sizes)
    assert set(results[0]["kinds"].values()) == {"DTensor"}


def test_the_wrapper_works_without_the_helper(ranks: Pools) -> None:
    sizes = equal_sizes(2)
    expected = reference.train_unsharded(ADAGRAD, sizes)["dense"]
    for dense in ranks.run(2, tp.wrap_by_hand, ADAGRAD, sizes):
        assert_dense_close(dense, expected)


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_state_is_loaded_cut_and_whole(ranks: Pools, shape: tuple[int, ...]) -> None:
    sizes = equal_sizes(int(np.prod(shape)))
    for result in ranks.run(int(np.prod(shape)), tp.save_and_load, ADAGRAD, shape, sizes):
        kinds = result["kinds"]
        assert kinds["over.0.weight"] == kinds["over.0.bias"] == "DTensor"
        assert kinds["over.2.weight"] == "Tensor"
        assert any(name.endswith("keys") for name in kinds)
        assert result["missing"] == []
        first, *others = result["contents"]
        for other in others:
            assert_identical(other, first)


def test_state_of_another_shape_is_refused(ranks: Pools) -> None:
    for text in ranks.run(2, tp.load_misfit, ADAGRAD):
        assert "over.0.bias is (4,) over all ranks" in text.replace(
            "ValueError: bias", "over.0.bias"
        )


@pytest.mark.parametrize(("saved", "loaded"), [((2,), (2, 2)), ((4,), (2,)), ((2, 2), (4,))])
def test_checkpoints_move_between_meshes(
    ranks: Pools, tmp_path: Path, saved: tuple[int, ...], loaded: tuple[int, ...]
) -> None:
    path, size = str(tmp_path / "state"), int(np.prod(saved))
    before = ranks.run(size, tp.dcp_save, ADAGRAD, saved, equal_sizes(size), path)
    after = ranks.run(int(np.prod(loaded)), tp.dcp_load, ADAGRAD, loaded, path)
    assert_identical(
        whole_rows([part["rows"] for part in after]), whole_rows([part["rows"] for part in before])
    )
    for part in after:
        assert_identical(part["dense"], before[0]["dense"])


MISUSES = {
    "no_mesh": "TypeError: mesh must be a torch DeviceMesh, got str",
    "three": "ValueError: mesh must have one dimension, tensor, or two",
    "unnamed": "ValueError: the dimensions of a mesh of two need names",
    "partial": "ValueError: mesh has 1 of 2 ranks",
    "no_plan": "TypeError: dense_plan must be a dict of styles by name of module, not empty",
    "no_style": "TypeError: dense_plan['over.0'] must be a style",
    "no_module": "ValueError: dense_plan: the model has no module 'over.7'; it has ['ebc'",
    "table": "ValueError: dense_plan names 'ebc', which sparse_plan shards as tables",
    "no_sparse_plan": "TypeError: sparse_plan must be a torchrec ShardingPlan, got NoneType",
    "meta": "ValueError: parameters ['weight', 'bias'] of 'over.0' are on the meta device",
    "cut": "DTensors already: pass the model as it was built",
    "npu": "no error",
    "wrapped": "ValueError: model is a DistributedModelParallel already",
    "sharded": "ValueError: 'ebc' is sharded already",
}


def test_what_cannot_work_is_refused(ranks: Pools) -> None:
    for found in ranks.run(2, tp.misuses):
        assert set(found) == set(MISUSES)
        for name, text in MISUSES.items():
            assert text in found[name], name


@pytest.mark.parametrize("has_hash_tables", [True, False])
def test_unequal_batches_are_refused_on_all_ranks(ranks: Pools, has_hash_tables: bool) -> None:
    for first, second, third in ranks.run(2, tp.unequal_batches, has_hash_tables):
        assert first == third == "no error"
        assert "[2, 3] samples" in second
        assert "drop or pad" in second


WRONG_LAYOUTS = {
    "first": "'over.0' is the first tensor-parallel layer to run",
    "last": "'over.2' is the last tensor-parallel layer to run, and gives its output as Replicate",
    "between": "'over.2' takes its input as equal on all ranks, but it differs",
}


@pytest.mark.parametrize("name", WRONG_LAYOUTS)
def test_layers_that_do_not_cut_the_batch_are_refused(ranks: Pools, name: str) -> None:
    for text in ranks.run(2, tp.wrong_layouts, name):
        assert WRONG_LAYOUTS[name] in text
