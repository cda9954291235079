"""What the tests run on every rank; each function returns plain values."""

from __future__ import annotations

import gc
import time
import weakref
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from loops import LOOPS, plain
from plans import PLANS
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.train_pipeline import (
    EvalPipelineSparseDist,
    TrainPipelineSparseDist,
    train_pipelines,
)
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from worlds import (
    Batch,
    Setup,
    collection_of,
    configs_of,
    dense_of,
    host_env,
    joined,
    make_batch,
    new_model,
    optimizer_of,
    rows_of,
    shard,
    tables,
    unwrapped,
)

import recsdk_core
from recsdk_core import Outcome, RecsdkError
from recsdk_sharding import HashEmbeddingBagCollection, get_default_hybrid_sharders
from recsdk_sharding._batch import features
from recsdk_sharding._batch.assembly import HostAssembly
from recsdk_sharding._batch.host_job import Received
from recsdk_sharding.exchange import EndOfData, exchanges_of, go_on


def own_batches(
    sizes: list[list[int]], weighted: bool, seed: int = 0, device: str = "cpu"
) -> list[Batch]:
    """This rank's batches: `sizes` has a row for each step with the size on each rank."""
    rank = dist.get_rank()
    return [
        make_batch(seed + 100 * step + rank, row[rank], weighted=weighted).to(torch.device(device))
        for step, row in enumerate(sizes)
    ]


def modules_that_a_model_adds(setup: Setup) -> int:
    """How many more the exchange knows of."""
    first = shard(new_model(setup, "meta"), setup)
    (exchange,) = exchanges_of(first)
    before = exchange.num_modules
    shard(new_model(setup, "meta"), setup)
    return exchange.num_modules - before


def train(
    setup: Setup, sizes: list[list[int]], how: str = "plain", *, is_frozen: bool = False
) -> dict[str, Any]:
    """Trains on this rank's batches, tables too unless frozen; outputs, rows and dense weights."""
    model = shard(new_model(setup, "meta"), setup)
    collection_of(unwrapped(model)).requires_grad_(not is_frozen)
    optimizer = optimizer_of(model, setup.dense_lr)
    batches = own_batches(sizes, setup.weighted)
    outputs = [out.detach().cpu().numpy() for out in LOOPS[how](model, optimizer, batches)]
    tables = collection_of(unwrapped(model)).tables()
    return {
        "outputs": outputs,
        "rows": rows_of(tables),
        "dense": dense_of(model),
        "counts": {k: t.update_count for k, t in tables.items()},
        "has_grad": [
            n
            for n, p in model.named_parameters()
            if "ebc." in n and "embedding" in n and p.grad is not None
        ],
    }


class BesideStock(nn.Module):
    """A model of hash tables and of a table of torchrec's, which read the same ids.

    They have one optimizer, and torchrec's, which writes to its arguments, are sharded first.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        table = EmbeddingBagConfig(
            name="stock", embedding_dim=4, num_embeddings=50, feature_names=["user"]
        )
        self.stock = EmbeddingBagCollection([table], device=torch.device("meta"))
        self.ebc = HashEmbeddingBagCollection(tables(), device=torch.device("meta"))
        _apply_optimizer_in_backward(setup.optimizer, self.parameters(), dict(setup.arguments))

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.ebc(batch.sparse).values().sum(1) + self.stock(batch.sparse).values().sum(1)
        return ((out - 1) ** 2).mean(), out


def train_beside_stock(setup: Setup, kind: str | None = None, **options: Any) -> dict[str, Any]:
    """Outputs and rows after steps by one of torchrec's pipelines, or plain ones."""
    stock = ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])
    model = shard(BesideStock(setup), setup, constraints={"stock": stock})
    with torch.no_grad():
        for weight in unwrapped(model).stock.parameters():
            weight.fill_(0.5)
    optimizer = model.fused_optimizer
    batches = own_batches([[4, 4]] * 4, weighted=False)
    for batch in batches:
        batch.sparse.values().remainder_(50)
    if kind is None:
        outputs = list(plain(model, optimizer, batches))
    else:
        pipeline = getattr(train_pipelines, kind)(model, optimizer, model.device, **options)
        iterator = iter(batches)
        outputs = [pipeline.progress(iterator) for _ in batches]
    numbers = [out.detach().numpy() for out in outputs]
    return {"outputs": numbers, "rows": rows_of(unwrapped(model).ebc.tables())}


