"""Steps of a model on one of several ranks: recsdk's tables beside torchrec's, in turns.

    torchrun ... -m benchmarks.steps CASE        CASE: a `Case` as JSON

Both train the same batches from the same weights: ours from raw ids, torchrec's from dense indexes,
since it does not hash. All rows exist beforehand, and the outputs of both are compared. The first
rank prints one JSON object: elapsed time, and processor time of all threads of a rank, which counts
beside other programs too.

Shape letters: B samples, F features, D row width.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from itertools import cycle
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingEnv
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from benchmarks import records
from benchmarks.draws import draw_indexes, scramble
from recsdk_pipeline import HybridTrainPipelineSparseDist
from recsdk_pipeline.data import ClickBatch
from recsdk_sharding import (
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    HashEmbeddingShardingPlanner,
    ShardedHashEmbeddingBagCollection,
    get_default_hybrid_sharders,
)
from recsdk_sharding.exchange import exchanges_of
from recsdk_sharding.placement.ranks import RankMap

CPU = torch.device("cpu")
DENSE_COLUMNS = 13
NUM_BATCHES = 8
OPTIMIZER = {"lr": 0.05, "eps": 1e-8}
OURS, STOCK, MANAGED = "recsdk", "torchrec", "torchrec managed collisions"
SENT = "recsdk without shared memory"
FREE = "dense layers alone"
HASHED = (OURS, SENT)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained."""

    part: Literal["sparse", "whole"]
    """The tables alone, or a DLRM in each one's pipeline."""
    sharding_type: str | None = "row_wise"
    """None: what each one's planner chooses."""
    num_tables: int = 26
    dim: int = 64
    num_rows: int = 100_000
    """Of each table."""
    batch_size: int = 2048
    """Of each rank."""
    bag_size: int = 1
    """Ids of each bag."""
    dense_layers: tuple[int, ...] = (64,)
    """Widths of a DLRM's layers over its dense inputs; one of `dim` follows."""
    over_layers: tuple[int, ...] = (64,)
    """Widths of its layers over the interactions; one of 1 follows."""
    turns: int = 9
    steps_a_turn: int = 4
    """After another's turn the first steps find little in the caches."""
    with_managed_collisions: bool = False
    """Whether torchrec's collection that maps raw ids itself takes part."""
    with_sending: bool = False
    """Whether ours takes part a second time, with results that go through the process group."""
    with_dense_alone: bool = False
    """Whether a whole step takes part whose tables cost nothing: what no tables can do better."""

    def features(self) -> list[str]:
        return [f"feature_{number}" for number in range(self.num_tables)]


def indexes_of(case: Case, seed: int) -> torch.Tensor:
    """Row indexes of one batch, feature after feature: (F * B * bag_size,)."""
    random = np.random.default_rng([seed, dist.get_rank()])
    count = case.num_tables * case.batch_size * case.bag_size
    return torch.from_numpy(draw_indexes(random, case.num_rows, count, "zipf"))


