"""What the tests of whole steps run on a device; each function returns plain values."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from device_type import DEVICE_TYPE
from processors import PROCESSORS, processed
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.modules.embedding_configs import PoolingType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from waiting import counting_waits
from worlds import host_env, rows_of

from recsdk_core import Default, Evict, RecsdkError, lay_out_vectors, optim
from recsdk_core.outcome import BeginWith
from recsdk_sharding import (
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    HashEmbeddingCollection,
    RowOptimizer,
    get_default_hybrid_sharders,
)
from recsdk_sharding._batch import input_dist
from recsdk_sharding._batch.assembly import HostAssembly, Plan, ResultRoom
from recsdk_sharding._batch.device_assembly import DeviceAssembly
from recsdk_sharding.device.parcel import pinned_room
from recsdk_sharding.device.pooling import DeviceBatch, _Node
from recsdk_sharding.placement.layout import SentWidth, ShardFeatures

BATCH = 16


def _configs(num_tables: int, dim: int = 8, **options: Any) -> list[HashEmbeddingBagConfig]:
    return [
        HashEmbeddingBagConfig(
            name=f"t{number}",
            embedding_dim=dim,
            num_embeddings=70,
            feature_names=[f"f{number}"],
            **options,
        )
        for number in range(num_tables)
    ]


def _batch(seed: int, num_tables: int, longest: int, size: int = BATCH) -> KeyedJaggedTensor:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(min(longest, 2) - 1, longest + 1, num_tables * size)
    if longest == 1:
        lengths[:] = 1
    ids = rng.integers(-30, 30, int(lengths.sum()))
    names = [f"f{number}" for number in range(num_tables)]
    return KeyedJaggedTensor(names, torch.from_numpy(ids), lengths=torch.from_numpy(lengths))


def _in_bags_of(
    batch: KeyedJaggedTensor, rng: random.Random, *, is_moved: bool, is_weighted: bool
) -> KeyedJaggedTensor:
    """The same ids of each feature, in other bags, and with weights."""
    lengths, size = batch.lengths(), batch.stride()
    if is_moved and size:
        bags = [[rng.randrange(size) for _ in range(n)] for n in batch.length_per_key()]
        lengths = torch.cat([torch.bincount(torch.tensor(b), minlength=size) for b in bags])
    weights = torch.tensor([rng.uniform(0.5, 2) for _ in batch.values()]) if is_weighted else None
    return KeyedJaggedTensor(batch.keys(), batch.values(), weights, lengths=lengths)


def _shared_batch(seed: int, num_tables: int) -> KeyedJaggedTensor:
    """A batch in which samples share bags."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 4, num_tables * BATCH)
    names = [f"f{number}" for number in range(num_tables)]
    return KeyedJaggedTensor(
        names,
        torch.from_numpy(rng.integers(-30, 30, int(lengths.sum()))),
        lengths=torch.from_numpy(lengths),
        stride_per_key_per_rank=[[BATCH]] * num_tables,
        inverse_indices=(names, torch.from_numpy(rng.integers(0, BATCH, (num_tables, 2 * BATCH)))),
    )


