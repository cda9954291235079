"""What Rec SDK's tests of admission and expiry check, with its settings, through a pipeline.

Losses and rows are those of a dense twin that is told in plain Python who has a row; counts are
those of all ranks' batches. test_rec_sdk.py shows how they ended.

Shape letters: B samples, D width, V ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.streamable import Pipelineable

from pipeline_support.model import DEVICE, World
from recsdk_pipeline import HybridTrainPipelineSparseDist
from recsdk_sharding import (
    AdmitAndEvictConfig,
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    HashEmbeddingCollection,
    HashEmbeddingConfig,
    JaggedTensorWithTimestamp,
    KeyedJaggedTensorWithTimestamp,
    get_default_hybrid_sharders,
)

WIDTH = 8
NUM_IDS = 60
NUM_STEPS = 40
BATCH = 12
LR = 0.02
SETTINGS = {
    "admitted": AdmitAndEvictConfig(admit_threshold=4, not_admitted_default_value=0.999),
    "expiring": AdmitAndEvictConfig(evict_threshold=90, evict_step_interval=3),
    "both": AdmitAndEvictConfig(2, 0.5, 90, 4),
    "as_upstream": AdmitAndEvictConfig(3, 0.25, 70, 5, compat="upstream"),
}
"""Of each table, which has one feature of its name."""


def weight_init(weights_ND: torch.Tensor) -> None:
    weights_ND.copy_(torch.linspace(0, 1, weights_ND.shape[1]))


@dataclass
class Batch(Pipelineable):
    """One id with its timestamp of each feature and sample."""

    sparse: KeyedJaggedTensorWithTimestamp

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(self.sparse.to(device, non_blocking))

    def pin_memory(self) -> Batch:
        return Batch(self.sparse.pin_memory())

    def record_stream(self, stream: Any) -> None:
        self.sparse.record_stream(stream)


def drawn(step: int, rank: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The ids and timestamps (B,) of each feature: some ids stay away for a while."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    found = {}
    for number, name in enumerate(SETTINGS):
        popular = torch.rand(BATCH, generator=generator) ** 2
        ids = (popular * NUM_IDS // 2).long() + NUM_IDS // 2 * ((step // 10 + number) % 2)
        jitter = 10 * torch.randint(-2, 3, (BATCH,), generator=generator)
        found[name] = ids, 1_745_897_370 + 10 * step + jitter
    return found


def batch_of(step: int, rank: int) -> Batch:
    lengths = torch.ones(BATCH, dtype=torch.int64)
    jagged = {
        name: JaggedTensorWithTimestamp(ids, lengths=lengths, timestamps=times)
        for name, (ids, times) in drawn(step, rank).items()
    }
    return Batch(KeyedJaggedTensorWithTimestamp.from_jt_dict(jagged))


class Model(nn.Module):
    """Loss and vectors (B, D) of all tables, the first two without pooling."""

    def __init__(self) -> None:
        super().__init__()
        common = {"embedding_dim": WIDTH, "num_embeddings": NUM_IDS, "init_fn": weight_init}
        meta, tables = torch.device("meta"), []
        for name, settings in SETTINGS.items():
            more: dict[str, Any] = {"name": name, "feature_names": [name], **common}
            if DEVICE.type != "cpu":
                more |= {"max_rows": 8 * NUM_IDS, "eviction_groups": 8}
            tables.append({**more, "admit_and_evict_config": settings})
        self.ec = HashEmbeddingCollection([HashEmbeddingConfig(**t) for t in tables[:2]], meta)
        self.ebc = HashEmbeddingBagCollection(
            [HashEmbeddingBagConfig(**t) for t in tables[2:]], device=meta
        )

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        vectors = [each.values() for each in self.ec(batch.sparse).values()]
        vectors.append(self.ebc(batch.sparse).values())
        return loss_of(vectors), torch.cat([each.detach() for each in vectors], dim=1)


def loss_of(vectors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([(each - 0.3).square().sum(1).mean() for each in vectors]).sum()


@dataclass
class Twin:
    """A table of all ids, which keeps what Rec SDK's filter keeps of them."""

    settings: AdmitAndEvictConfig
    weight_VD: nn.Parameter = field(init=False)
    num_expired: int = 0
    num_kept_out: int = 0

    def __post_init__(self) -> None:
        self.weight_VD = nn.Parameter(self.first_VD())
        self.optimizer = torch.optim.Adagrad([self.weight_VD], lr=LR, eps=1e-8)
        self.counts = [0] * NUM_IDS
        self.held = [False] * NUM_IDS
        self.times: dict[int, int] = {}
        self.latest = 0

    @staticmethod
    def first_VD() -> torch.Tensor:
        first_VD = torch.empty(NUM_IDS, WIDTH)
        weight_init(first_VD)
        return first_VD

    def see(self, step: int, ids: list[int], times: list[int]) -> None:
        """A step of all ranks' ids; steps count from 1."""
        self.latest = max(self.latest, *times)
        if self.settings.is_feature_evict_enabled() and step > 1:
            self._expire(step, ids)
        for key in ids:
            self.counts[key] += 1
        for key, time in zip(ids, times, strict=True):
            self.held[key] |= self.counts[key] >= self.settings.admit_threshold
            if self.held[key]:
                self.times[key] = max(self.times.get(key, 0), time)
        self.num_kept_out += sum(not self.held[key] for key in ids)

    def _expire(self, step: int, ids: list[int]) -> None:
        if step % self.settings.evict_step_interval:
            return
        least = self.settings.evict_threshold + int(self.settings.compat == "upstream")
        for key in set(self.times) - set(ids):
            if self.latest - self.times[key] >= least:
                self.num_expired += 1
                del self.times[key]
                self.held[key], self.counts[key] = False, 0
                self.weight_VD.data[key] = self.first_VD()[key]
                self.optimizer.state[self.weight_VD]["sum"][key] = 0

    def __call__(self, ids_B: torch.Tensor) -> torch.Tensor:
        held_B1 = torch.tensor([[self.held[key]] for key in ids_B.tolist()])
        default = self.settings.not_admitted_default_value
        return torch.where(held_B1, self.weight_VD[ids_B], torch.tensor(default))


