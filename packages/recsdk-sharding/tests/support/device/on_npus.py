"""What the tests run on every rank with a device; each function returns plain values."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from device_type import DEVICE_TYPE
from on_ranks import own_batches
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.train_pipeline.pipeline_stage import SparseDataDistUtil
from torchrec.distributed.train_pipeline.train_pipelines import (
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineFusedSparseDist,
)
from torchrec.distributed.train_pipeline.utils import DataLoadingThread
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor
from worlds import (
    Setup,
    collection_of,
    dense_of,
    dense_parameters,
    features_of,
    host_env,
    make_batch,
    new_model,
    optimizer_of,
    rows_of,
    shard,
    tables,
    unwrapped,
)

from recsdk_core import Admit, BackendUnavailable, CapacityError, Default, init, optim
from recsdk_sharding import HashEmbeddingBagConfig, Saver, get_default_hybrid_sharders
from recsdk_sharding._compat.private import PIPELINE_STREAMS
from recsdk_sharding.device import kernels
from recsdk_sharding.device.parcel import Parcel
from recsdk_sharding.device.table import DeviceTable
from recsdk_sharding.placement.layout import Shard


def abandon(setup: Setup, sizes: list[list[int]]) -> Any:
    """Rows after batches were mapped and never looked up."""
    model = shard(new_model(setup, "meta"), setup)
    ebc = unwrapped(model).ebc
    for batch in own_batches(sizes, setup.weighted):
        context = ebc.create_context()
        ebc.input_dist(context, batch.sparse).wait().wait()
    return rows_of(ebc.tables())


def streams_of_pipelines() -> dict[str, str]:
    """The type of device of each stream that a pipeline of torchrec has."""
    found: dict[str, str] = {}
    for kind in (TrainPipelineBase, PrefetchTrainPipelineSparseDist, TrainPipelineFusedSparseDist):
        pipeline = kind(nn.Linear(1, 1), None, torch.device(DEVICE_TYPE))
        for owner in kind.__mro__:
            for name in PIPELINE_STREAMS.get(owner, ()):
                found[f"{owner.__name__}.{name}"] = getattr(pipeline, name).device.type
    stream = torch.get_device_module(DEVICE_TYPE).Stream()
    found["stage"] = SparseDataDistUtil(nn.Linear(1, 1), stream)._default_stream.device.type
    return found


def devices_of_a_loading_thread() -> tuple[str, str]:
    """Of one that is given a device without an index; and the last device, which is current."""
    module = torch.get_device_module(DEVICE_TYPE)
    current = torch.device(DEVICE_TYPE, module.device_count() - 1)
    with module.device(current):
        thread = DataLoadingThread(
            torch.device(DEVICE_TYPE), iter(()), True, memcpy_stream=module.Stream()
        )
    return str(thread._device), str(current)


def fill_up(num_rows: int) -> dict[str, Any]:
    """This rank's shards when more ids come than their device memory has rows for."""
    setup = Setup(options={"num_rows": num_rows}, device=DEVICE_TYPE)
    model = shard(new_model(setup, "meta"), setup)
    optimizer = optimizer_of(model, setup.dense_lr)
    for batch in own_batches([[20] * 4] * 3, weighted=False, device=DEVICE_TYPE):
        optimizer.zero_grad()
        model(batch)[0].backward()
        optimizer.step()
    tables = unwrapped(model).ebc.tables()
    spare = {n: p[-1].tolist() for n, p in unwrapped(model).ebc.named_parameters()}
    return {
        "lengths": {name: len(table) for name, table in tables.items()},
        "budgets": {name: table.max_rows for name, table in tables.items()},
        "refused": {name: table.stats().outcomes[2] for name, table in tables.items()},
        "spare": spare,
    }


def insert_beside_a_lease() -> str:
    """What a full table says to keys for which only rows that a lease keeps back would be left."""
    config = HashEmbeddingBagConfig(
        name="full", embedding_dim=4, num_embeddings=2, feature_names=["f"]
    )
    table = DeviceTable(config, torch.zeros(3, 4, device=DEVICE_TYPE), optim.SGD(), Shard.whole(4))
    table.find_or_insert(np.array([0, 1]))
    said = ""
    with table.index.lease():
        table.erase(np.array([0]))
        try:
            table.find_or_insert(np.array([10]))
        except CapacityError as error:
            said = str(error)
    assert 10 not in table.index
    assert not table.lookup(np.array([7])).any()
    table.find_or_insert(np.array([10]))
    assert len(table) == 2
    table.check_invariants()
    return said


