"""Cases of stopping and resuming on every rank; test_pipeline_on_ranks.py shows how they ended."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper

from pipeline_support.model import (
    DEVICE,
    SmallModel,
    World,
    assert_equal,
    batches,
    content,
    hash_tables,
    rest_of,
    spread,
)
from recsdk_pipeline import HybridTrainPipelineSparseDist

NUM_STEPS = 17
STOPPED_AFTER = 7


class Data:
    """Training data that knows how far it has been read."""

    def __init__(self, given: list[Any]) -> None:
        self._given = given
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        while self.position < len(self._given):
            self.position += 1
            yield self._given[self.position - 1]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def shared_folder(world: World) -> str:
    names = [tempfile.mkdtemp() if world.rank == 0 else None]
    dist.broadcast_object_list(names)
    return str(names[0])


def training(world: World, depth: int, data: Data | None = None) -> tuple[Any, Any, Any]:
    # What sums the dense gradients in the same order in every step, also the first of a process.
    wrapper = DefaultDataParallelWrapper(static_graph=False, find_unused_parameters=True)
    model, optimizer = spread(SmallModel(tables=hash_tables()), world, wrapper)
    pipeline = HybridTrainPipelineSparseDist(
        model, optimizer, DEVICE, pipe_n_batch=depth, data=data
    )
    return model, optimizer, pipeline


def case_resumed_training_equals_training_never_stopped(world: World) -> None:
    for depth in (1, 6):
        data = Data(batches(world, NUM_STEPS))
        model, optimizer, pipeline = training(world, depth, data)
        state = {"model": model, "optimizer": optimizer, "pipeline": pipeline}
        iterator, folder = iter(data), shared_folder(world)
        for _ in range(STOPPED_AFTER):
            pipeline.progress(iterator)
        dcp.save(state, checkpoint_id=folder)
        saved = content(model)
        assert data.position >= min(STOPPED_AFTER + depth - 1, NUM_STEPS)
        expected = rest_of(pipeline, iterator)

        again = Data(batches(world, NUM_STEPS))
        other, optimizer, pipeline = training(world, depth, again)
        state = {"model": other, "optimizer": optimizer, "pipeline": pipeline}
        dcp.load(state, checkpoint_id=folder)
        assert (pipeline.num_batches_trained, again.position) == (STOPPED_AFTER, STOPPED_AFTER)
        assert_equal(content(other), saved)
        assert_equal(rest_of(pipeline, iter(again)), expected)
        assert_equal(content(other), content(model))


def case_state_counts_batches_trained_not_read(world: World) -> None:
    data = Data(batches(world, 9))
    _, _, pipeline = training(world, 6, data)
    name = f"data.rank_{world.rank}"
    before = pipeline.state_dict()
    assert before["num_batches_trained"] == 0
    iterator = iter(data)
    for count in range(1, 10):
        pipeline.progress(iterator)
        state = pipeline.state_dict()
        assert state["num_batches_trained"] == count
        other = Data([])
        _, _, fresh = training(world, 1, other)
        fresh.load_state_dict(state)
        assert (other.position, fresh.state_dict()[name]) == (count, state[name])
    with pytest.raises(ValueError, match=f"lacks \\['{name}'\\].* ParquetData.merge"):
        pipeline.load_state_dict({"num_batches_trained": 3})


def case_state_is_not_loaded_while_batches_are_in_flight(world: World) -> None:
    _, _, pipeline = training(world, 6)
    state = pipeline.state_dict()
    assert state == {"num_batches_trained": 0}
    iterator = iter(batches(world, 9))
    for _ in range(3):
        pipeline.progress(iterator)
    with pytest.raises(RuntimeError, match=r"call drop\(\) before"):
        pipeline.load_state_dict(state)
    pipeline.drop()
    pipeline.load_state_dict(state)
    assert pipeline.num_batches_trained == 0
