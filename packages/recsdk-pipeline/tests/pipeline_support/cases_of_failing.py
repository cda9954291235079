"""Cases of failures in a rank's own part of a step; each has process groups of its own."""

from __future__ import annotations

import gc
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline_support.model import (
    DEVICE,
    FEATURES,
    WIDTH,
    CopyingModel,
    SmallModel,
    World,
    assert_equal,
    batches,
    content,
    dense_batches,
    hash_tables,
    plain_step,
    rest_of,
    spread,
)
from pipeline_support.run_cases import TIMEOUT
from recsdk_core import CapacityError, RecsdkError
from recsdk_core.nn import joined
from recsdk_pipeline import HybridEvalPipeline, HybridTrainPipelineSparseDist
from recsdk_pipeline.data import ClickBatch
from recsdk_sharding import HashEmbeddingBagCollection, HashEmbeddingBagConfig, PeerError
from recsdk_sharding._batch import input_dist
from recsdk_sharding.device import pooling as device_pooling
from recsdk_sharding.exchange import Pending, exchanges_of, failures
from sampling import IS_FULL, crossed

BAD_STEP = 3


class Trouble(ValueError):
    pass


def trouble(*_: Any) -> Any:
    raise Trouble(f"rank {dist.get_rank()} has trouble")


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return trouble()


@contextmanager
def other_groups(world: World) -> Iterator[World]:
    """Inside, the ranks have process groups that may be closed."""
    try:
        yield _renewed(world)
    finally:
        _renewed(world)


def _renewed(world: World) -> World:
    store = dist.PrefixStore("renewal", dist.distributed_c10d._get_default_store())
    if world.rank == 0:
        store.set("folder", tempfile.mkdtemp())
    folder = store.get("folder").decode()
    backend = dist.get_backend()
    dist.destroy_process_group()
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=world.rank,
        world_size=world.size,
        timeout=TIMEOUT,
    )
    group = dist.new_group(backend="gloo", timeout=TIMEOUT)
    dist.barrier(group=group)  # all have made it before one destroys it
    host = ShardingEnv(world_size=world.size, rank=world.rank, pg=group)
    return World(world.rank, world.size, host)


def _in_forward(model: Any, optimizer: Any) -> None:
    model.module.layers[0].register_forward_pre_hook(trouble)


def _in_dense_backward(model: Any, optimizer: Any) -> None:
    model.module.layers[1].register_forward_hook(lambda _, __, out: Failing.apply(out))


def _in_the_tables_backward(model: Any, optimizer: Any) -> None:
    joined.update_joined = trouble
    device_pooling.train_set = trouble


def _in_optimizer(model: Any, optimizer: Any) -> None:
    optimizer.step = trouble


PLACES: list[Callable[[Any, Any], None]] = [
    _in_forward,
    _in_dense_backward,
    _in_the_tables_backward,
    _in_optimizer,
]
STEPS = (0, BAD_STEP)
FAILING = [*product(STEPS, PLACES)] if IS_FULL else [*zip(STEPS * 2, PLACES, strict=True)]


def assert_told(world: World, guilty: int, work: Callable[[], Any]) -> None:
    """The guilty rank raises its own, the others an error that names it."""
    with pytest.raises(Trouble if world.rank == guilty else PeerError) as caught:
        work()
    if world.rank != guilty:
        assert caught.value.rank == guilty
        assert caught.value.message == f"Trouble: rank {guilty} has trouble"
        assert caught.value.is_final


def case_one_rank_fails_in_its_own_part_of_a_step(world: World) -> None:
    guilty = world.size - 1
    kept = joined.update_joined, device_pooling.train_set
    for step, spoil in FAILING:
        with other_groups(world) as own:
            model, optimizer = spread(SmallModel(tables=hash_tables()), own)
            pipeline = HybridTrainPipelineSparseDist(model, optimizer, DEVICE, pipe_n_batch=4)
            given = iter(batches(own, 12))
            for _ in range(step):
                pipeline.progress(given)
            if own.rank == guilty:
                failures._SECONDS_FOR_OTHERS = 0.1  # nobody else will come
                spoil(model, optimizer)
            try:
                assert_told(own, guilty, lambda p=pipeline, g=given: rest_of(p, g))
            finally:
                joined.update_joined, device_pooling.train_set = kept
            with pytest.raises(PeerError, match="restart the ranks"):
                pipeline.progress(given)