def map_what_cannot_be_read() -> tuple[str, int, int]:
    """What is said of ids whose initial rows a function does not make, and what is counted then."""

    def fill(keys: Any, values: Any) -> None:
        if 99 in keys:
            raise LookupError("no row for 99")
        values[:] = 1.0

    config = HashEmbeddingBagConfig(
        name="user",
        embedding_dim=4,
        num_embeddings=9,
        feature_names=["f"],
        admission=Admit.count(2),
        default=Default.initial_row(),
        initializer=init.Custom(fn=fill),
    )
    table = DeviceTable(config, torch.zeros(10, 4, device=DEVICE_TYPE), optim.SGD(), Shard.whole(4))
    table.find_or_insert(np.array([5]))
    said = ""
    try:
        table.find_or_insert(np.array([5, 99]))
    except LookupError as error:
        said = str(error)
    return said, len(table), table.stats().admission_records


def map_beside_an_upsert() -> bool:
    """Whether keys that another thread maps during an upsert get their initial rows."""
    config = HashEmbeddingBagConfig(
        name="user", embedding_dim=4, num_embeddings=10, feature_names=["f"]
    )
    table, alone = (
        DeviceTable(config, torch.zeros(11, 4, device=DEVICE_TYPE), optim.SGD(), Shard.whole(4))
        for _ in range(2)
    )
    mapped = np.array([5, 6])
    with table._keys.given_rows():
        thread = threading.Thread(target=lambda: table.index.map(mapped, insert=True))
        thread.start()
        thread.join()
    return bool((table.lookup(mapped) == alone.find_or_insert(mapped)).all())


def upsert_equal_keys() -> list[list[float]]:
    """What rows that were written several times at once lack of what was written last."""
    config = HashEmbeddingBagConfig(
        name="user", embedding_dim=4, num_embeddings=10, feature_names=["f"]
    )
    table = DeviceTable(config, torch.zeros(11, 4, device=DEVICE_TYPE), optim.SGD(), Shard.whole(4))
    found = []
    for seed in range(4):
        keys = np.random.default_rng(seed).integers(0, 5, 1 + 50 * seed)
        values = np.arange(len(keys), dtype=np.float32)[:, None].repeat(4, axis=1)
        table.upsert(keys, values)
        last = {int(key): value for key, value in zip(keys, values[:, 0].tolist(), strict=True)}
        there = np.array(sorted(last))
        rows = table.lookup(there).tolist()
        found.append([row[0] - last[int(key)] for key, row in zip(there, rows, strict=True)])
    return found


def train_unsharded(setup: Setup, num_steps: int) -> dict[str, Any]:
    """An unsharded module in device memory, and its state loaded by one on the cpu."""
    model = new_model(setup, DEVICE_TYPE).to(torch.device(DEVICE_TYPE))
    dense = torch.optim.SGD(dense_parameters(model), lr=setup.dense_lr)
    outputs = []
    for step in range(num_steps):
        dense.zero_grad()
        loss, out = model(
            make_batch(100 * step, 5, weighted=setup.weighted).to(torch.device(DEVICE_TYPE))
        )
        loss.backward()
        dense.step()
        outputs.append([out.detach().cpu().numpy()])
    rows = rows_of(collection_of(model).tables())
    on_cpu = new_model(setup, "cpu")
    on_cpu.ebc.load_state_dict(model.ebc.state_dict())
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    batch = make_batch(1, 5, weighted=setup.weighted).to(torch.device(DEVICE_TYPE))
    outputs_of_copies = []
    for one in (model, *copies):
        one(batch)[0].backward()
        outputs_of_copies.append(one(batch)[1].detach().cpu().numpy())
    return {
        "outputs": outputs,
        "outputs of copies": outputs_of_copies,
        "rows": rows,
        "loaded": rows_of(collection_of(on_cpu).tables()),
        "dense": dense_of(model),
    }


def freeze_after_forward(setup: Setup, positions: Sequence[int]) -> tuple[Any, str | None]:
    """Rows of tables that were, by position, frozen between forward and backward; what it raised.

    Without positions those of tables that were never trained.
    """
    ebc = new_model(setup, setup.device).ebc.requires_grad_(bool(positions))
    batch = make_batch(1, 5, weighted=setup.weighted).to(torch.device(setup.device))
    pooled = ebc(batch.sparse).values()
    error = None
    if positions:
        parameters = list(ebc.parameters())
        for position in positions:
            parameters[position].requires_grad_(False)
        try:
            pooled.sum().backward()
        except ValueError as raised:
            error = str(raised)
    del pooled
    return rows_of(ebc.tables()), error


