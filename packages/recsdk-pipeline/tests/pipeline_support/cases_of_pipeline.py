"""Cases that run on every rank, in one spawn; test_pipeline_on_ranks.py shows how they ended."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from pipeline_support.cases_of_resuming import shared_folder
from pipeline_support.model import (
    DEVICE,
    CopyingModel,
    SmallModel,
    World,
    assert_equal,
    batches,
    content,
    dense_batches,
    hash_tables,
    plain_evaluation,
    plain_step,
    rest_of,
    spread,
    stock_tables,
    with_bad_ids,
)
from recsdk_core import Evict, init
from recsdk_pipeline import HybridTrainPipelineSparseDist
from recsdk_sharding import HashEmbeddingBagCollection, HashEmbeddingBagConfig, Saver
from recsdk_sharding.exchange import PeerError
from sampling import crossed, sampled

SECONDS_TO_RAISE = 60  # far from the timeout of the groups, on a busy machine too
NUM_STEPS = 15
EVALUATED_AFTER = 7


Make = Callable[[World], tuple[nn.Module, Any]]


def hashed(world: World) -> tuple[nn.Module, Any]:
    return spread(SmallModel(tables=hash_tables()), world)


def pipeline_of(world: World, make: Make = hashed, **options):
    model, optimizer = make(world)
    return HybridTrainPipelineSparseDist(model, optimizer, DEVICE, **options)


def train_plainly(
    world: World, train: list[Any], evaluated: list[Any], make: Make = hashed
) -> dict[str, Any]:
    model, optimizer = make(world)
    outputs, found = [], {}
    for step, batch in enumerate(train):
        if step == EVALUATED_AFTER:
            found["midway"] = content(model)
            found["evaluation"] = plain_evaluation(model, evaluated)
        outputs.append(plain_step(model, optimizer, batch))
    return {**found, "outputs": outputs, "end": content(model), "evicted": num_evicted(model)}


def num_evicted(model: Any) -> list[torch.Tensor]:
    """How many ids have left each of this rank's tables."""
    tables = model.module.tables["tables"].tables().values()
    return [torch.tensor(table.stats().evicted) for table in tables]


def train_ahead(
    world: World, train: list[Any], evaluated: list[Any], depth: int, make: Make = hashed
) -> dict[str, Any]:
    pipeline = pipeline_of(world, make, pipe_n_batch=depth)
    model, iterator = pipeline._model, iter(train)
    outputs = [pipeline.progress(iterator) for _ in range(EVALUATED_AFTER)]
    found = {"midway": content(model)}
    model.eval()
    found["evaluation"] = rest_of(pipeline, iter(evaluated))
    assert_equal(plain_evaluation(model, evaluated), found["evaluation"])
    assert_equal(content(model), found["midway"])
    outputs += rest_of(pipeline, iterator)
    assert pipeline.num_batches_trained == len(train)
    return {**found, "outputs": outputs, "end": content(model), "evicted": num_evicted(model)}


def case_any_depth_equals_the_plain_loop(world: World) -> None:
    train, evaluated = batches(world, NUM_STEPS), batches(world, 4, seed=1)
    expected = train_plainly(world, train, evaluated)
    for depth in sampled(range(1, 13), 3):
        found = train_ahead(world, train, evaluated, depth)
        for name, values in expected.items():
            assert_equal(found[name], values)


def evicting(world: World, sharding: str = "row_wise") -> tuple[nn.Module, Any]:
    """Both tables are soon full, and ids leave them."""
    tables = hash_tables().embedding_bag_configs()
    rules = (Evict.lfu(half_life=3.0), Evict.lru(min_age=1))
    configs = [
        replace(table, max_rows=16, eviction_groups=4, eviction=rule)
        for table, rule in zip(tables, rules, strict=True)
    ]
    made = HashEmbeddingBagCollection(configs, device=torch.device("meta"))
    return spread(SmallModel(tables=made), world, sharding=sharding)


def case_tables_of_all_ranks_are_saved_while_ids_leave(world: World) -> None:
    """Their rows have another order on each rank: it goes by which batches are in flight."""
    made = partial(evicting, sharding="data_parallel")
    pipeline, folder, saver = (
        pipeline_of(world, made, pipe_n_batch=3),
        shared_folder(world),
        Saver(),
    )
    train = iter(batches(world, NUM_STEPS))
    for step in range(NUM_STEPS - 3):
        pipeline.progress(train)
        saver.save(pipeline._model, f"{folder}/{step}", incremental=step % 4 > 0)
    assert min(num_evicted(pipeline._model)) > 10


