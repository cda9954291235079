"""What each rank runs to see what time it is in tables that go by the times of their ids."""

from __future__ import annotations

import gc
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from eviction_on_ranks import refusal, rows_of
from plans import Spec, module_plan
from policy_cases import (
    GROUPS,
    MAX_ROWS,
    ROW_WISE,
    TTL,
    WIDTH,
    Case,
    Model,
    batch_of,
    model_of,
    train,
)
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable
from worlds import Setup, configs_of, host_env, shard

from recsdk_core import Admit, CapacityError, Evict, LeaveCause, optim
from recsdk_core.checkpoint import open_checkpoint
from recsdk_core.nn import HashEmbeddingBag
from recsdk_sharding import KeyedJaggedTensorWithTimestamp, Saver, get_default_hybrid_sharders
from recsdk_sharding._batch import host_job
from recsdk_sharding.exchange import EndOfData, PeerError


def times_of_some_ranks(plan: dict[str, Spec], is_sequence: bool) -> Any:
    """What is kept of the keys of a table if rank 1 has no times, and what time it is there.

    Sequences send an id once. The last batch is evaluated.
    """
    rules: dict[str, Evict | None] = {"user": Evict.lru(by="time").expiring(ttl=100)}
    unsharded = Model(Case(plan, is_sequence=is_sequence, rules=rules), "meta")
    world_size = dist.get_world_size()
    by_table = module_plan(configs_of(unsharded), plan, world_size, world_size, "cpu")
    model = DistributedModelParallel(
        unsharded,
        device=torch.device("cpu"),
        plan=ShardingPlan({"ebc": by_table}),
        sharders=get_default_hybrid_sharders(host_env=host_env(), use_index_dedup=is_sequence),
    )
    for times in ([50, 60, 40], [7, 7, 7], [900, 900, 900]):
        ids, lengths = torch.tensor([5, 5, 6 + dist.get_rank()]), torch.tensor([3])
        batch = KeyedJaggedTensor(["user"], ids, lengths=lengths)
        if dist.get_rank() != 1:
            batch = KeyedJaggedTensorWithTimestamp(
                ["user"], ids, torch.tensor(times), lengths=lengths
            )
        model.train(times[0] != 900)
        out = model.module.ebc(batch).wait()
        if model.training:
            train(model, out)
    [table] = model.module.ebc.tables().values()
    [keys] = rows_of(model.module.ebc).values()
    return table.time, {key: table.explain(key).columns["time"] for key in keys}


def times_of_a_bag() -> Any:
    """The same of a plain module's bag over ranks, with times of each id, and one for all."""
    made = _bag_over_ranks()
    ids = torch.tensor([[5, 7 + dist.get_rank()]])
    made(ids, times=torch.tensor([[30, 40]]), counts=torch.tensor([[1, 2]])).wait().sum().backward()
    made(ids, times=np.int64(35)).wait().sum().backward()
    texts = []
    for wrong in ({"counts": ids[:0]}, {"times": True}, {"times": 1.5}, {"scores": 3}):
        texts.append(refusal(lambda wrong=wrong: made(ids, **wrong).wait()))
        made.host_exchange.reset()
    [table] = made.collection.tables().values()
    keys = rows_of(made.collection)["user"]
    return texts, table.time, {key: table.explain(key).columns["time"] for key in keys}


def keys_of_a_bag_after_a_failure(keeping: list[int]) -> tuple[str, list[int]]:
    """What one call raised, and the keys of a bag made after it; some ranks keep the first bag."""
    first: Any = _bag_over_ranks()
    ids = torch.tensor([[5, 7 + dist.get_rank()]])
    text = refusal(lambda: first(ids, times=1, counts=ids[:0]).wait())
    if dist.get_rank() not in keeping:
        first = None
        gc.collect()
    made = _bag_over_ranks()
    made(ids, times=2, counts=torch.tensor([[2, 2]])).wait().sum().backward()
    return text, sorted(rows_of(made.collection)["user"])


def _bag_over_ranks() -> Any:
    bag = HashEmbeddingBag(
        WIDTH,
        name="user",
        optimizer=optim.SGD(lr=1.0),
        max_rows=MAX_ROWS,
        eviction_groups=GROUPS["user"],
        eviction=Evict.lru(by="time"),
        admission=Admit.count(2),
    )
    model = nn.ModuleDict({"bag": bag})
    names = {"user": ParameterConstraints(sharding_types=["row_wise"])}
    topology = Topology(world_size=dist.get_world_size(), compute_device="cpu")
    sharders = get_default_hybrid_sharders(host_env=host_env())
    plan = EmbeddingShardingPlanner(topology=topology, constraints=names).plan(model, sharders)
    return DistributedModelParallel(
        model, device=torch.device("cpu"), plan=plan, sharders=sharders
    ).module["bag"]


