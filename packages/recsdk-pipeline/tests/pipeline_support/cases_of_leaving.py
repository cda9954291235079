"""Cases of pipelines that are left with batches in flight, and collected on one rank only."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeline_support.cases_of_pipeline import hashed, mixed, mixed_stock_first, pipeline_of
from pipeline_support.model import (
    DEVICE,
    WIDTH,
    SmallModel,
    World,
    assert_equal,
    batches,
    content,
    dense_batches,
    plain_evaluation,
    plain_step,
    rest_of,
    spread,
)
from recsdk_core import BusyError, Evict
from recsdk_pipeline import HybridEvalPipeline, HybridTrainPipelineSparseDist
from recsdk_sharding import (
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    get_default_hybrid_sharders,
)
from recsdk_sharding.exchange import PeerError
from sampling import crossed

NUM_STEPS = 2
DEPTH = 4

Make = Callable[[World], tuple[Any, Any]]
Give = Callable[..., list[Any]]


@contextmanager
def collecting_by_hand() -> Iterator[None]:
    """Inside, cycles are collected where the case says so."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
        gc.collect()


def _leave(pipeline: Any, given: list[Any]) -> None:
    """Trains some steps, and leaves the rest in flight, in a cycle that waits to be collected."""
    iterator = iter(given)
    for _ in range(NUM_STEPS):
        pipeline.progress(iterator)
    cycle = [pipeline, iterator]
    cycle.append(cycle)


def _assert_the_next_trains(world: World, make: Make, give: Give, collector: int, how: str) -> None:
    """`how`: whether the next pipeline has a model of its own, and whether data ends in flight."""
    is_uneven, is_anew = "uneven" in how, "anew" in how
    counts = [9] * world.size
    if is_uneven:
        counts[world.size - 1 - collector] = NUM_STEPS + 2
    left, further = give(world, counts[world.rank], seed=4), give(world, 5, seed=5)
    model, optimizer = make(world)
    outputs = [plain_step(model, optimizer, batch) for batch in left[:NUM_STEPS] + further]
    if is_anew:
        model, optimizer = make(world)
        outputs = [plain_step(model, optimizer, batch) for batch in further]
    with collecting_by_hand():
        model, optimizer = make(world)
        first = HybridTrainPipelineSparseDist(model, optimizer, DEVICE, pipe_n_batch=DEPTH)
        _leave(first, left)
        del first
        if is_anew:
            del model, optimizer
        if world.rank == collector:
            gc.collect()
        if is_anew:
            model, optimizer = make(world)
        pipeline = HybridTrainPipelineSparseDist(model, optimizer, DEVICE, pipe_n_batch=3)
        assert_equal(rest_of(pipeline, iter(further)), outputs[-len(further) :])
        assert pipeline.num_batches_trained == len(further)


WAYS_TO_LEAVE = ("even", "uneven", "even, anew", "uneven, anew")


def case_pipeline_left_in_flight_is_collected_on_one_rank(world: World) -> None:
    for how, collector in crossed(WAYS_TO_LEAVE, range(world.size), size=4):
        _assert_the_next_trains(world, hashed, batches, collector, how)


def case_mixed_pipeline_left_in_flight_is_collected_on_one_rank(world: World) -> None:
    makes = (mixed, mixed_stock_first)
    for make, how, collector in crossed(makes, WAYS_TO_LEAVE, range(world.size), size=4):
        _assert_the_next_trains(world, make, dense_batches, collector, how)


def case_mixed_pipelines_take_turns_up_to_an_uneven_end(world: World) -> None:
    train, evaluated = dense_batches(world, 6 + 4 * world.rank), dense_batches(world, 2, seed=1)
    for make in (mixed, mixed_stock_first):
        model, optimizer = make(world)
        expected = []
        for batch in train[:6]:
            expected += [plain_step(model, optimizer, batch), *plain_evaluation(model, evaluated)]
        pipeline = pipeline_of(world, make, pipe_n_batch=4)
        other = HybridEvalPipeline(pipeline._model, DEVICE, pipe_n_batch=3)
        iterator, outputs = iter(train), []
        for _ in range(6):
            outputs.append(pipeline.progress(iterator))
            pipeline._model.eval()
            outputs += rest_of(other, iter(evaluated))
            pipeline._model.train()
        assert rest_of(pipeline, iterator) == []
        assert_equal(outputs, expected)


