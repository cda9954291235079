"""Dense layers cut over simulated NPUs, beside tables there, train as a model that is not cut."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tensor_parallel_on_ranks as tp
from device_type import DEVICE_TYPE
from meshes import MIXED, assert_trained_as_uncut, rows_of_mesh
from rank_pool import RankPool, npu_pool
from setups import ADAGRAD, on_npu, with_room
from worlds import Setup


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    """Two processes that are in one world only, as torch's meshes need it."""
    pool = npu_pool(2)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("shape", "plan", "setup", "how"),
    [
        ((2,), "whole", ADAGRAD, "plain"),
        ((2,), "half", MIXED, "pipeline"),
        ((2,), "chained", MIXED, "plain"),
        ((1, 2), "half", ADAGRAD, "plain"),
        ((2, 1), "whole", MIXED, "pipeline"),
    ],
)
def test_training_equals_that_of_a_model_that_is_not_cut(
    pair: RankPool, shape: tuple[int, ...], plan: str, setup: Setup, how: str
) -> None:
    sizes, setup = rows_of_mesh(shape), with_room(setup)
    results = pair.run(2, tp.train, on_npu(setup), shape, plan, sizes, how)
    assert_trained_as_uncut(results, setup, sizes)


def test_a_mesh_over_gloo_is_refused(pair: RankPool) -> None:
    for said in pair.run(2, tp.mesh_over_gloo, DEVICE_TYPE):
        assert said.startswith(f"ValueError: a mesh of device type '{DEVICE_TYPE}' is over a")
        assert "other than gloo" in said
        assert "use nccl on cuda, hccl on npu" in said