def train_with_fixed_gradients(setup: Setup, num_steps: int) -> Any:
    """Rows after steps whose gradients do not depend on the rows."""
    ebc = new_model(setup, setup.device).ebc
    for step in range(num_steps):
        batch = make_batch(100 * step, 8).to(torch.device(setup.device))
        pooled = ebc(batch.sparse).values()
        grad = np.random.default_rng(step).normal(size=tuple(pooled.shape)).astype(np.float32)
        pooled.backward(torch.from_numpy(grad).to(pooled.device))
    return rows_of(ebc.tables())


def rates_of_copies(setup: Setup) -> dict[str, set[float]]:
    """The learning rates of tables made from ones whose rate was changed."""
    model = new_model(setup, setup.device).to(torch.device(setup.device))
    model(make_batch(1, 5).to(torch.device(setup.device)))[0].backward()
    for table in model.ebc.tables().values():
        table.learning_rate = 0.25
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    sharded = shard(copy.deepcopy(model), setup)
    moved = copy.deepcopy(model).to(torch.device("cpu"))
    models = {"deepcopy": copied, "pickle": pickled, "sharded": sharded.module, "moved": moved}
    return {
        name: {table.learning_rate for table in each.ebc.tables().values()}
        for name, each in models.items()
    }


def save_and_load(setup: Setup, folder: str) -> dict[str, Any]:
    """Saves a trained model with Saver, and loads it into a new one."""
    model = shard(new_model(setup, "meta"), setup)
    for batch in own_batches([[3] * 4] * 2, weighted=False, device=DEVICE_TYPE):
        model(batch)[0].backward()
    Saver().save(model, folder)
    other = shard(new_model(setup, "meta"), setup)
    Saver().load(other, folder)
    tables = unwrapped(other).ebc.tables()
    return {
        "saved": rows_of(unwrapped(model).ebc.tables()),
        "loaded": rows_of(tables),
        "counts": {table.update_count for table in tables.values()},
    }


def copies_beside_a_kept_output(setup: Setup, folder: str) -> tuple[list[str], int]:
    """What a save and a state_dict warn of while an older batch has not ended, and how many rows
    lack in one."""
    model = shard(new_model(setup, "meta"), setup)
    kept, *batches = own_batches([[3] * 4] * 3, weighted=False, device=DEVICE_TYPE)
    output = model(kept)
    for batch in batches:
        model(batch)[0].backward()
    tables = unwrapped(model).ebc.tables().values()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        Saver().save(model, folder)
        model.state_dict()
    held = sum(table.stats().num_rows_held_back for table in tables)
    del output
    assert not any(table.stats().num_rows_held_back for table in tables)
    return [str(each.message) for each in found if "new rows" in str(each.message)], held


def abandon_on_another_stream() -> bool:
    """Whether a batch's memory is kept while a stream that it was recorded on still reads it.

    Its arrays lie in two buffers: some are added when keys are mapped.
    """
    module = torch.get_device_module(DEVICE_TYPE)
    main, side = module.current_stream(), module.Stream()

    def sent(value: int) -> tuple[Parcel, list[torch.Tensor]]:
        parcel, items = Parcel(), []
        for _ in range(2):
            items.append(parcel.put(np.full(1000, value)))
            parcel.seal()
        with module.stream(side):
            parcel.send(torch.device(DEVICE_TYPE))
        return parcel, [parcel.get(item) for item in items]

    parcel, on_device = sent(3)
    main.wait_stream(side)
    read = torch.zeros(2, 1000, dtype=torch.int64).pin_memory()
    for own, of_device in zip(read, on_device, strict=True):
        own.copy_(of_device, non_blocking=True)
    parcel.record_stream(main)
    del parcel, on_device, of_device
    _, other = sent(4)
    side.synchronize()
    main.synchronize()
    return bool((read == 3).all()) and all(bool((each == 4).all()) for each in other)