def case_any_depth_evicts_as_the_plain_loop(world: World) -> None:
    train, evaluated = batches(world, NUM_STEPS), batches(world, 4, seed=1)
    expected = train_plainly(world, train, evaluated, evicting)
    assert min(expected["evicted"]) > 10
    for depth in sampled((1, 2, 5, 12), 2):
        found = train_ahead(world, train, evaluated, depth, evicting)
        for name, values in expected.items():
            assert_equal(found[name], values)


def measuring(world: World) -> tuple[nn.Module, Any]:
    """One table evicts by the norms of rows as trained, and wherever that falls in the queue."""
    tables = hash_tables().embedding_bag_configs()
    rules = (Evict.low_norm(every=3), Evict.low_norm(every=1, min_age=1))
    configs = [
        replace(table, max_rows=16, eviction_groups=4, eviction=rule)
        for table, rule in zip(tables, rules, strict=True)
    ]
    made = HashEmbeddingBagCollection(configs, device=torch.device("meta"))
    return spread(SmallModel(tables=made), world)


def case_any_depth_evicts_by_norms_as_the_plain_loop(world: World) -> None:
    train, evaluated = batches(world, NUM_STEPS), batches(world, 4, seed=1)
    expected = train_plainly(world, train, evaluated, measuring)
    assert min(expected["evicted"]) > 10
    for depth in sampled((1, 3, 12), 2):
        found = train_ahead(world, train, evaluated, depth, measuring)
        for name, values in expected.items():
            assert_equal(found[name], values)


def case_torchrec_modules_equal_the_plain_loop(world: World) -> None:
    def stock(world: World) -> tuple[nn.Module, Any]:
        return spread(SmallModel(tables=stock_tables()), world)

    train = dense_batches(world, 9)
    model, optimizer = stock(world)
    expected = [plain_step(model, optimizer, batch) for batch in train]
    for depth in (1, 3, 12):
        assert_equal(rest_of(pipeline_of(world, stock, pipe_n_batch=depth), iter(train)), expected)


def case_hash_and_torchrec_modules_share_a_model(world: World) -> None:
    def both(world: World) -> tuple[nn.Module, Any]:
        return spread(SmallModel(raw=hash_tables(), stock=stock_tables()), world)

    train = dense_batches(world, 9)
    model, optimizer = both(world)
    expected = [plain_step(model, optimizer, batch) for batch in train]
    pipeline = pipeline_of(world, both)
    assert_equal(rest_of(pipeline, iter(train)), expected)
    assert_equal(content(pipeline._model), content(model))


def case_model_without_sharded_modules(world: World) -> None:
    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            output = self.layer(batch.dense).squeeze(1)
            return (output - batch.labels).square().sum(), output.detach()

    def made() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = Dense().to(DEVICE)
        return model, torch.optim.SGD(model.parameters(), lr=0.01)

    train = dense_batches(world, 8)
    model, optimizer = made()
    expected = [plain_step(model, optimizer, batch) for batch in train]
    assert_equal(rest_of(HybridTrainPipelineSparseDist(*made(), DEVICE), iter(train)), expected)


def case_module_that_cannot_be_matched_runs_in_forward(world: World) -> None:
    def copying(world: World) -> tuple[nn.Module, Any]:
        return spread(CopyingModel(tables=hash_tables()), world)

    count = 6 + 2 * world.rank  # ends in good order all the same
    train = batches(world, count)
    model, optimizer = hashed(world)
    expected = [plain_step(model, optimizer, batch) for batch in train[:6]]
    pipeline = pipeline_of(world, copying)
    assert_equal(rest_of(pipeline, iter(train)), expected)
    assert_equal(content(pipeline._model), content(model))


def case_losses_are_returned_on_request(world: World) -> None:
    train = batches(world, 3)
    output, losses = pipeline_of(world, return_loss=True).progress(iter(train))
    assert output.shape == (6,)
    assert losses.shape == ()