class _Calls:
    """Counts calls of functions of Python, on the threads that run what it wraps."""

    def __init__(self) -> None:
        self.number = 0

    def within(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose calls are counted."""

        def run(*args: Any, **kwargs: Any) -> Any:
            before = sys.getprofile()
            sys.setprofile(self._note)
            try:
                return function(*args, **kwargs)
            finally:
                sys.setprofile(before)

        return run

    def _note(self, frame: Any, event: str, argument: Any) -> None:
        self.number += event == "call"


@contextmanager
def _calls_of_host_jobs() -> Iterator[_Calls]:
    """Inside, those of the host work of batches are counted, without the exchange."""
    calls = _Calls()
    parts = {name: calls.within(getattr(input_dist, name)) for name in ("prepare", "map_keys")}
    with mock.patch.multiple(input_dist, **parts):
        yield calls


@contextmanager
def _calls_of_device_steps() -> Iterator[_Calls]:
    """Inside, those of what starts a batch's work on the device are counted."""
    calls = _Calls()
    with ExitStack() as patches:
        for owner, names in ((DeviceBatch, ("open",)), (_Node, ("pool", "gradients", "end"))):
            for name in names:
                counted = calls.within(getattr(owner, name))
                patches.enter_context(mock.patch.object(owner, name, counted))
        yield calls


def count_a_step(
    num_tables: int, longest: int | None, sharding_type: str = "row_wise", pooling: str = "SUM"
) -> dict[str, Any]:
    """What a step hands to this rank's device, whose rows are all there, by its part.

    `longest`: keys of the longest bag; None: samples share bags.
    """
    from recsdk_npusim.counting import counting

    ebc = _sharded(_configs(num_tables, pooling=PoolingType[pooling]), sharding_type)
    rank = dist.get_rank()
    batch = (
        _shared_batch(rank, num_tables) if longest is None else _batch(rank, num_tables, longest)
    )
    ebc(batch).values().sum().backward()
    context = ebc.create_context()
    with _calls_of_device_steps() as calls_of_step:
        with counting() as ahead, _calls_of_host_jobs() as calls:
            mapped = ebc.input_dist(context, batch).wait().wait()
        with counting() as forward:
            values = ebc.compute_and_output_dist(context, mapped).wait().values()
        grad = torch.ones_like(values)
        with counting() as backward:
            values.backward(grad)
    parts = (ahead, forward, backward)
    return {
        "forward": ahead.num_operators + forward.num_operators,
        "backward": backward.num_operators,
        "waits": sum(each.waits for each in parts),
        "bytes": sum(each.bytes_to_device for each in parts),
        "ids": len(batch.values()),
        "calls": calls.number,
        "calls_of_step": calls_of_step.number,
    }


def waits_of_sequences(is_shared: bool) -> dict[str, Any]:
    """The waits of a step of sequences that are sharded, and of one that are not; whether ids and
    lengths are those of the batch.

    `is_shared`: whether samples share bags.
    """
    num_tables = 5
    configs = [_configs(num_tables, pooling=PoolingType.NONE) for _ in range(2)]
    sharded = _sharded(configs[0], "row_wise", is_sequence=True, need_indices=True)
    alone = HashEmbeddingCollection(configs[1], device=sharded._device, need_indices=True)
    apply_optimizer_in_backward(RowWiseAdagrad, alone.parameters(), {"lr": 0.1})
    rank = dist.get_rank()
    batch = _shared_batch(rank, num_tables) if is_shared else _batch(rank, num_tables, 4)
    found: dict[str, Any] = {}
    for name, module in (("sharded", sharded), ("alone", alone)):
        for _ in range(2):
            with counting_waits() as waits:
                sequences = list(module(batch).values())
                torch.cat([each.values() for each in sequences]).sum().backward()
        found[name] = waits.said
        ids = torch.cat([each.weights().cpu() for each in sequences])
        lengths = torch.cat([each.lengths().cpu() for each in sequences])
        if not is_shared:
            is_same = torch.equal(ids, batch.values()) and torch.equal(lengths, batch.lengths())
            found[f"{name} as given"] = is_same
    return found


def waits_of_processors(processor: str) -> str:
    """The waits of a step in which a processor makes the weights of ids, from pinned memory."""
    ebc = _sharded(_configs(5), "row_wise", processor=processor, is_weighted=True)
    for seed in range(3):
        batch = _batch(seed, 5, 4).pin_memory()
        with counting_waits() as waits:
            ebc(batch).values().sum().backward()
    return waits.said


def waits_of_bags(longest: int | None, pooling: str) -> str:
    """The waits of a step of bags; `longest` as in `count_a_step`."""
    ebc = _sharded(_configs(5, pooling=PoolingType[pooling]), "row_wise")
    for seed in range(3):
        batch = _shared_batch(seed, 5) if longest is None else _batch(seed, 5, longest)
        with counting_waits() as waits:
            ebc(batch).values().sum().backward()
    return waits.said


def waits_where_keys_come_and_go(begin_with: BeginWith, is_read: bool) -> list[str]:
    """The waits of steps with new keys, for which others leave.

    `is_read`: whether somebody reads those.
    """
    rules = {"max_rows": 40, "eviction": Evict.lru(), "eviction_groups": 1}
    default = Default.shared_rows(2, begin_with=begin_with)
    ebc = _sharded(_configs(2, default=default, **rules), "row_wise")
    readers = [table.leavers() for table in ebc.tables().values()] if is_read else []
    found = []
    for step in range(8):
        ids = torch.arange(2 * BATCH) + step * BATCH
        batch = KeyedJaggedTensor(["f0", "f1"], ids, lengths=torch.ones(2 * BATCH).long())
        with counting_waits() as waits:
            ebc(batch).values().sum().backward()
        found.append(waits.said)
    assert all(len(reader.read().keys) for reader in readers)
    return found


def _sharded(
    configs: list[HashEmbeddingBagConfig],
    sharding_type: str,
    *,
    is_sequence: bool = False,
    processor: str | None = None,
    **options: Any,
) -> Any:
    """The tables over all ranks, on their devices; `processor`: what stands before them."""
    kind: Any = HashEmbeddingCollection if is_sequence else HashEmbeddingBagCollection
    ebc = kind(configs, device=torch.device("meta"), **options)
    apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.1})
    if processor is not None:
        names = [name for config in configs for name in config.feature_names]
        ebc = processed(ebc, PROCESSORS[processor](names, torch.device(DEVICE_TYPE)))
    model = nn.ModuleDict({"ebc": ebc})
    sharders = get_default_hybrid_sharders(host_env())
    size, rank = dist.get_world_size(), dist.get_rank()
    only = ParameterConstraints(sharding_types=[sharding_type], min_partition=4)
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=size, local_world_size=size, compute_device=DEVICE_TYPE),
        constraints=None if size == 1 else {config.name: only for config in configs},
    )
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    device = torch.device(DEVICE_TYPE, rank % torch.accelerator.device_count())
    made = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
    return made.module["ebc"]