def evaluate(setup: Setup, sizes: list[list[int]]) -> dict[str, Any]:
    """Trains, then evaluates by torchrec's pipeline and plainly; rows before and after."""
    model = shard(new_model(setup, "meta"), setup)
    batches = own_batches(sizes, setup.weighted)
    list(plain(model, optimizer_of(model, setup.dense_lr), batches))
    before = rows_of(unwrapped(model).ebc.tables())
    model.eval()
    seen = own_batches(sizes, setup.weighted, seed=7)
    with torch.no_grad():
        expected = [
            model(batch.to(model.device))[1].cpu().numpy() for batch in seen
        ]  # the pipeline changes the model
    pipeline = EvalPipelineSparseDist(model, optimizer_of(model, setup.dense_lr), model.device)
    iterator = iter(seen)
    piped = [pipeline.progress(iterator).detach().cpu().numpy() for _ in seen]
    after = rows_of(unwrapped(model).ebc.tables())
    return {"piped": piped, "plain": expected, "before": before, "after": after}


def switch_modes(setup: Setup, kind: str, trains: bool) -> dict[str, Any]:
    """What a pipeline of torchrec's says to another mode with a batch in flight.

    Then the batch is dropped, and the pipeline goes on in that mode.
    """
    model = shard(new_model(setup, "meta"), setup)
    pipeline = getattr(train_pipelines, kind)(
        model, optimizer_of(model, setup.dense_lr), model.device
    )
    iterator = iter(own_batches([[3, 3]] * 5, setup.weighted))
    model.train(trains)
    pipeline.progress(iterator)
    model.train(not trains)
    said = ""
    try:
        pipeline.progress(iterator)
    except RuntimeError as error:
        said = str(error)
    pipeline.reset()
    before = rows_of(unwrapped(model).ebc.tables())
    output = pipeline.progress(iterator).detach().numpy()
    after = rows_of(unwrapped(model).ebc.tables())
    return {"said": said, "output": output, "before": before, "after": after}


class _Flaky:
    """Gives batches, but raises once in place of one, which comes next."""

    def __init__(self, batches: list[Batch], raises_at: int | None) -> None:
        self._left = batches[::-1]
        self._raises_when_left = None if raises_at is None else len(batches) - raises_at

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if len(self._left) == self._raises_when_left:
            self._raises_when_left = None
            raise OSError("no disk today")
        if not self._left:
            raise StopIteration
        return self._left.pop()


def train_from_flaky_iterators(
    setup: Setup, sizes: list[list[int]], kind: str, guilty: list[int], raises_at: int
) -> dict[str, Any]:
    """As `train`, by a pipeline that is asked again where the iterator of guilty ranks raised."""
    model = shard(new_model(setup, "meta"), setup)
    optimizer = optimizer_of(model, setup.dense_lr)
    pipeline = getattr(train_pipelines, kind)(model, optimizer, model.device)
    is_guilty = dist.get_rank() in guilty
    iterator = _Flaky(own_batches(sizes, setup.weighted), raises_at if is_guilty else None)
    outputs: list[Any] = []
    errors = [
        _error_of(lambda: outputs.append(pipeline.progress(iterator).detach().numpy()))
        for _ in range(len(sizes) + is_guilty)
    ]
    assert [type(error) for error in errors if error is not None] == [OSError] * is_guilty
    tables = unwrapped(model).ebc.tables()
    return {
        "outputs": outputs,
        "rows": rows_of(tables),
        "dense": dense_of(model),
        "counts": {k: t.update_count for k, t in tables.items()},
        "has_grad": [],
    }


def attach_another(setup: Setup, sizes: list[list[int]]) -> str:
    """What a pipeline says to another model while it has batches in flight of the first."""
    model, other = (shard(new_model(setup, "meta"), setup) for _ in range(2))
    pipeline = TrainPipelineSparseDist(model, optimizer_of(model, setup.dense_lr), model.device)
    iterator = iter(own_batches(sizes, setup.weighted))
    pipeline.progress(iterator)
    pipeline.detach()
    try:
        pipeline.attach(other)
    except ValueError as error:
        said = str(error)
    pipeline.progress(iterator)  # it goes on with the first
    return said