class Golden:
    """The twins of all tables, trained by the batches of all ranks."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.twins = {name: Twin(settings) for name, settings in SETTINGS.items()}

    def step(self, number: int) -> list[torch.Tensor]:
        """The vectors (B, D) of each rank's samples."""
        given = [drawn(number, rank) for rank in range(self.num_ranks)]
        for name, twin in self.twins.items():
            parts = [of_rank[name] for of_rank in given]
            ids, times = (torch.cat([part[i] for part in parts]).tolist() for i in (0, 1))
            twin.see(number + 1, ids, times)
        found, losses = [], []
        for of_rank in given:
            vectors = [twin(of_rank[name][0]) for name, twin in self.twins.items()]
            losses.append(loss_of([*vectors[:2], torch.cat(vectors[2:], 1)]))
            found.append(torch.cat(vectors, dim=1).detach())
        for twin in self.twins.values():
            twin.optimizer.zero_grad()
        (torch.stack(losses).sum() / self.num_ranks).backward()
        for twin in self.twins.values():
            twin.optimizer.step()
        return found


def spread(world: World) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """The model with its tables cut by rows, and its optimizer."""
    model = Model()
    apply_optimizer_in_backward(torch.optim.Adagrad, model.parameters(), {"lr": LR, "eps": 1e-8})
    by_rows = ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"])
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world.size, compute_device=DEVICE.type),
        constraints=dict.fromkeys(SETTINGS, by_rows),
    )
    sharders = get_default_hybrid_sharders(host_env=world.host)
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    made = DistributedModelParallel(model, device=DEVICE, plan=plan, sharders=sharders)
    return made, CombinedOptimizer([made.fused_optimizer])


def case_losses_and_rows_are_those_of_a_table_of_all_ids(world: World) -> None:
    model, optimizer = spread(world)
    pipeline: Any = HybridTrainPipelineSparseDist(model, optimizer, DEVICE)
    golden = Golden(world.size)
    iterator = iter([batch_of(step, world.rank) for step in range(NUM_STEPS)])
    for step in range(NUM_STEPS):
        output = pipeline.progress(iterator)
        expected = golden.step(step)[world.rank]
        assert torch.allclose(output.cpu(), expected, rtol=1e-4, atol=1e-4), step
    kinds = {name: (t.num_expired, t.num_kept_out) for name, t in golden.twins.items()}
    assert all(kinds[name][0] > 5 for name in ("expiring", "both", "as_upstream")), kinds
    assert all(kinds[name][1] > 20 for name in ("admitted", "both", "as_upstream")), kinds
    held, counts = _kept(model)
    for name, twin in golden.twins.items():
        assert held[name] == {key for key in range(NUM_IDS) if twin.held[key]}, name
        if twin.settings.is_feature_admit_enabled():
            left = {k: n for k, n in enumerate(twin.counts) if n and not twin.held[k]}
            assert counts[name] == left, name


def _kept(model: Any) -> tuple[dict[str, set[int]], dict[str, dict[int, int]]]:
    """The ids that have rows, and how often others were seen, of all ranks."""
    held, counts = {}, {}
    for module in (model.module.ec, model.module.ebc):
        for name, table in module.tables().items():
            standing = {key: table.explain(key) for key in range(NUM_IDS)}
            held[name] = {key for key, each in standing.items() if each.row is not None}
            counts[name] = {key: each.seen for key, each in standing.items() if each.seen}
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (held, counts))
    names = list(held)
    return (
        {name: set().union(*(part[0][name] for part in parts)) for name in names},
        {name: {k: n for part in parts for k, n in part[1][name].items()} for name in names},
    )