def train_batches_of_other_sizes(seed: int) -> str:
    """Trains and evaluates on one rank, whose batches have now as many ids, now other numbers.

    Most have single ids; some have as many as before in other bags, or with other weights. Returns
    what differed from the cpu.
    """
    rng = random.Random(seed)
    num_tables, is_weighted = rng.randint(1, 3), seed % 2 == 1
    options = {"is_weighted": is_weighted}
    alone = HashEmbeddingBagCollection(_configs(num_tables), device=torch.device("cpu"), **options)
    apply_optimizer_in_backward(RowWiseAdagrad, alone.parameters(), {"lr": 0.1})
    both = [alone, _sharded(_configs(num_tables), "row_wise", **options)]
    for step in range(20):
        longest, size = rng.choice([1, 1, 1, 1, 2]), rng.choice([0, 3, 3, 3, BATCH])
        batch = _batch(1000 * seed + step, num_tables, longest, size)
        batch = _in_bags_of(batch, rng, is_moved=rng.random() < 0.4, is_weighted=is_weighted)
        is_training = rng.random() < 0.7
        outputs = [ebc.train(is_training)(batch).values() for ebc in both]
        if not torch.allclose(outputs[1].cpu(), outputs[0], rtol=1e-4, atol=1e-4):
            return f"step {step}: outputs"
        for out in outputs if is_training else ():
            out.backward(torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out))
    return ""