def train_ahead(
    setup: Setup, sizes: list[list[int]], depth: int, looks_at: list[int]
) -> dict[str, Any]:
    """Trains with host work `depth` batches ahead; looks at the model after some steps.

    A look is an evaluation, an export and the number of rows.
    """
    model = shard(new_model(setup, "meta"), setup)
    ebc = unwrapped(model).ebc
    optimizer = optimizer_of(model, setup.dense_lr)
    batches = own_batches(sizes, setup.weighted)
    device = torch.device(setup.device)
    started: deque[Any] = deque()
    outputs, looks = [], []
    for step, batch in enumerate(batches):
        for ahead in batches[step + len(started) : step + depth + 1]:
            context = ebc.create_context()
            started.append((context, ebc.input_dist(context, ahead.sparse)))
        context, request = started.popleft()
        ebc.forward = partial(_compute, ebc, context, request)
        optimizer.zero_grad()
        loss, out = model(batch.to(device))
        loss.backward()
        optimizer.step()
        del ebc.forward, context, request
        outputs.append(out.detach().cpu().numpy())
        if step in looks_at:
            looks.append(_look(model, make_batch(9000 + dist.get_rank(), 4).to(device)))
    rows = rows_of(ebc.tables())
    return {"outputs": outputs, "rows": rows, "dense": dense_of(model), "looks": looks}


def _compute(ebc: Any, context: Any, request: Any, features: Any) -> Any:
    return ebc.compute_and_output_dist(context, request.wait().wait())


def _look(model: Any, batch: Batch) -> dict[str, Any]:
    tables = unwrapped(model).ebc.tables()
    model.eval()
    with torch.no_grad():
        first = model(batch)[1].cpu().numpy()
        again = model(batch)[1].cpu().numpy()
    model.train()
    assert np.array_equal(first, again)
    counts = {name: len(table) for name, table in tables.items()}
    return {"out": first, "rows": rows_of(tables), "counts": counts}


def train_sums(setup: Setup, num_batches: int, together: int) -> dict[str, Any]:
    """Trains the tables alone on the sum of their vectors, `together` batches at once.

    The gradient then depends on no row, so however the batches are cut it has one sum.
    """
    model = shard(new_model(setup, "meta"), setup)
    ebc = unwrapped(model).ebc
    batches = own_batches([[3] * 4] * num_batches, setup.weighted)
    counts = []
    for first in range(0, num_batches, together):
        found = ebc(joined(batches[first : first + together]).sparse)
        parts = [found] if not setup.is_sequence else list(found.values())
        (sum(_weighted_sum(part.values()) for part in parts)).backward()
        counts.append({t.update_count for t in ebc.tables().values()})
    return {"rows": rows_of(ebc.tables()), "counts": counts}


def _weighted_sum(values: torch.Tensor) -> torch.Tensor:
    weights = torch.arange(values.shape[1]).to(values.device) / 10
    return (values * weights).sum()