def case_next_epoch_goes_on(world: World) -> None:
    train = batches(world, 5)
    model, optimizer = hashed(world)
    expected = [plain_step(model, optimizer, batch) for batch in train + train]
    pipeline = pipeline_of(world)
    found = rest_of(pipeline, iter(train)) + rest_of(pipeline, iter(train))
    assert_equal(found, expected)
    assert_equal(content(pipeline._model), content(model))


def case_uneven_numbers_of_batches_end_together(world: World) -> None:
    for shortest in (0, 1, 4, 9):
        train = batches(world, shortest + 5 * ((world.rank + shortest) % world.size))
        model, optimizer = hashed(world)
        expected = [plain_step(model, optimizer, batch) for batch in train[:shortest]]
        pipeline = pipeline_of(world, pipe_n_batch=3)
        assert_equal(rest_of(pipeline, iter(train)), expected)
        assert pipeline.num_batches_trained == shortest
        assert_equal(content(pipeline._model), content(model))
        expected = [plain_step(model, optimizer, batch) for batch in train[:shortest]]
        assert_equal(rest_of(pipeline, iter(train[:shortest])), expected)


def case_model_made_near_an_uneven_end(world: World) -> None:
    """One rank knows that it has no more, another has batches in flight that it will not train."""
    for is_first in (True, False):
        pipeline = pipeline_of(world, pipe_n_batch=4)
        given = iter(batches(world, 5 + 3 * world.rank))
        num_done = sum(1 for _ in range(3) if pipeline.progress(given) is not None)
        other = pipeline_of(world, pipe_n_batch=2)
        others = iter(batches(world, 4, seed=1))
        num_others = 0
        if is_first:
            num_others += int(other.progress(others) is not None)
        num_done += len(rest_of(pipeline, given))
        num_others += len(rest_of(other, others))
        assert (num_done, num_others) == (5, 4)


def assert_raises_together(world: World, guilty: int, error: type, work: Callable) -> str:
    """All ranks raise soon: the guilty one its own error, the others one that names it."""
    dist.barrier()
    start = time.monotonic()
    with pytest.raises(error if world.rank == guilty else PeerError) as caught:
        work()
    assert time.monotonic() - start < SECONDS_TO_RAISE
    if world.rank != guilty:
        assert caught.value.rank == guilty
        assert f"rank {guilty}" in str(caught.value)
    return "".join(traceback.format_exception(caught.value))


def case_first_save_near_an_uneven_end(world: World) -> None:
    pipeline = pipeline_of(world, pipe_n_batch=4)
    given = iter(batches(world, 4 if world.rank else 9))
    for _ in range(2):  # one rank knows that it has no more, the other is not there yet
        pipeline.progress(given)
    Saver().save(pipeline._model, f"{shared_folder(world)}/saved")
    assert len(rest_of(pipeline, given)) == 2
    assert len(rest_of(pipeline, iter(batches(world, 5)))) == 5


def case_bad_ids_on_one_rank_raise_on_all_in_that_step(world: World) -> None:
    guilty = world.size - 1
    for depth, bad_step in crossed((1, 4, 12), (0, 1, 6), size=4):
        train = batches(world, 9)
        model, optimizer = hashed(world)
        for batch in train[:bad_step]:
            plain_step(model, optimizer, batch)
        if world.rank == guilty:
            train[bad_step] = with_bad_ids(train[bad_step])
        pipeline = pipeline_of(world, pipe_n_batch=depth)
        iterator = iter(train)
        for _ in range(bad_step):
            pipeline.progress(iterator)
        text = assert_raises_together(
            world, guilty, TypeError, lambda p=pipeline, i=iterator: p.progress(i)
        )
        assert "float32" in text
        assert_equal(content(pipeline._model), content(model))
        further = batches(world, 3, seed=2)  # and the pipeline is usable again
        expected = [plain_step(model, optimizer, batch) for batch in further]
        assert_equal(rest_of(pipeline, iter(further)), expected)