def _timed_case() -> Case:
    return Case(
        {"user": ("row_wise",)}, rules={"user": Evict.lru(by="time").expiring(ttl=TTL, every=2)}
    )


def _id_at(time: int | None = None) -> KeyedJaggedTensor:
    """A batch of one id."""
    one = torch.ones(1, dtype=torch.int64)
    if time is None:
        return KeyedJaggedTensor(["user"], one, lengths=one)
    return KeyedJaggedTensorWithTimestamp(["user"], one, one * time, lengths=one)


def clocks(turns: list[tuple[int | None, int | None]]) -> list[list[int | None]]:
    """What time it is after each batch, in ranks' tables and in unsharded ones.

    `turns`: the time that is set before a batch, and that of its ids; None: there is none.
    """
    case = _timed_case()
    of_both = []
    for collection in (model_of(case).module.ebc, model_of(replace(case, plan=None)).ebc):
        found = []
        for is_set, time in turns:
            if is_set is not None:
                collection.set_time(is_set)
            for is_trained in (False, True):
                collection.train(is_trained)
                out = collection(_id_at(time))
                getattr(out, "wait", lambda: None)()
            found.append(collection.tables()["user"].time)
        of_both.append(found)
    return of_both


def time_after_batches_that_came_to_nothing(times: list[int | None], later: int | None) -> int:
    """What time it is after a batch without times, before which others had no counterpart.

    `times`: what one rank set before each of those; `later`: after they failed.
    """
    collection = model_of(_timed_case()).module.ebc
    exchange, is_first = collection.host_exchange, dist.get_rank() == 0
    started = []
    for time in times if is_first else ():
        if time is not None:
            collection.set_time(time)
        started.append(collection.input_dist(collection.create_context(), _id_at()).wait())
    if not is_first:
        exchange.announce_end()
    for each in started:
        with pytest.raises(EndOfData):
            each.wait()
    exchange.reset()
    if later is not None and is_first:
        collection.set_time(later)
    collection(_id_at()).wait()
    return collection.tables()["user"].time


def time_after_a_batch_that_was_not_mapped() -> int:
    """What time it is in the batch after one that the last rank could not map.

    The first rank had set the time for it, and no ids have any.
    """
    model = model_of(_timed_case())
    collection, do_map = model.module.ebc, host_job.map_under_leases
    collection.set_time(7)
    train(model, collection(_id_at()).wait())
    if dist.get_rank() == 0:
        collection.set_time(40)

    def failing(*_: Any, **__: Any) -> Any:
        raise CapacityError("full")

    is_last = dist.get_rank() == dist.get_world_size() - 1
    try:
        host_job.map_under_leases = failing if is_last else do_map
        with pytest.raises(CapacityError if is_last else PeerError, match="full"):
            collection(_id_at()).wait()
    finally:
        host_job.map_under_leases = do_map
    collection.host_exchange.meet()
    collection.host_exchange.reset()
    collection(_id_at()).wait()
    return collection.tables()["user"].time


def times_saved(folder: str, device: str, by: str) -> list[int | None]:
    """The clock of saves before a batch ahead is mapped, once it is, and once it is trained.

    `by`: what the first two are saved by, Saver, state_dict or Table.
    """
    case = replace(_timed_case(), device=device)
    model = model_of(case)
    collection, do_map = model.module.ebc, host_job.map_under_leases
    is_at_map, goes_on = threading.Event(), threading.Event()
    taken: dict[str, dict[str, Any]] = {}

    def save(name: str) -> None:
        if by == "Saver":
            Saver().save(model, Path(folder, name))
        elif by == "Table":
            own = f"rank{dist.get_rank()}"
            collection.tables()["user"].save(Path(folder, name, own))
        else:
            taken[name] = model.state_dict()

    def waiting(*args: Any, **options: Any) -> Any:
        is_at_map.set()
        goes_on.wait(2)
        return do_map(*args, **options)

    train(model, collection(_id_at(7)).wait())
    Saver().save(model, Path(folder, "first"))  # which waits for batches ahead in any case
    host_job.map_under_leases = waiting
    try:
        context = collection.create_context()
        started = collection.input_dist(context, _id_at(40))
        is_at_map.wait()
        save("before")
    finally:
        goes_on.set()
        host_job.map_under_leases = do_map
    batch = started.wait().wait()
    save("mapped")
    train(model, collection.compute_and_output_dist(context, batch).wait())
    Saver().save(model, Path(folder, "after"))
    for name, entries in taken.items():
        other = model_of(case)
        other.load_state_dict(entries)
        Saver().save(other, Path(folder, name))
    own = Path(f"rank{dist.get_rank()}" if by == "Table" else "")
    saved = [Path(folder, name, own) for name in ("before", "mapped")]
    found = [open_checkpoint(path) for path in [*saved, Path(folder, "after")]]
    return [each.manifest.tables[0].eviction.time for each in found]