def case_one_rank_fails_in_evaluation(world: World) -> None:
    with other_groups(world) as own:
        model, _ = spread(SmallModel(tables=hash_tables()), own)
        model.eval()
        if own.rank == 0:
            _in_forward(model, None)
        given = iter(batches(own, 5))
        assert_told(own, 0, lambda: rest_of(HybridEvalPipeline(model, DEVICE), given))


def case_a_model_of_ones_own_fails_alone(world: World) -> None:
    for is_training in (True, False):
        with other_groups(world) as own:
            for model in (SmallModel(tables=hash_tables()), _in_a_group_of_its_own(own)):
                model.train(is_training)
                model.register_forward_pre_hook(trouble)
                optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
                made = HybridTrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
                pipeline = made if is_training else HybridEvalPipeline(model, torch.device("cpu"))
                if own.rank == 0:
                    with pytest.raises(Trouble):
                        pipeline.progress(iter(batches(own, 5)))
                total = torch.ones(1)
                dist.all_reduce(total, group=own.host.process_group)
                assert total == own.size


def _in_a_group_of_its_own(world: World) -> nn.Module:
    groups = [dist.new_group([rank], backend="gloo", timeout=TIMEOUT) for rank in range(world.size)]
    return DistributedDataParallel(nn.Linear(1, 1), process_group=groups[world.rank])


def case_one_rank_has_the_wrong_mode(world: World) -> None:
    with other_groups(world) as own:
        model, _ = spread(SmallModel(tables=hash_tables()), own)
        model.train(own.rank == 0)
        pipeline = HybridEvalPipeline(model, DEVICE)
        with pytest.raises(PeerError if own.rank else RuntimeError, match="is in training mode"):
            pipeline.progress(iter(batches(own, 5)))


def case_all_ranks_fail_alike_and_go_on(world: World) -> None:
    model, optimizer = spread(SmallModel(tables=hash_tables()), world)
    pipeline = HybridTrainPipelineSparseDist(model, optimizer, DEVICE, pipe_n_batch=4)
    given = iter(batches(world, 12))
    for _ in range(BAD_STEP):
        pipeline.progress(given)
    step, optimizer.step = optimizer.step, trouble
    with pytest.raises(Trouble, match=f"rank {world.rank} has"):
        pipeline.progress(given)
    optimizer.step = step
    assert len(rest_of(pipeline, iter(batches(world, 5)))) == 5


def case_an_error_that_is_kept_hides_no_rows(world: World) -> None:
    """As Python keeps the last one of a session, with all that the failed step had."""
    ways = crossed((SmallModel, CopyingModel), (0, BAD_STEP), (Trouble, KeyboardInterrupt), size=4)
    for kind, step, error in ways:
        model, optimizer = spread(kind(tables=hash_tables()), world)
        pipeline = HybridTrainPipelineSparseDist(model, optimizer, DEVICE, pipe_n_batch=4)
        given = iter(batches(world, 12))
        for _ in range(step):
            pipeline.progress(given)

        def fail(*_: Any, error: type[BaseException] = error) -> None:
            raise error

        hook = model.module.layers.register_forward_pre_hook(fail)
        with pytest.raises(error) as caught:
            pipeline.progress(given)
        hook.remove()
        left = _outputs_that(caught.tb)
        later = batches(world, 5, seed=1)
        assert len(rest_of(pipeline, iter(later))) == len(later)
        found = content(model)
        with pytest.raises(RuntimeError, match="its batch was given up"):
            left.sum().backward()
        assert_equal(content(model), found)
        del caught, left
        gc.collect()
        assert_equal(content(model), found)
        keys = torch.cat([batch.sparse["user"].values() for batch in later])
        assert set(_keys_of_all(world, found)) >= set(keys.tolist())