class Regrouping(nn.Module):
    """A model that takes its pooled vectors through torchrec's regroup."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.ebc = model.ebc
        self.over = nn.Linear(8 + 3, 1)
        self.other = nn.Linear(8 + 5, 1)

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = self.ebc(batch.sparse)
        groups = [["user", "genre"], ["ad", "shared@other"]]
        first, second = KeyedTensor.regroup([pooled], groups)
        out = (self.over(first) * self.other(second)).squeeze(1)
        return ((out - 1) ** 2).mean(), out


def everything_learns(setup: Setup) -> dict[str, bool]:
    """Which tables and dense parameters one step of training has changed."""
    model = shard(Regrouping(new_model(setup, "meta")), setup)
    optimizer = optimizer_of(model, 0.1)
    (batch,) = own_batches([[8] * 4], weighted=False, device=DEVICE_TYPE)
    model(batch)  # every key gets its row
    tables = unwrapped(model).ebc.tables()
    before, dense_before = rows_of(tables), _dense(model)
    loss, _ = model(batch)
    loss.backward()
    optimizer.step()
    after, dense_after = rows_of(tables), _dense(model)
    learned = {n: not np.array_equal(dense_before[n], dense_after[n]) for n in dense_before}
    for name, rows in before.items():
        same = [np.array_equal(w, after[name][key][0]) for key, (w, _) in rows.items()]
        learned[name] = bool(rows) and not all(same)
    return learned


def _dense(model: nn.Module) -> dict[str, np.ndarray]:
    return {
        n: p.detach().cpu().numpy().copy() for n, p in model.named_parameters() if "ebc" not in n
    }


def count_pooled_keys(setup: Setup, sizes: list[list[int]]) -> dict[str, list[int]]:
    """How many keys are read for each table and batch, and how many this rank's batches have."""
    pooled: list[int] = []

    def pool_rows(store_RD: torch.Tensor, index: kernels.BagIndex) -> torch.Tensor:
        pooled.append(len(index.rows_N))
        return kernels.pool_rows(store_RD, index)

    model = shard(new_model(setup, "meta"), setup)
    own = []
    kernels.register_kernel(DEVICE_TYPE, "pool_rows", pool_rows)
    try:
        for batch in own_batches(sizes, setup.weighted):
            counts = {name: len(bags[1]) for name, bags in features_of(batch).items()}
            own += [
                sum(counts[name] for name in config.feature_names) for config in tables(num_rows=1)
            ]
            model(batch.to(model.device))[0].backward()
    finally:
        kernels.register_kernel(DEVICE_TYPE, "pool_rows", None)
    return {"pooled": pooled, "own": own}


def use_registered_kernels(setup: Setup, sizes: list[list[int]]) -> dict[str, Any]:
    """Trains with kernels of the test's own, which count their calls."""
    from on_ranks import train

    from recsdk_sharding.device.optimizers import update_rows

    calls = dict.fromkeys(("pool_rows", "plan_rows", "sum_gradients", "update_rows"), 0)

    def counted(operation: str, function: Any, *args: Any) -> Any:
        calls[operation] += 1
        return function(*args)

    def write_updates(*args: Any) -> None:
        for write in update_rows(*args):
            write()

    functions = (kernels.pool_rows, kernels.plan_rows, kernels.sum_gradients, write_updates)
    try:
        for operation, function in zip(calls, functions, strict=True):
            kernels.register_kernel(DEVICE_TYPE, operation, partial(counted, operation, function))
        result = train(setup, sizes)
    finally:
        for operation in calls:
            kernels.register_kernel(DEVICE_TYPE, operation, None)
    return {**result, "calls": calls, "num_ranks": dist.get_world_size()}


def look_up_in_tables_of_torchrec() -> str:
    """What torchrec's own sharded tables say on the device, where fbgemm has no kernels."""
    config = EmbeddingBagConfig(name="s", embedding_dim=4, num_embeddings=9, feature_names=["s"])
    model = nn.ModuleDict({"stock": EmbeddingBagCollection([config], device=torch.device("meta"))})
    apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    sharders = get_default_hybrid_sharders(host_env())
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device=DEVICE_TYPE),
        constraints={"s": ParameterConstraints(sharding_types=["table_wise"])},
    )
    sharded = DistributedModelParallel(
        model,
        device=torch.device(DEVICE_TYPE),
        plan=planner.collective_plan(model, sharders, dist.GroupMember.WORLD),
        sharders=sharders,
    )
    batch = KeyedJaggedTensor(["s"], torch.tensor([8, 0, 8]), lengths=torch.tensor([2, 1]))
    try:
        sharded.module["stock"](batch.to(torch.device(DEVICE_TYPE))).values()
    except BackendUnavailable as error:
        return str(error)
    return ""


def initialize_rows() -> tuple[str, bool]:
    """What torch.nn.init says of a store on the device, and whether the store is as it was."""
    (weight, *_) = new_model(Setup(), DEVICE_TYPE).ebc.parameters()
    before = weight.detach().clone()
    try:
        nn.init.kaiming_normal_(weight)
    except ValueError as error:
        return str(error), torch.equal(weight.detach(), before)
    return "", torch.equal(weight.detach(), before)