def raw_ids(indexes: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(scramble(indexes.numpy() + 1))


def bags(case: Case, ids: torch.Tensor, batch_size: int) -> KeyedJaggedTensor:
    bag_size = len(ids) // (case.num_tables * batch_size)
    lengths = torch.full((case.num_tables * batch_size,), bag_size)
    return KeyedJaggedTensor(case.features(), ids, lengths=lengths)


# ---- the two models -----------------------------------------------------------------------------


class ClickModel(nn.Module):
    """torchrec's DLRM, and its loss."""

    def __init__(self, case: Case, tables: nn.Module) -> None:
        super().__init__()
        dense, over = [*case.dense_layers, case.dim], [*case.over_layers, 1]
        self.dlrm = DLRM(tables, DENSE_COLUMNS, dense, over)

    def forward(self, batch: ClickBatch) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.dlrm(batch.dense, batch.sparse).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, logits.detach()


class TablesOnly(nn.Module):
    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.tables(ids)
        if isinstance(pooled, tuple):  # of managed collisions
            pooled = pooled[0]
        self.names: list[str] = list(pooled.keys())  # torchrec orders them by the plan
        values: torch.Tensor = pooled.values()
        return values


def collection(case: Case, name: str) -> nn.Module:
    config = HashEmbeddingBagConfig if name in HASHED else EmbeddingBagConfig
    tables = [
        config(
            name=f"table_{feature}",
            feature_names=[feature],
            embedding_dim=case.dim,
            num_embeddings=case.num_rows,
            init_fn=partial(nn.init.constant_, val=0.01),
        )
        for feature in case.features()
    ]
    kind = HashEmbeddingBagCollection if name in HASHED else EmbeddingBagCollection
    made: nn.Module = kind(device=torch.device("meta"), tables=tables)
    return managed(case, made) if name == MANAGED else made


def managed(case: Case, tables: Any) -> nn.Module:
    """torchrec's tables behind its own mapping of ids, which evicts by least use."""
    modules = {
        f"table_{feature}": MCHManagedCollisionModule(
            zch_size=case.num_rows,
            device=CPU,
            eviction_interval=1,
            eviction_policy=LRU_EvictionPolicy(),
        )
        for feature in case.features()
    }
    collisions = ManagedCollisionCollection(modules, tables.embedding_bag_configs())
    made: nn.Module = ManagedCollisionEmbeddingBagCollection(tables, collisions)
    return made


def sharders_for(case: Case, name: str) -> list[Any]:
    if name in HASHED:
        host = ShardingEnv(dist.get_world_size(), dist.get_rank(), dist.new_group(backend="gloo"))
        return list(get_default_hybrid_sharders(host_env=host))
    if name == MANAGED:
        return [ManagedCollisionEmbeddingBagCollectionSharder()]
    if case.sharding_type is None:
        return [EmbeddingBagCollectionSharder()]
    return [StockSharder(case.sharding_type)]


class StockSharder(EmbeddingBagCollectionSharder):  # type: ignore[misc]
    """torchrec's, offering on a cpu too what it offers by itself on other devices only."""

    def __init__(self, sharding_type: str) -> None:
        super().__init__()
        self._sharding_type = sharding_type

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [self._sharding_type]


def env_of(name: str) -> ShardingEnv | None:
    """The ranks of a model; None: all, on their own group, which shares memory if it can."""
    os.environ["RECSDK_SHARED_MEMORY"] = "0" if name == SENT else "1"
    return ShardingEnv.from_process_group(dist.new_group()) if name == SENT else None


def sharded(case: Case, name: str) -> tuple[DistributedModelParallel, Any]:
    """The model over all ranks, and its optimizer."""
    torch.manual_seed(0)
    tables = collection(case, name)
    model = TablesOnly(tables) if case.part == "sparse" else ClickModel(case, tables)
    is_dense = name == STOCK and case.sharding_type == "data_parallel"  # no fused kernel there
    if not is_dense:
        apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), dict(OPTIMIZER))
    sharders = sharders_for(case, name)
    constraint = ParameterConstraints()
    if case.sharding_type is not None:
        constraint = ParameterConstraints(sharding_types=[case.sharding_type])
    kind: Any = HashEmbeddingShardingPlanner if name in HASHED else EmbeddingShardingPlanner
    planner = kind(
        batch_size=case.batch_size,
        topology=Topology(
            world_size=dist.get_world_size(),
            local_world_size=dist.get_world_size(),
            compute_device="cpu",
        ),
        constraints={f"table_{feature}": constraint for feature in case.features()},
    )
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    spread = DistributedModelParallel(model, env_of(name), device=CPU, plan=plan, sharders=sharders)
    optimizers = [spread.fused_optimizer]
    if rest := dict(in_backward_optimizer_filter(spread.named_parameters())):
        of_dense: Any = RowWiseAdagrad if case.part == "sparse" else torch.optim.Adagrad
        dense = partial(of_dense, **OPTIMIZER)
        optimizers.append(KeyedOptimizerWrapper(rest, dense))
    return spread, CombinedOptimizer(optimizers)


# ---- contestants --------------------------------------------------------------------------------


class SparsePart:
    """Input dist, lookup, output dist, backward and update of the tables alone."""

    def __init__(self, case: Case, name: str) -> None:
        self.model, self._optimizer = sharded(case, name)
        ids = [indexes_of(case, seed) for seed in range(NUM_BATCHES)]
        if name in HASHED:
            fill(case, self.model)
        if name != STOCK:
            ids = [raw_ids(indexes) for indexes in ids]
        self._batches = cycle([bags(case, batch, case.batch_size) for batch in ids])
        self._gradient = torch.full((case.batch_size, case.num_tables * case.dim), 0.01)

    def step(self) -> torch.Tensor:
        values: torch.Tensor = self.model(next(self._batches))
        torch.autograd.backward(values, self._gradient)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return values.detach()

    def in_order(self, values: torch.Tensor) -> torch.Tensor:
        """A step's outputs, feature by feature by name: (F, B, D)."""
        (tables,) = (m for m in self.model.modules() if isinstance(m, TablesOnly))
        parts = values.view(len(values), len(tables.names), -1).transpose(0, 1)
        order = sorted(range(len(tables.names)), key=tables.names.__getitem__)
        return parts[order]

    def start_turn(self) -> int:
        """Steps that begin a turn: none, as nothing runs ahead."""
        return 0

    def end_turn(self) -> None:
        """Does nothing."""