def case_a_step_that_failed_leaves_no_work_behind(world: World) -> None:
    """What dropped batches do to tables is done before anything else is."""
    map_keys = input_dist.map_keys

    def late(*args: Any) -> Any:
        time.sleep(0.05)
        return map_keys(*args)

    for error in (Trouble, KeyboardInterrupt):
        model, optimizer = spread(SmallModel(tables=hash_tables()), world)
        pipeline = HybridTrainPipelineSparseDist(model, optimizer, DEVICE, pipe_n_batch=4)
        given = iter(batches(world, 12))
        for _ in range(BAD_STEP):
            pipeline.progress(given)

        def fail(*_: Any, error: type[BaseException] = error) -> None:
            raise error

        model.module.layers.register_forward_pre_hook(fail)
        input_dist.map_keys = late
        try:
            with pytest.raises(error):
                pipeline.progress(given)
            found = content(model)
            for exchange in exchanges_of(model):
                exchange.meet()
            assert_equal(content(model), found)
        finally:
            input_dist.map_keys = map_keys


def case_an_interrupted_wait_leaves_no_batch_in_flight(world: World) -> None:
    """The batch is dropped also where the interrupt is kept, as Python keeps a session's last."""
    for sharding in ("row_wise", "row_wise and table_wise"):
        model, optimizer = spread(SmallModel(tables=hash_tables()), world, sharding=sharding)
        pipeline = HybridTrainPipelineSparseDist(model, optimizer, DEVICE, pipe_n_batch=2)
        given = iter(batches(world, 12))
        for _ in range(BAD_STEP):
            pipeline.progress(given)
        for exchange in exchanges_of(model):
            exchange.wait_for_jobs()
        with _interrupting_the_next_wait(), pytest.raises(KeyboardInterrupt) as kept:
            rest_of(pipeline, given)
        assert kept.traceback[-1].name in ("result", "heard")
        for tables in model.module.tables.values():
            for table in tables.tables().values():
                table.clear()  # not while batches are in flight
        assert len(rest_of(pipeline, iter(batches(world, 5)))) == 5


@contextmanager
def _interrupting_the_next_wait() -> Iterator[None]:
    """Inside, the next batch is mapped once somebody waits for it, who is interrupted then."""
    map_keys, result = input_dist.map_keys, Pending.result
    is_awaited, is_interrupted = threading.Event(), threading.Event()

    def late(*args: Any) -> Any:
        if not is_interrupted.is_set():
            assert is_awaited.wait(60)
            is_interrupted.set()
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        return map_keys(*args)

    def heard(pending: Any, timeout: float | None = None) -> Any:
        if pending._is_under_way.locked():
            is_awaited.set()
        return result(pending, timeout)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    input_dist.map_keys, Pending.result = late, heard  # type: ignore[method-assign]
    try:
        yield
    finally:
        input_dist.map_keys, Pending.result = map_keys, result  # type: ignore[method-assign]
        signal.signal(signal.SIGINT, handler)


def case_a_batch_that_fails_has_no_job_left_when_others_begin(world: World) -> None:
    """Its tables are sharded in two ways, and each job ends late."""
    model, optimizer = spread(
        SmallModel(tables=hash_tables()), world, sharding="row_wise and table_wise"
    )
    pipeline = HybridTrainPipelineSparseDist(model, optimizer, DEVICE, pipe_n_batch=4)
    end = input_dist._Job.end

    def late(job: Any) -> None:
        time.sleep(0.05)
        end(job)

    def failing(number: int) -> Iterator[Any]:
        yield from batches(world, number)
        if world.rank == 0:
            raise Trouble
        yield from batches(world, 4)

    def assert_goes_on() -> None:
        assert len(rest_of(pipeline, iter(batches(world, 5)))) == 5

    input_dist._Job.end = late  # type: ignore[method-assign]
    try:
        with pytest.raises(Trouble if world.rank == 0 else PeerError):
            rest_of(pipeline, failing(5))
        assert_goes_on()
        given = failing(2)
        pipeline.progress(given)
        pipeline.drop()
        assert_goes_on()
        assert len(rest_of(pipeline, iter(batches(world, 5 + 3 * world.rank)))) == 5
        assert_goes_on()
    finally:
        input_dist._Job.end = end  # type: ignore[method-assign]