def train_sums_of_each(
    setups: list[tuple[Setup, Setup]], steps: int
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """For each pair: two updates by the first in small batches, by the second in large ones."""
    num = 2 * steps
    return [(train_sums(small, num, 1), train_sums(large, num, steps)) for small, large in setups]


def insert_only(setup: Setup, sizes: list[list[int]]) -> Any:
    """Rows after training forwards without a backward."""
    model = shard(new_model(setup, "meta"), setup)
    for batch in own_batches(sizes, setup.weighted, device=setup.device):
        model(batch)
    return rows_of(unwrapped(model).ebc.tables())


def initial_and_trained(setup: Setup, sizes: list[list[int]]) -> dict[str, Any]:
    """Rows and dense weights before and after a step in which every key has its row already."""
    model = shard(new_model(setup, "meta"), setup)
    optimizer = optimizer_of(model, setup.dense_lr)
    batches = own_batches(sizes, setup.weighted)
    model(batches[0])
    before = rows_of(unwrapped(model).ebc.tables()), dense_of(model)
    list(plain(model, optimizer, batches))
    return {"before": before, "after": (rows_of(unwrapped(model).ebc.tables()), dense_of(model))}


def pool_by_hand(weights: list[float] | None) -> dict[str, Any]:
    """Pooled vectors and rows of a small batch, by feature, after a training forward."""
    setup = Setup(weighted=weights is not None)
    model = shard(new_model(setup, "meta"), setup)
    lengths = {"shared": [2, 0], "user": [0, 2], "ad": [0, 0], "genre": [0, 2]}
    sparse = KeyedJaggedTensor(
        keys=list(lengths),
        values=torch.tensor([5, 6, 5, 7, 5, 8]),
        lengths=torch.tensor(list(lengths.values())).flatten(),
        weights=None if weights is None else torch.tensor(weights),
    )
    ebc = unwrapped(model).ebc
    pooled = {k: v.detach().numpy() for k, v in ebc(sparse).to_dict().items()}
    return {"pooled": pooled, "rows": rows_of(ebc.tables())}


def _pool_backward(ebc: Any, context: Any, request: Any) -> None:
    _compute(ebc, context, request, None).values().sum().backward()


def _error_of(call: Any) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


BAD_INPUTS = ("float ids", "missing feature", "lengths", "not a batch", "late")


def fail_once(kind: str, bad_rank: int, depth: int) -> dict[str, Any]:
    """Trains, gives one rank a bad batch as the third, and trains on after a reset."""
    setup = Setup()
    model = shard(new_model(setup, "meta"), setup)
    ebc = unwrapped(model).ebc
    batches = own_batches([[3, 3, 3, 3]] * 6, weighted=False)
    inputs: list[Any] = [batch.sparse for batch in batches]
    if dist.get_rank() == bad_rank:
        inputs[2] = _spoil(kind, inputs[2])
    started: deque[Any] = deque()
    errors: list[Any] = []
    start = time.monotonic()
    for step in range(len(inputs)):
        while len(started) <= depth and step + len(started) < len(inputs):
            context = ebc.create_context()
            started.append((context, ebc.input_dist(context, inputs[step + len(started)])))
        context, request = started.popleft()
        error = _error_of(partial(_pool_backward, ebc, context, request))
        rank = getattr(error, "rank", None)
        errors.append(error and (type(error).__name__, str(error), rank))
    seconds = time.monotonic() - start
    del context, request
    states = [exchange.state for exchange in exchanges_of(model)]
    _heal(kind, bad_rank)
    for exchange in exchanges_of(model):
        exchange.reset()
    outputs = [out.detach().numpy() for out in plain(model, optimizer_of(model, 0.1), batches[:1])]
    return {"errors": errors, "seconds": seconds, "states": states, "outputs": outputs}


def _spoil(kind: str, sparse: KeyedJaggedTensor) -> Any:
    values, lengths = sparse.values(), sparse.lengths()
    if kind == "float ids":
        return KeyedJaggedTensor(sparse.keys(), values.float(), lengths=lengths)
    if kind == "missing feature":
        names = ["who", *sparse.keys()[1:]]
        return KeyedJaggedTensor(names, values, lengths=lengths)
    if kind == "lengths":
        return KeyedJaggedTensor(sparse.keys(), values[:-1], lengths=lengths)
    if kind == "not a batch":
        return None
    features.lease_tables = _refuse  # after the ids have been exchanged
    return sparse


def _refuse(tables: Any, step: int | None) -> Any:
    raise RuntimeError("no lease today")


def _heal(kind: str, bad_rank: int) -> None:
    if kind == "late" and dist.get_rank() == bad_rank:
        features.lease_tables = recsdk_core.lease_tables


def restore_after_a_failure(bad_rank: int) -> dict[str, Any]:
    """Loads a state while the error is held that one rank raised once its ids were mapped."""
    setup = Setup()
    model = shard(new_model(setup, "meta"), setup)
    first, second = own_batches([[3, 3, 3, 3]] * 2, weighted=False)
    optimizer = optimizer_of(model, 0.1)
    list(plain(model, optimizer, [first]))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    rows = rows_of(unwrapped(model).ebc.tables())
    whole = Received._assembly
    if dist.get_rank() == bad_rank:
        Received._assembly = _have_no_memory  # type: ignore[method-assign]
    try:
        error = _error_of(lambda: list(plain(model, optimizer, [second])))
    finally:
        Received._assembly = whole  # type: ignore[method-assign]
    for exchange in exchanges_of(model):
        exchange.reset()
    model.load_state_dict(state)
    return {
        "error": type(error).__name__,
        "before": rows,
        "after": rows_of(unwrapped(model).ebc.tables()),
    }


def fail_to_map(sharding: str, is_bounded: bool, bad_rank: int) -> dict[str, Any]:
    """Goes on after ids were mapped on all ranks but one; then again from a state before."""
    limits = {"max_rows": 8, "eviction": recsdk_core.Evict.lru()} if is_bounded else {}
    setup = Setup(plan=PLANS[2][sharding], options=limits)
    model = shard(new_model(setup, "meta"), setup)
    batches = own_batches([[5, 5]] * 4, weighted=False)
    optimizer = optimizer_of(model, 0.1)
    list(plain(model, optimizer, batches[:2]))
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def train(of_step: Batch) -> str:
        error = _error_of(lambda: list(plain(model, optimizer, [of_step])))
        for exchange in exchanges_of(model):
            exchange.reset()
        return str(error)

    if dist.get_rank() == bad_rank:
        features.lease_tables = _refuse
    errors = [train(batches[2])]
    _heal("late", bad_rank)
    errors.append(train(batches[3]))
    model.load_state_dict(state)
    errors += [train(batches[2]), train(batches[3])]
    return {"errors": errors, "rows": rows_of(unwrapped(model).ebc.tables())}


def change_rows_on_one_rank(sharding: str, how: str, bad_rank: int) -> list[str]:
    """How training ends: alike, after rows were changed on one rank, and once a state is loaded.

    Then after a change with one batch, whose rows no other batch tells of, and once it is loaded.
    """
    setup = Setup(plan=PLANS[2][sharding])
    model = shard(new_model(setup, "meta"), setup)
    batches = own_batches([[5, 5]] * 12, weighted=False)
    optimizer = optimizer_of(model, 0.1)

    def train(some: list[Batch]) -> str:
        error = _error_of(lambda: list(LOOPS[how](model, optimizer, some)))
        go_on(model)
        return str(error)

    endings = [train(batches)]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for some in (batches, batches[:1]):
        for table in unwrapped(model).ebc.tables().values() if dist.get_rank() == bad_rank else ():
            keys = np.concatenate([batch.keys for batch in table.export()])
            table.upsert(keys, table.lookup(keys) + np.float32(1))
        endings.append(train(some))
        model.load_state_dict(dict(state))  # under DDP torchrec renames what it is given
        endings.append(train(batches))
    return endings


def _have_no_memory(received: Received) -> Any:
    raise MemoryError("no memory for the plan")


def run_out(numbers: list[int], depth: int) -> dict[str, Any]:
    """Trains while every rank has batches, `numbers` of them; twice over."""
    model = shard(new_model(Setup(), "meta"))
    exchange = exchanges_of(model)[0]
    ebc = unwrapped(model).ebc
    rounds = []
    for _ in range(2):
        mine = own_batches([[2] * 4] * numbers[dist.get_rank()], weighted=False)
        started: deque[Any] = deque()
        num_trained, ended = 0, None
        for batch in mine:
            context = ebc.create_context()
            started.append((context, ebc.input_dist(context, batch.sparse)))
        if len(mine) < max(numbers):
            exchange.announce_end()
        while started:
            error = _error_of(lambda: _pool_backward(ebc, *started.popleft()))  # noqa: B023
            assert error is None or isinstance(error, EndOfData)
            num_trained += error is None
            ended = ended or (error and str(error))
        rounds.append((num_trained, ended, exchange.state))
        exchange.announce_end()
        exchange.reset()
    counts = {name: table.update_count for name, table in ebc.tables().items()}
    return {"rounds": rounds, "counts": counts}


def save(setup: Setup, sizes: list[list[int]]) -> dict[str, Any]:
    """Trains, and gives this rank's state_dict of the whole model."""
    model = shard(new_model(setup, "meta"), setup)
    batches = own_batches(sizes, setup.weighted, device=setup.device)
    list(plain(model, optimizer_of(model, setup.dense_lr), batches))
    state = {name: value.detach().cpu().numpy() for name, value in model.state_dict().items()}
    return {"state": state, "rows": rows_of(unwrapped(model).ebc.tables())}


def load(setup: Setup, state: dict[str, np.ndarray]) -> dict[str, Any]:
    """Loads into a model that has trained on something else; rows, and one more step."""
    model = shard(new_model(setup, "meta"), setup)
    optimizer = optimizer_of(model, setup.dense_lr)
    list(plain(model, optimizer, own_batches([[3] * 4], setup.weighted, 77, setup.device)))
    tensors = {name: torch.from_numpy(np.asarray(value)) for name, value in state.items()}
    problems = model.load_state_dict(tensors)
    tables = unwrapped(model).ebc.tables()
    rows = rows_of(tables)
    counts = {name: table.update_count for name, table in tables.items()}
    sizes = [[1] * dist.get_world_size()]
    list(plain(model, optimizer, own_batches(sizes, setup.weighted, 88, setup.device)))
    return {
        "rows": rows,
        "counts": counts,
        "problems": [*problems.missing_keys, *problems.unexpected_keys],
        "dense": dense_of(model),
    }


def load_dense(setup: Setup, state: dict[str, np.ndarray]) -> tuple[list[str], str]:
    """What loading weights of dense tables gives: names that were not used, and the error."""
    model = shard(new_model(setup, "meta"), setup)
    tensors = {name: torch.from_numpy(value) for name, value in state.items()}
    own = dict(tensors)  # torchrec renames what is in it
    unexpected = model.load_state_dict(own, strict=False).unexpected_keys
    return unexpected, str(_error_of(lambda: model.load_state_dict(tensors)))


def schedule(num_steps: int) -> list[list[float]]:
    """The learning rate that each table trained a step with, under a scheduler."""
    setup = Setup(torch.optim.Adagrad, {"lr": 0.4})
    model = shard(new_model(setup, "meta"), setup)
    optimizer = optimizer_of(model, 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    rates = []
    for batch in own_batches([[2] * 4] * num_steps, weighted=False):
        optimizer.zero_grad()
        model(batch)[0].backward()
        rates.append([t.learning_rate for t in unwrapped(model).ebc.tables().values()])
        optimizer.step()
        scheduler.step()
    return rates


def plan_freely() -> dict[str, Any]:
    """Shards a model with hash tables and stock tables without constraints on the former."""
    model = new_model(Setup(), "meta")
    stock = [EmbeddingBagConfig(name="s", embedding_dim=4, num_embeddings=9, feature_names=["s"])]
    model.stock = EmbeddingBagCollection(device=torch.device("meta"), tables=stock)
    _apply_optimizer_in_backward(torch.optim.SGD, model.stock.parameters(), {"lr": 0.1})
    constraints = {"s": ParameterConstraints(sharding_types=["row_wise"])}
    sharded = shard(model, constraints=constraints)
    sparse = KeyedJaggedTensor(["s"], torch.tensor([8, 0, 8]), lengths=torch.tensor([2, 1]))
    inner = unwrapped(sharded)
    before = inner.stock(sparse).values()
    before.sum().backward()
    plan = {
        path: {name: p.sharding_type for name, p in tables.items()}
        for path, tables in sharded.plan.plan.items()
    }
    changed = inner.stock(sparse).values() - before
    return {"plan": plan, "changed": changed.detach().numpy()}


def refuse_plans() -> list[str]:
    """The messages for plans that hash tables cannot follow."""
    from torchrec.distributed.types import ParameterSharding

    model = new_model(Setup(), "meta")
    sharder = get_default_hybrid_sharders(host_env())[0]
    env = ShardingEnv.from_process_group(dist.GroupMember.WORLD)
    plans = [("shape_wise", "fused"), ("table_wise", "quant")]
    messages = []
    for kind, kernel in plans:
        names = [config.name for config in configs_of(model)]
        plan = {name: ParameterSharding(kind, kernel, [0], None) for name in names}
        messages.append(str(_error_of(partial(sharder.shard, model.ebc, plan, env))))
    return messages


def refuse_host_environments() -> list[str]:
    """The messages for host environments that do not fit."""
    size, rank = dist.get_world_size(), dist.get_rank()
    own = dist.new_group([rank], use_local_synchronization=True)
    bad: list[Any] = [
        None,
        ShardingEnv(size, rank, None),
        ShardingEnv(size, rank, dist.GroupMember.WORLD),
        ShardingEnv(size, rank, own),
        ShardingEnv(size, (rank + 1) % size, host_env().process_group),
    ]
    return [str(_error_of(partial(get_default_hybrid_sharders, env))) for env in bad]


def train_unsharded_in_ddp() -> str:
    """What an unsharded model does in DistributedDataParallel."""
    inner = new_model(Setup(), "cpu")
    # torch's own support for optimizers in backward under DDP needs an accelerator.
    handles = {name for name, _ in inner.named_parameters() if name.startswith("ebc.")}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, handles)
    model = DistributedDataParallel(inner)
    try:
        for _ in range(3):
            model(make_batch(1, 3))[0].backward()
    except RuntimeError as error:
        return str(error)
    assert all(parameter.grad is None for parameter in inner.ebc.parameters())
    return f"trained {[table.update_count for table in inner.ebc.tables().values()]}"


def forget_model() -> list[bool]:
    """Whether the tables of a trained model that nobody refers to are gone."""
    setup = Setup(torch.optim.Adagrad, {"lr": 0.1})
    model = shard(new_model(setup, "meta"), setup)
    tables = [weakref.ref(t) for t in unwrapped(model).ebc.tables().values()]
    list(plain(model, optimizer_of(model, 0.1), own_batches([[3] * 4] * 2, weighted=False)))
    del model
    gc.collect()
    return [table() is None for table in tables]


def keep_losses(num_steps: int) -> int:
    """How many plans of exchanges are alive after steps whose losses are kept."""
    model = shard(new_model(Setup(torch.optim.Adagrad, {"lr": 0.1}), "meta"))
    losses = []
    for batch in own_batches([[3] * 4] * num_steps, weighted=False):
        losses.append(model(batch)[0])
        losses[-1].backward()
    gc.collect()
    assert len(losses) == num_steps
    return sum(type(made) is HostAssembly for made in gc.get_objects())


def keep_rows() -> dict[str, Any]:
    """Shards a model that was trained unsharded; rows before and after."""
    model = new_model(Setup(torch.optim.Adagrad, {"lr": 0.1}), "cpu")
    model(make_batch(3, 5))[0].backward()
    before = rows_of(model.ebc.tables())
    return {"before": before, "after": rows_of(unwrapped(shard(model)).ebc.tables())}


def disagree() -> tuple[str, str]:
    """What a rank gets when rank 0 trains and the others evaluate."""
    model = shard(new_model(Setup(), "meta"))
    model.train(dist.get_rank() == 0)
    try:
        model(make_batch(1, 2))
    except RecsdkError as error:
        found = type(error).__name__, str(error)
    exchanges_of(model)[0].reset()
    return found


def fill_up(max_rows: int) -> dict[str, int]:
    """Rows of this rank's shards when more ids come than fit."""
    setup = Setup(options={"max_rows": max_rows})
    model = shard(new_model(setup, "meta"), setup)
    list(plain(model, optimizer_of(model, 0.1), own_batches([[20] * 4] * 3, weighted=False)))
    return {name: len(table) for name, table in unwrapped(model).ebc.tables().items()}


def overfill(device: str) -> dict[str, Any]:
    """Steps of a model whose tables raise when they are full, until some have raised."""
    setup = Setup(options={"num_rows": 12, "max_rows": 12, "on_full": "raise"}, device=device)
    model = shard(new_model(setup, "meta"), setup)
    tables = unwrapped(model).ebc.tables()
    optimizer = optimizer_of(model, 0.1)
    errors: list[Any] = []
    for batch in own_batches([[20] * 4] * 4, weighted=False, device=device):
        before = {name: (len(table), table.update_count) for name, table in tables.items()}
        error = _error_of(partial(_step, model, optimizer, batch))
        errors.append(error and (type(error).__name__, str(error), getattr(error, "rank", None)))
        if error is not None:
            break
    after = {name: (len(table), table.update_count) for name, table in tables.items()}
    counts = [table.stats().outcomes[Outcome.REFUSED] for table in tables.values()]
    exchanges_of(model)[0].reset()
    return {"errors": errors, "before": before, "after": after, "refused": sum(counts)}


def _step(model: Any, optimizer: Any, batch: Any) -> None:
    optimizer.zero_grad()
    model(batch)[0].backward()
    optimizer.step()