def case_batches_are_dropped_while_another_pipeline_is_under_way(world: World) -> None:
    """Near the end of both pipelines' data, which comes on one rank first."""
    model, optimizer = hashed(world)
    first, other = (
        HybridTrainPipelineSparseDist(model, optimizer, DEVICE, pipe_n_batch=DEPTH)
        for _ in range(2)
    )
    left = iter(batches(world, NUM_STEPS + 2 + 5 * world.rank))
    further = iter(batches(world, NUM_STEPS + 2 + 5 * world.rank, seed=1))
    for pipeline, given in ((first, left), (other, further)):
        for _ in range(NUM_STEPS):
            pipeline.progress(given)
    first.drop()
    assert len(rest_of(other, further)) == 2
    assert other.num_batches_trained == 4
    again = batches(world, 3, seed=2)
    assert len(rest_of(first, iter(again))) == 3


def case_mixed_model_trains_on_while_one_rank_makes_sharders(world: World) -> None:
    """As a rank does that plans for others; its exchange is opened anew, and no other rank's."""
    train = dense_batches(world, 9)
    for make in (mixed, mixed_stock_first):
        model, optimizer = make(world)
        expected = [plain_step(model, optimizer, batch) for batch in train]
        pipeline, iterator = pipeline_of(world, make, pipe_n_batch=6), iter(train)
        outputs = [pipeline.progress(iterator) for _ in range(NUM_STEPS)]
        if world.rank == 0:
            get_default_hybrid_sharders(world.host)
        assert_equal(outputs + rest_of(pipeline, iterator), expected)


STEPS_TO_LOOK = NUM_STEPS + DEPTH + 1


def _by_norm() -> SmallModel:
    """A table that evicts by norms, at a look after the batches that are left in flight."""
    table = HashEmbeddingBagConfig(
        name="people",
        embedding_dim=WIDTH,
        num_embeddings=100,
        feature_names=["user", "item", "tags"],
        max_rows=16,
        eviction_groups=4,
        eviction=Evict.low_norm(every=STEPS_TO_LOOK),
    )
    return SmallModel(tables=HashEmbeddingBagCollection([table], device=torch.device("meta")))


def _assert_replicas_are_equal(world: World, model: Any) -> None:
    found: list[Any] = [None] * world.size
    own = {name: values.cpu() for name, values in content(model).items()}  # not each on its device
    dist.all_gather_object(found, own)
    for other in found:
        assert_equal(list(found[0].values()), list(other.values()))


def case_look_while_one_rank_has_batches_left_in_flight(world: World) -> None:
    """It fails on all ranks before any of them has decided who leaves."""
    ways = crossed(("row_wise", "data_parallel"), range(world.size), size=4)
    for sharding, collector in ways:
        with collecting_by_hand():
            model, optimizer = spread(_by_norm(), world, sharding=sharding)
            first = HybridTrainPipelineSparseDist(model, optimizer, DEVICE, pipe_n_batch=DEPTH)
            _leave(first, batches(world, 9))
            del first
            if world.rank == collector:
                gc.collect()
            pipeline = HybridTrainPipelineSparseDist(model, optimizer, DEVICE, pipe_n_batch=3)
            with pytest.raises((BusyError, PeerError), match="is still in flight; train or drop"):
                rest_of(pipeline, iter(batches(world, 9, seed=1)))
        if sharding == "data_parallel":
            _assert_replicas_are_equal(world, model)
        assert len(rest_of(pipeline, iter(batches(world, 9, seed=2)))) == 9
        if sharding == "data_parallel":
            _assert_replicas_are_equal(world, model)