def _outputs_that(traceback: Any) -> torch.Tensor:
    """What the tables gave, from the frame of the model's forward."""
    while traceback is not None:
        found = traceback.tb_frame.f_locals.get("pooled")
        if traceback.tb_frame.f_code is SmallModel.forward.__code__:
            return torch.cat(found, dim=1)
        traceback = traceback.tb_next
    raise AssertionError("the model's forward is not in the traceback")


def _keys_of_all(world: World, found: dict[str, torch.Tensor]) -> list[int]:
    parts: list[Any] = [None] * world.size
    dist.all_gather_object(parts, found["people/keys"].tolist())
    return [key for part in parts for key in part]


def case_ranks_look_different_numbers_of_batches_ahead(world: World) -> None:
    model, optimizer = spread(SmallModel(tables=hash_tables()), world)
    depth = 2 + 3 * world.rank
    pipeline = HybridTrainPipelineSparseDist(model, optimizer, DEVICE, pipe_n_batch=depth)
    for _ in range(2):
        with pytest.raises(RecsdkError, match=r"pipe_n_batch is \[2, 5\], rank by rank"):
            rest_of(pipeline, iter(batches(world, 12)))
    pipeline = HybridTrainPipelineSparseDist(model, optimizer, DEVICE, pipe_n_batch=2)
    assert len(rest_of(pipeline, iter(batches(world, 5)))) == 5


def _with_a_full_table() -> SmallModel:
    """A table that has room for few ids, and one for any."""
    room = {"max_rows": 32, "eviction_groups": 8, "on_full": "raise"}
    tables = [
        HashEmbeddingBagConfig(
            name=name, embedding_dim=WIDTH, num_embeddings=100, feature_names=names, **options
        )
        for name, names, options in (
            ("people", ["user"], room),
            ("things", ["item", "tags"], {}),
        )
    ]
    return SmallModel(tables=HashEmbeddingBagCollection(tables, device=torch.device("meta")))


def _with_users(batch: ClickBatch, num_users: int) -> ClickBatch:
    """The batch with so many users in its first bag, and one of each feature in any other."""
    lengths = torch.ones(len(FEATURES) * len(batch.labels), dtype=torch.int64)
    lengths[0] = num_users
    ids = torch.arange(int(lengths.sum()))
    return replace(batch, sparse=KeyedJaggedTensor(list(FEATURES), ids, lengths=lengths))


def case_batch_that_a_full_table_will_not_take_shows_at_its_turn(world: World) -> None:
    """Other ranks, and other tables of its rank, have mapped it ahead."""
    given = [_with_users(batch, 1) for batch in dense_batches(world, 7)]
    given[BAD_STEP] = _with_users(given[BAD_STEP], 40)
    for sharding in ("row_wise", "table_wise and row_wise"):
        model, optimizer = spread(_with_a_full_table(), world, sharding=sharding)
        for batch in given[:BAD_STEP]:
            plain_step(model, optimizer, batch)
        expected = content(model)
        model, optimizer = spread(_with_a_full_table(), world, sharding=sharding)
        pipeline = HybridTrainPipelineSparseDist(model, optimizer, DEVICE)
        iterator = iter(given)
        for _ in range(BAD_STEP):
            pipeline.progress(iterator)
        assert_equal(content(model), expected)
        with pytest.raises((CapacityError, PeerError), match="table 'people' is full"):
            pipeline.progress(iterator)
        assert len(rest_of(pipeline, iter(given[:BAD_STEP]))) == BAD_STEP