class WholeStep:
    """A step of the DLRM in a pipeline that looks ahead."""

    def __init__(self, case: Case, name: str) -> None:
        self.model, optimizer = sharded(case, name)
        batches = [click_batch(case, name, seed) for seed in range(NUM_BATCHES)]
        if name in HASHED:
            fill(case, self.model)
        kind: Any = HybridTrainPipelineSparseDist if name in HASHED else TrainPipelineSparseDist
        self._pipeline = kind(self.model, optimizer, CPU, execute_all_batches=True)
        self._batches: Iterator[ClickBatch] = cycle(batches)

    def step(self) -> torch.Tensor:
        logits: torch.Tensor = self._pipeline.progress(self._batches)
        return logits

    def in_order(self, logits: torch.Tensor) -> torch.Tensor:
        """A step's outputs as they are."""
        return logits

    def start_turn(self) -> int:
        """One step: what runs ahead starts anew, and no turn gains from the pause before it."""
        self.step()
        return 1

    def end_turn(self) -> None:
        """Lets what was begun end."""
        finish_ahead(self.model)


class FreeTables(nn.Module):
    """In the place of tables: always gives the same vectors, which want gradients."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self._names, self._widths = case.features(), [case.dim] * case.num_tables
        self._values = torch.full((case.batch_size, sum(self._widths)), 0.01)

    def forward(self, _: KeyedJaggedTensor) -> KeyedTensor:
        values = self._values.detach().requires_grad_()
        return KeyedTensor(keys=self._names, length_per_key=self._widths, values=values)


class DenseAlone:
    """A whole step whose tables cost nothing, in torch's own loop, as torchrec wraps it."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        model = ClickModel(case, collection(case, STOCK))
        model.dlrm.sparse_arch.embedding_bag_collection = FreeTables(case)
        self.model: nn.Module = model
        if dist.get_world_size() > 1:
            self.model = DistributedDataParallel(
                model, gradient_as_bucket_view=True, broadcast_buffers=False, static_graph=True
            )
        adagrad: Any = torch.optim.Adagrad
        self._optimizer = adagrad(self.model.parameters(), **OPTIMIZER)
        batches = [click_batch(case, STOCK, seed) for seed in range(NUM_BATCHES)]
        self._batches: Iterator[ClickBatch] = cycle(batches)

    def step(self) -> torch.Tensor:
        self._optimizer.zero_grad(set_to_none=False)  # as the pipelines, by torchrec's optimizers
        loss, logits = self.model(next(self._batches))
        loss.backward()
        self._optimizer.step()
        found: torch.Tensor = logits
        return found

    def start_turn(self) -> int:
        """One step, as in a pipeline."""
        self.step()
        return 1

    def end_turn(self) -> None:
        """Does nothing."""


def click_batch(case: Case, name: str, seed: int) -> ClickBatch:
    indexes = indexes_of(case, seed)
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    ids = raw_ids(indexes) if name in HASHED else indexes
    return ClickBatch(
        dense=torch.rand(case.batch_size, DENSE_COLUMNS, generator=generator),
        sparse=bags(case, ids, case.batch_size),
        labels=torch.randint(2, (case.batch_size,), generator=generator).float(),
    )


def our_tables(model: nn.Module) -> Any:
    (tables,) = (m for m in model.modules() if isinstance(m, ShardedHashEmbeddingBagCollection))
    return tables