def train_after_a_lookup(under: Callable[[], Any]) -> list[float]:
    """The first lookup, in training mode, is under a mode of torch; returns vectors at the end."""
    ebc, batch = _sharded(_configs(2), "row_wise"), _batch(0, 2, 1)
    with under():
        ebc(batch).values()
    for _ in range(2):
        ebc(batch).values().sum().backward()
    found: list[float] = ebc.eval()(batch).values().detach().cpu().flatten().tolist()
    return found


OPTIMIZERS = [
    optim.SGD(lr=0.1),
    optim.Adagrad(lr=0.1, eps=1e-3),
    optim.Adagrad(lr=0.1, eps=1e-3, initial_accumulator_value=0.5),
    optim.RowwiseAdagrad(lr=0.1, eps=1e-3),
    optim.Adam(lr=0.02),
]


DEFAULTS = [Default.zeros(), Default.constant(0.5), Default.shared_rows(2)]


def train_unlike_tables(seed: int) -> str:
    """Trains tables of one width that differ in all that an update depends on, beside the cpu.

    Returns what differed.
    """
    rng = random.Random(seed)
    num_tables = rng.randint(1, 6)
    configs = _configs(num_tables)
    for config in configs:
        config.accumulate_steps = rng.choice([1, 1, 1, 2])
        config.on_nonfinite = rng.choice(["apply", "skip", "raise"])
        config.max_rows = rng.choice([None, 7])
        config.default = rng.choice(DEFAULTS)
    both = [HashEmbeddingBagCollection(list(configs), device=d) for d in ("cpu", DEVICE_TYPE)]
    chosen = [rng.choice(OPTIMIZERS) for _ in configs]
    late = rng.random() < 0.3  # the optimizer comes when the tables are there already
    for ebc in both:
        if late:
            ebc.eval()(_batch(seed, num_tables, 3))
            ebc.train()
        for rows, settings in zip(ebc.embedding_bags.values(), chosen, strict=True):
            apply_optimizer_in_backward(RowOptimizer, [rows.weight], {"settings": settings})
    for step in range(6):
        batch = _batch(1000 * seed + step, num_tables, rng.choice([1, 3]))
        outputs = [ebc(batch).values() for ebc in both]
        if not torch.allclose(outputs[1].cpu(), outputs[0], rtol=1e-4, atol=1e-4):
            return f"step {step}: outputs"
        if rng.random() < 0.4:  # once the batch is planned
            name, rate = f"t{rng.randrange(num_tables)}", rng.choice([0.01, 0.05])
            for ebc in both:
                ebc.tables()[name].learning_rate = rate
        grad = torch.linspace(-1, 1, outputs[0].numel()).view_as(outputs[0])
        said = [_backward(out, grad.to(out.device)) for out in outputs]
        if said[0] != said[1]:
            return f"step {step}: {said}"
        if rng.random() < 0.3:
            key = np.array([rng.randint(-30, 30)])
            said = [_said(partial(ebc.tables()["t0"].erase, key)) for ebc in both]
            if said[0] != said[1]:
                return f"step {step}: erase {said}"
        found = [rows_of(ebc.tables()) for ebc in both]
        for name, rows in found[0].items():
            if set(rows) != set(found[1][name]):
                return f"step {step}: keys of {name}"
            for key, (weight, state) in rows.items():
                other, other_state = found[1][name][key]
                pairs = [(weight, other), *((state[f], other_state[f]) for f in state)]
                if not all(np.allclose(*pair, rtol=1e-3, atol=1e-4) for pair in pairs):
                    return f"step {step}: row {key} of {name}"
    counts = [{n: t.update_count for n, t in ebc.tables().items()} for ebc in both]
    last = [rows.weight[-1].unique().tolist() for rows in both[1].embedding_bags.values()]
    is_kept = last == [[config.default.value] for config in configs]
    return "" if counts[0] == counts[1] and is_kept else f"{counts} {last}"