def case_failing_iterator_on_one_rank_raises_on_all_in_that_step(world: World) -> None:
    def failing_loader(good: list[Any]) -> Iterator[Any]:
        yield from good
        raise OSError("the disk is on fire")

    for num_good in (0, 1, 5):
        train = batches(world, 9)
        given = failing_loader(train[:num_good]) if world.rank == 0 else iter(train)
        pipeline = pipeline_of(world, pipe_n_batch=4)
        for _ in range(num_good):
            pipeline.progress(given)
        text = assert_raises_together(world, 0, OSError, lambda p=pipeline, g=given: p.progress(g))
        assert "the disk is on fire" in text
        if world.rank == 0:
            assert "in failing_loader" in text
        assert len(rest_of(pipeline, iter(train))) == len(train)


def case_exception_in_background_work_keeps_its_traceback(world: World) -> None:
    def fill_some_rows(keys: Any, values: Any) -> None:
        if world.rank == 0:
            raise ZeroDivisionError("no rows today")

    def made(world: World) -> tuple[nn.Module, Any]:
        config = HashEmbeddingBagConfig(
            name="people",
            embedding_dim=24,
            num_embeddings=10,
            feature_names=["user"],
            initializer=init.Custom(fn=fill_some_rows),
        )
        tables = HashEmbeddingBagCollection(device=torch.device("meta"), tables=[config])
        return spread(SmallModel(tables=tables), world)

    pipeline = pipeline_of(world, made)
    given = iter(batches(world, 9))
    text = assert_raises_together(world, 0, ZeroDivisionError, lambda: rest_of(pipeline, given))
    if world.rank == 0:
        assert "in fill_some_rows" in text


def case_mode_cannot_change_under_batches_in_flight(world: World) -> None:
    pipeline = pipeline_of(world)
    iterator = iter(batches(world, 9))
    for _ in range(2):
        pipeline.progress(iterator)
    pipeline._model.eval()
    with pytest.raises(RuntimeError, match="another iterator"):
        pipeline.progress(iterator)
    pipeline._model.train()
    assert len(rest_of(pipeline, iter(batches(world, 3)))) == 3


def tables_of(pipeline: Any) -> dict[str, Any]:
    return pipeline._model.module.tables["tables"].tables()


def assert_no_rows_are_hidden(pipeline: Any) -> None:
    for table in tables_of(pipeline).values():
        assert table.stats().num_rows == len(table)
    state = pipeline._model.state_dict()
    for name, table in tables_of(pipeline).items():
        keys = next(v for k, v in state.items() if f".{name}." in k and k.endswith(".keys"))
        assert len(keys) == len(table)
    pipeline._model.load_state_dict(state)  # refused while batches are in flight


WAYS_TO_ITERATE = {
    "generator": lambda given: (batch for batch in given),
    "list": iter,
    "map": lambda given: map(copy, given),
}


def _left_early(world: World, way: str, is_kept: bool, is_evaluated: bool) -> None:
    pipeline = pipeline_of(world, pipe_n_batch=4)
    given, further = batches(world, 9, seed=4), batches(world, 3, seed=5)
    left = WAYS_TO_ITERATE[way](given)
    pipeline.progress(left)
    pipeline.progress(left)
    if is_evaluated:
        pipeline._model.eval()
        assert len(rest_of(pipeline, iter(further))) == 3
        pipeline._model.train()
    kept = left if is_kept else None
    del left
    outputs = rest_of(pipeline, iter(further))
    assert pipeline.num_batches_trained == 5
    model, optimizer = hashed(world)
    expected = [plain_step(model, optimizer, batch) for batch in given[:2] + further][2:]
    assert_equal(outputs, expected)
    assert_no_rows_are_hidden(pipeline)
    if kept is not None:  # goes on with its next batch: 6 were read
        assert len(rest_of(pipeline, kept)) == 3
        assert_no_rows_are_hidden(pipeline)


def case_iterator_left_early_hides_no_rows(world: World) -> None:
    for way, is_kept, is_evaluated in crossed(
        WAYS_TO_ITERATE, (False, True), (False, True), size=5
    ):
        _left_early(world, way, is_kept, is_evaluated)


def case_dropped_batches_are_abandoned(world: World) -> None:
    for of_one in (False, True):
        pipeline = pipeline_of(world, pipe_n_batch=4)
        training, evaluated = iter(batches(world, 9)), iter(batches(world, 9, seed=1))
        pipeline.progress(training)
        pipeline.progress(training)
        pipeline._model.eval()
        pipeline.progress(evaluated)
        pipeline._model.train()
        pipeline.drop(training if of_one else None)
        pipeline.drop(training)  # nothing is left to drop
        assert len(pipeline._queues) == int(of_one)
        pipeline.drop(evaluated)
        assert_no_rows_are_hidden(pipeline)
        assert len(rest_of(pipeline, training)) == 3
        assert pipeline.num_batches_trained == 5