def fill(case: Case, model: nn.Module) -> None:
    """Gives every index of every table its row, by training on it with gradients of zero."""
    tables = our_tables(model)
    world_size, rank = dist.get_world_size(), dist.get_rank()
    mine = torch.arange(rank, case.num_rows, world_size)
    chunk = max(1, (1 << 20) // case.num_tables)
    for number in range(-(-case.num_rows // (chunk * world_size))):
        part = raw_ids(mine[number * chunk : (number + 1) * chunk])
        ids = part.repeat(case.num_tables)
        lengths = torch.full((case.num_tables,), len(part))
        values = tables(KeyedJaggedTensor(case.features(), ids, lengths=lengths)).values()
        torch.autograd.backward(values, torch.zeros_like(values))


# ---- the race -----------------------------------------------------------------------------------


@dataclass
class Samples:
    """Milliseconds a step of each turn, by contestant."""

    elapsed: dict[str, list[float]]
    processor: dict[str, list[float]]
    """Of all threads of a rank, on average of the ranks. It counts what is begun for later steps,
    of which there is as much when a turn ends as when it begins."""


def race(case: Case, contestants: Mapping[str, Any]) -> Samples:
    """Contestants take turns, in orders that are those of all ranks."""
    found = Samples({name: [] for name in contestants}, {name: [] for name in contestants})
    for turn, names in enumerate(records.orders(contestants, 1 + case.turns)):
        for name in names:
            elapsed, processor = milliseconds_of_turn(contestants[name], case.steps_a_turn)
            if turn > 0:  # the first does not count
                found.elapsed[name].append(elapsed)
                found.processor[name].append(processor)
    return found


def milliseconds_of_turn(contestant: Any, num_steps: int) -> tuple[float, float]:
    """A step's elapsed time, and its processor time."""
    dist.barrier()
    begin = time.process_time()
    num_before: int = contestant.start_turn()
    start = time.perf_counter()
    for _ in range(num_steps):
        contestant.step()
    elapsed = time.perf_counter() - start
    contestant.end_turn()
    processor = torch.tensor(time.process_time() - begin, dtype=torch.float64)
    dist.all_reduce(processor)
    steps = (num_before + num_steps) * dist.get_world_size()
    return elapsed / num_steps * 1e3, processor.item() / steps * 1e3


def finish_ahead(model: nn.Module) -> None:
    """Waits for what was begun for later steps: host jobs of ours, collectives of torchrec's."""
    for exchange in exchanges_of(model):
        exchange.meet()
    time.sleep(0.05)


def check_equal(contestants: Mapping[str, Any]) -> None:
    """The same batches from the same weights give the same outputs, within float order.

    Of the first steps: Adagrad's divide by the root of tiny sums lets rounding grow.
    """
    for step in range(NUM_BATCHES):
        ours, stock = (
            contestants[name].in_order(contestants[name].step()) for name in (OURS, STOCK)
        )
        if step < 3 and not torch.allclose(ours, stock, rtol=1e-2, atol=1e-3):
            worst = (ours - stock).abs().max().item()
            raise SystemExit(f"step {step}: outputs differ by up to {worst}")


def bytes_sent(model: nn.Module) -> int:
    """What ours has sent to other ranks so far for results, forward and backward."""
    stats = our_tables(model).stats().values()
    return sum(part.forward_bytes + part.backward_bytes for part in stats)


def existing_bytes(case: Case) -> int:
    """Bytes of this rank's results, forward and backward, that other ranks own or asked for.

    Of the batches of one round under row_wise: a rank sends forward each vector of another's bag of
    which it owns an id, and backward the gradient of each own bag's vector that another rank made.
    """
    rank, ranks = dist.get_rank(), RankMap(world_size=dist.get_world_size())
    made = torch.zeros(dist.get_world_size(), dtype=torch.int64)  # vectors by their maker
    for seed in range(NUM_BATCHES):
        keys = raw_ids(indexes_of(case, seed)).numpy()
        owners = torch.from_numpy(ranks.owners(keys)).view(-1, case.bag_size)
        for maker in range(len(made)):
            made[maker] += owners.eq(maker).any(1).sum()
    backward = int(made.sum() - made[rank])
    made[rank] = 0
    dist.all_reduce(made)
    return 4 * case.dim * (backward + int(made[rank]))


def run(case: Case) -> None:
    kind: Callable[[Case, str], Any] = SparsePart if case.part == "sparse" else WholeStep
    contestants = {name: kind(case, name) for name in (OURS, STOCK)}
    before = bytes_sent(contestants[OURS].model)
    check_equal(contestants)
    sent = torch.tensor([bytes_sent(contestants[OURS].model) - before, existing_bytes(case)])
    dist.all_reduce(sent)
    errors: dict[str, str] = {}
    if case.with_sending:
        contestants[SENT] = kind(case, SENT)
        contestants[SENT].step()
    if case.with_managed_collisions:
        try:
            contestants[MANAGED] = kind(case, MANAGED)
            contestants[MANAGED].step()
        except Exception as error:
            contestants.pop(MANAGED, None)
            errors[MANAGED] = f"{type(error).__name__}: {error}".partition("\n")[0]
    if case.with_dense_alone:
        contestants[FREE] = DenseAlone(case)
    samples = race(case, contestants)
    if dist.get_rank() == 0:
        result = {**asdict(samples), "bytes_sent": sent.tolist(), "errors": errors}
        print(json.dumps(result), flush=True)


def main(arguments: Sequence[str]) -> None:
    warnings.filterwarnings("ignore")
    case = Case(**json.loads(arguments[0]))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    # A few batches are learned by heart, until numbers in backward are denormal: dense layers then
    # take longer, for each contestant from another turn on.
    torch.set_flush_denormal(True)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    try:
        run(case)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