def turns_by_time(
    turns: list[dict[str, Any]], before: str | None, after: str, device: str, by: str
) -> list[tuple[int, Any]]:
    """What this rank's part of a table says after each turn: what time it is, and of its keys.

    A turn may set a time on each rank, train a batch of each rank's ids, maybe with times, and make
    keys expire. `before`: what was saved by other ranks; `after`: where to save; `by`: Saver, or
    state_dict, of which each rank's is saved.
    """
    model = model_of(replace(_timed_case(), device=device))
    if before is not None and by == "Saver":
        Saver().load(model, Path(before))
    elif before is not None:
        saved = [torch.load(path) for path in sorted(Path(before).iterdir())]
        model.load_state_dict({name: entry for part in saved for name, entry in part.items()})
    collection, rank = model.module.ebc, dist.get_rank()
    table = collection.tables()["user"]
    seen = []
    for turn in turns:
        if turn["set"][rank] is not None:
            collection.set_time(turn["set"][rank])
        if turn["ids"] is not None:
            batch = _timed_ids(turn["ids"][rank], turn["times"][rank])
            train(model, collection(batch.to(torch.device(device))).wait())
        would = table.would_evict(where="step < 0")[LeaveCause.EXPIRED]
        keys = {int(key) for batch in table.export() for key in batch.keys}
        found = {key: table.explain(key).has_expired for key in keys}
        if turn["expires"]:
            assert table.expire() == would
        seen.append((table.time, would, found))
    if by == "Saver":
        Saver().save(model, Path(after))
    else:
        Path(after).mkdir(exist_ok=True)
        torch.save(model.state_dict(), Path(after, f"rank{rank}"))
    return seen


def _timed_ids(ids: list[int], times: list[int] | None) -> KeyedJaggedTensor:
    keys, lengths = torch.tensor(ids, dtype=torch.int64), torch.tensor([len(ids)])
    if times is None:
        return KeyedJaggedTensor(["user"], keys, lengths=lengths)
    return KeyedJaggedTensorWithTimestamp(
        ["user"], keys, torch.tensor(times, dtype=torch.int64), lengths=lengths
    )


def exchanges_of_a_batch(rules: dict[str, Evict | None], has_data: bool, is_trained: bool) -> int:
    """How often a batch of one group of tables is sent to ranks on the host."""
    model = model_of(Case(dict.fromkeys(rules, ("row_wise",)), is_sequence=True, rules=rules))
    model.train(is_trained)
    collection, count, send = model.module.ebc, 0, host_job.all_to_all

    def counting(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        return send(*args, **options)

    case = Case(ROW_WISE, has_data=has_data)
    batch = batch_of(case, 0).ids
    collection.set_time(0)
    host_job.all_to_all = counting
    try:
        started = collection.input_dist(collection.create_context(), batch)
        started.wait().wait()
    finally:
        host_job.all_to_all = send
    return count


@dataclass
class _Timed(Pipelineable):
    ids: KeyedJaggedTensor

    def to(self, device: torch.device, non_blocking: bool = False) -> _Timed:
        return _Timed(self.ids.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: Any) -> None:
        self.ids.record_stream(stream)

    def pin_memory(self) -> _Timed:
        return _Timed(self.ids.pin_memory())


class _Stock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        case = Case(ROW_WISE, rules={"user": Evict.lru(by="time").expiring(ttl=60, every=2)})
        self.ebc = Model(case, "meta").ebc

    def forward(self, batch: _Timed) -> tuple[torch.Tensor, torch.Tensor]:
        vectors = self.ebc(batch.ids).values()
        return vectors.square().sum(), vectors


def times_by_a_stock_pipeline(batches: list[tuple[list[int], list[int]]]) -> Any:
    """The keys of this rank after torchrec's pipeline, and what time it is there."""
    model = shard(_Stock(), Setup(plan={"user": ("row_wise",)}))
    optimizer = CombinedOptimizer([model.fused_optimizer])
    pipeline: Any = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
    given = []
    for ids, times in batches:
        lengths = torch.ones(len(ids), dtype=torch.int64)
        given.append(
            _Timed(
                KeyedJaggedTensorWithTimestamp(
                    ["user"], torch.tensor(ids), torch.tensor(times), lengths=lengths
                )
            )
        )
    iterator = iter(given)
    for _ in given:
        pipeline.progress(iterator)
    [table] = model.module.ebc.tables().values()
    return list(rows_of(model.module.ebc).popitem()[1]), table.time