def count_waits_of_tables_that_part(num_steps: int) -> list[int]:
    """The waits of backwards of three tables, of which one has another rate since the forward."""
    from recsdk_npusim.counting import counting

    ebc = HashEmbeddingBagCollection(_configs(3), device=DEVICE_TYPE)
    apply_optimizer_in_backward(RowOptimizer, ebc.parameters(), {"settings": OPTIMIZERS[0]})
    waits = []
    for step in range(num_steps):
        for table in ebc.tables().values():
            table.learning_rate = 0.1
        values = ebc(_batch(step, 3, 2)).values()
        grad = torch.ones_like(values)
        ebc.tables()["t0"].learning_rate = 0.05
        with counting() as found:
            values.backward(grad)
        waits.append(found.waits)
    return waits


def _backward(out: torch.Tensor, grad: torch.Tensor) -> str:
    return _said(lambda: out.backward(grad))


def _said(call: Any) -> str:
    try:
        call()
    except RecsdkError as error:
        return type(error).__name__
    return ""


def pickle_tables(num_tables: int) -> tuple[int, int]:
    """Bytes of a pickled module, and of the rows and state that it has."""
    ebc = HashEmbeddingBagCollection(_configs(num_tables, dim=64), device=DEVICE_TYPE)
    apply_optimizer_in_backward(RowOptimizer, ebc.parameters(), {"settings": OPTIMIZERS[0]})
    ebc(_batch(0, num_tables, 3)).values().sum().backward()
    size = len(pickle.dumps(ebc))
    return size, sum(p.numel() * p.element_size() for p in ebc.parameters())


def stores_of(num_tables: int) -> dict[str, int]:
    """How many stores tables of two widths have: new, moved, sharded copies, and reloaded."""
    configs = [
        replace(c, embedding_dim=4 + 4 * (i % 2)) for i, c in enumerate(_configs(num_tables))
    ]
    ebc = HashEmbeddingBagCollection(configs, device=DEVICE_TYPE)
    apply_optimizer_in_backward(RowOptimizer, ebc.parameters(), {"settings": OPTIMIZERS[1]})
    tables = ebc.tables()
    found = {"new": len({id(table.store) for table in tables.values()})}
    state = ebc.state_dict()
    ebc.load_state_dict(state)
    blocks = {id(table.store.block_of(table.stored)) for table in ebc.tables().values()}
    return {**found, "blocks": len(blocks)}


def put_together(seed: int) -> str:
    """Puts vectors together, and takes gradients apart, on a device and by the engine.

    Returns what differed.
    """
    rng, torch_rng = random.Random(seed), torch.Generator().manual_seed(seed)
    widths = [rng.choice([2, 4, 6]) for _ in range(rng.randint(1, 4))]
    num_bags = [rng.randint(0, 5) for _ in widths]
    if rng.random() < 0.3:
        widths = widths[:1] * len(widths)
    plan, as_cut = _plans_of(rng, widths, num_bags, multiple=rng.choice([1, 4]))
    divisors = None
    if rng.random() < 0.5:
        divisors = [torch.randint(1, 4, (count,)).float() for count in num_bags]
    host, device = HostAssembly(plan, divisors), torch.device(DEVICE_TYPE)
    other = DeviceAssembly(device, as_cut, divisors)
    other.open()
    received = torch.randn(sum(plan.num_values), generator=torch_rng)
    room = ResultRoom(_Apart([*zip(num_bags, widths, strict=True)], rng.random() < 0.5))
    found = other.put(received.to(device), room, 0)
    expected = host.put(received, room, 0)
    if not all(map(torch.equal, room.taken([found]), expected)):
        return f"the room of {plan}"
    if not all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True)):
        return f"results of {plan}"
    taken = other.take([each.to(device) for each in expected], 2.0).cpu()
    return "" if torch.equal(taken, host.take(expected, 2.0)) else f"gradients of {plan}"