def case_failure_among_abandoned_batches_is_not_raised(world: World) -> None:
    guilty = world.size - 1
    for with_iterator in (True, False):
        pipeline = pipeline_of(world, pipe_n_batch=4)
        train = batches(world, 9)
        if world.rank == guilty and not with_iterator:
            train[4] = with_bad_ids(train[4])
        left = iter(train)
        if world.rank == guilty and with_iterator:
            left = (given / 0 if index == 4 else given for index, given in enumerate(train))
        for _ in range(3):
            pipeline.progress(left)
        pipeline._model.eval()  # an evaluation goes on working
        assert len(rest_of(pipeline, iter(train[:3]))) == 3
        pipeline._model.train()
        assert len(rest_of(pipeline, iter(train[:4]))) == 4
        assert_no_rows_are_hidden(pipeline)


def case_new_iterator_at_the_address_of_an_old_one(world: World) -> None:
    pipeline = pipeline_of(world, pipe_n_batch=4)
    given, further = batches(world, 9), batches(world, 3, seed=1)
    left = (batch for batch in given)
    pipeline.progress(left)
    pipeline.progress(left)
    address = id(left)
    del left
    made = [(batch for batch in further) for _ in range(50)]
    next_one = next((one for one in made if id(one) == address), made[0])
    del made
    outputs = rest_of(pipeline, next_one)
    model, optimizer = hashed(world)
    expected = [plain_step(model, optimizer, batch) for batch in given[:2] + further][2:]
    assert_equal(outputs, expected)


def mixed(world: World) -> tuple[nn.Module, Any]:
    return spread(SmallModel(raw=hash_tables(), stock=stock_tables()), world)


def mixed_stock_first(world: World) -> tuple[nn.Module, Any]:
    return spread(SmallModel(stock=stock_tables(), tables=hash_tables()), world)


def case_mixed_model_ends_with_uneven_numbers_of_batches(world: World) -> None:
    for made, shortest in crossed((mixed, mixed_stock_first), (0, 1, 4, 9), size=4):
        train = dense_batches(world, shortest + 5 * ((world.rank + shortest) % world.size))
        model, optimizer = made(world)
        expected = [plain_step(model, optimizer, batch) for batch in train[:shortest]]
        pipeline = pipeline_of(world, made, pipe_n_batch=3)
        assert_equal(rest_of(pipeline, iter(train)), expected)
        assert_equal(content(pipeline._model), content(model))


def case_mixed_model_raises_what_an_iterator_raises_on_one_rank(world: World) -> None:
    def failing_loader(good: list[Any]) -> Iterator[Any]:
        yield from good
        raise OSError("the disk is on fire")

    for made, num_good in crossed((mixed, mixed_stock_first), (0, 1, 5), size=3):
        train = dense_batches(world, 9)
        given = failing_loader(train[:num_good]) if world.rank == 0 else iter(train)
        pipeline = pipeline_of(world, made, pipe_n_batch=4)
        for _ in range(num_good):
            pipeline.progress(given)
        assert_raises_together(world, 0, OSError, lambda p=pipeline, g=given: p.progress(g))
        assert len(rest_of(pipeline, iter(train))) == len(train)


class Clicks(IterableDataset):
    def __init__(self, given: list[Any]) -> None:
        super().__init__()
        self._given = given

    def __iter__(self) -> Iterator[Any]:
        return iter(self._given)


def case_loader_workers_forked_after_tables_exist(world: World) -> None:
    train = batches(world, 6)
    model, optimizer = hashed(world)
    expected = [plain_step(model, optimizer, batch) for batch in train + train]
    pipeline = pipeline_of(world)
    found = rest_of(pipeline, iter(train))  # threads run and rows exist
    loader = DataLoader(
        Clicks(train), batch_size=None, num_workers=1, multiprocessing_context="fork"
    )
    found += rest_of(pipeline, iter(loader))
    assert_equal(found, expected)
    assert_equal(content(pipeline._model), content(model))