@dataclass(frozen=True)
class _Apart:
    """Results of one group, a tensor for each feature."""

    shapes: list[tuple[int, int]]
    takes_views: bool

    def empty(self) -> list[torch.Tensor]:
        return [torch.empty(shape) for shape in self.shapes]

    def joined(self, parts: Any) -> Any:
        raise AssertionError("results were filled")

    def parts_of(self, tensors: Any) -> Any:
        return [tensors]


def _plans_of(
    rng: random.Random, widths: list[int], num_bags: list[int], *, multiple: int
) -> tuple[Plan, Plan]:
    """What some ranks send; of each column somebody sends something.

    The second says the same, with bags counted in the batch if they may be.
    """
    num_ranks = rng.randint(1, 3)
    is_as_cut = len(set(widths)) == 1 and rng.random() < 0.7
    if is_as_cut:
        return _plans_as_cut(rng, widths, num_bags, num_ranks, multiple)
    ranges = [[(0, w)] if rng.random() < 0.5 else [(0, 2), (2, w)][: w // 2] for w in widths]
    sends = {
        (feature, columns): {rng.randrange(num_ranks), rng.randrange(num_ranks)}
        for feature, of_feature in enumerate(ranges)
        for columns in of_feature
    }
    found, filled = [], []
    for rank in range(num_ranks):
        for feature, columns in sorted(sends, key=lambda each: (widths[each[0]], each)):
            if rank not in sends[feature, columns]:
                continue
            is_all = rng.random() < 0.3
            bags = [bag for bag in range(num_bags[feature]) if is_all or rng.random() < 0.6]
            found.append((rank, feature, *columns, len(filled), 0))
            filled.append(bags)
    sent = ShardFeatures(*np.array(found, np.int64).reshape(-1, 6).T)
    order = rng.sample(range(len(filled)), len(filled))  # cuts lie in another one
    sent = replace(sent, cuts_S=np.argsort(order))
    plan = _plan(sent, widths, [filled[cut] for cut in order], num_bags, num_ranks, multiple)
    return plan, plan


def _plans_as_cut(
    rng: random.Random, widths: list[int], num_bags: list[int], num_ranks: int, multiple: int
) -> tuple[Plan, Plan]:
    """Every rank sends whole vectors of one width, of all features."""
    found, filled = [], []
    for rank in range(num_ranks):
        for feature, count in enumerate(num_bags):
            found.append((rank, feature, 0, widths[0], len(filled), 0))
            filled.append([bag for bag in range(count) if rng.random() < 0.6])
    sent = ShardFeatures(*np.array(found, np.int64).reshape(-1, 6).T)
    plan = _plan(sent, widths, filled, num_bags, num_ranks, multiple)
    firsts = np.cumsum([0, *num_bags])
    in_batch = [
        firsts[feature] + bag
        for feature, bags in zip(sent.features_S.tolist(), filled, strict=True)
        for bag in bags
    ]
    room = pinned_room(len(in_batch))
    room.copy_(torch.tensor(in_batch, dtype=torch.int32))
    return plan, replace(plan, filled=room, in_batch=True)


def _plan(
    sent: ShardFeatures,
    widths: list[int],
    filled: list[list[int]],
    num_bags: list[int],
    num_ranks: int,
    multiple: int,
) -> Plan:
    num_filled = np.array(list(map(len, filled)), np.int64)
    starts, num_used, num_values = lay_out_vectors(num_filled, sent.stretches, num_ranks, multiple)
    return Plan(
        sent=sent,
        by_width=SentWidth.of_sent(sent, np.array(widths, np.int64), num_ranks),
        filled=torch.tensor([bag for bags in filled for bag in bags], dtype=torch.int32),
        in_batch=False,
        num_filled=num_filled,
        starts_S=starts,
        num_used=num_used,
        num_values=num_values,
        num_bags=num_bags,
    )
