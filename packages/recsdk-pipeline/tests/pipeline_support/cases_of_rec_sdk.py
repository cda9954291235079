"""What Rec SDK's tests of admission, expiry and clicks check, with its settings, in a pipeline.

Losses and rows are those of a dense twin that is told in plain Python who has a row; counts are
those of all ranks' batches. test_rec_sdk.py shows how they ended.

Shape letters: B samples, D width, V ids.
"""

from __future__ import annotations

from collections import defaultdict
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
from recsdk_core.testing import Room
from recsdk_core.testing._room import key_hash
from recsdk_pipeline import HybridTrainPipelineSparseDist
from recsdk_sharding import (
    AdmitAndEvictConfig,
    AdmitAndEvictPolicyType,
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    HashEmbeddingCollection,
    HashEmbeddingConfig,
    JaggedTensorWithTimestamp,
    KeyedJaggedTensorWithTimestamp,
    ShowClickParams,
    get_default_hybrid_sharders,
)

WIDTH = 8
NUM_IDS = 60
NUM_STEPS = 40
BATCH = 12
LR = 0.02
ROOM = Room(8 * NUM_IDS, 8)
"""More than all ids take; a percentage is of each group of ids."""
SETTINGS = {
    "admitted": AdmitAndEvictConfig(admit_threshold=4, not_admitted_default_value=0.999),
    "expiring": AdmitAndEvictConfig(evict_threshold=90, evict_step_interval=3),
    "both": AdmitAndEvictConfig(2, 0.5, 90, 4),
    "as_upstream": AdmitAndEvictConfig(3, 0.25, 70, 5, compat="upstream"),
    "clicked": AdmitAndEvictConfig(
        not_admitted_default_value=0.999,
        showclick_params=ShowClickParams(alpha=1.0, beta=2.0, admit_threshold=5.5),
        policy_type=AdmitAndEvictPolicyType.POLICY_SHOWCLICK,
    ),
    "percentage": AdmitAndEvictConfig(
        evict_step_interval=4,
        showclick_params=ShowClickParams(alpha=1.0, beta=3.0, evict_percentage=0.3),
        policy_type=AdmitAndEvictPolicyType.POLICY_SHOWCLICK,
    ),
    "clicked_as_upstream": AdmitAndEvictConfig(
        not_admitted_default_value=0.5,
        evict_step_interval=3,
        showclick_params=ShowClickParams(
            alpha=1.0, beta=2.0, admit_threshold=3.0, evict_percentage=0.3, score_decay=0.5
        ),
        policy_type=AdmitAndEvictPolicyType.POLICY_SHOWCLICK,
        compat="upstream",
    ),
}
"""Of each table, which has one feature of its name."""
KEEPING_OUT = ("admitted", "both", "as_upstream", "clicked", "clicked_as_upstream")


def weight_init(weights_ND: torch.Tensor) -> None:
    weights_ND.copy_(torch.linspace(0, 1, weights_ND.shape[1]))


@dataclass
class Batch(Pipelineable):
    """One id with its timestamp of each feature and sample, and which samples were clicked."""

    sparse: KeyedJaggedTensorWithTimestamp
    click_labels: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        labels = self.click_labels.to(device, non_blocking=non_blocking)
        return Batch(self.sparse.to(device, non_blocking), labels)

    def pin_memory(self) -> Batch:
        return Batch(self.sparse.pin_memory(), self.click_labels.pin_memory())

    def record_stream(self, stream: Any) -> None:
        self.sparse.record_stream(stream)
        self.click_labels.record_stream(stream)


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


def clicked(step: int, rank: int) -> torch.Tensor:
    """Which samples were clicked, (B,)."""
    generator = torch.Generator().manual_seed(7_000 + 100 * step + rank)
    return torch.randint(0, 2, (BATCH,), generator=generator).float()


def batch_of(step: int, rank: int) -> Batch:
    lengths = torch.ones(BATCH, dtype=torch.int64)
    jagged = {
        name: JaggedTensorWithTimestamp(ids, lengths=lengths, timestamps=times)
        for name, (ids, times) in drawn(step, rank).items()
    }
    return Batch(KeyedJaggedTensorWithTimestamp.from_jt_dict(jagged), clicked(step, rank))


class Model(nn.Module):
    """Loss and vectors (B, D) of all tables, the first two without pooling."""

    def __init__(self) -> None:
        super().__init__()
        common = {"embedding_dim": WIDTH, "num_embeddings": NUM_IDS, "init_fn": weight_init}
        meta, tables = torch.device("meta"), []
        for name, settings in SETTINGS.items():
            more: dict[str, Any] = {"name": name, "feature_names": [name], **common}
            if DEVICE.type != "cpu" or settings.showclick_params.evict_percentage > 0:
                more |= {"max_rows": ROOM.max_rows, "eviction_groups": ROOM.num_groups}
            tables.append({**more, "admit_and_evict_config": settings})
        self.ec = HashEmbeddingCollection([HashEmbeddingConfig(**t) for t in tables[:2]], meta)
        self.ebc = HashEmbeddingBagCollection(
            [HashEmbeddingBagConfig(**t) for t in tables[2:]], device=meta
        )

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        vectors = [each.values() for each in self.ec(batch.sparse).values()]
        vectors.append(self.ebc(batch.sparse).values())
        return loss_of(vectors), torch.cat([each.detach() for each in vectors], dim=1)


class InForward(Model):
    """The same with features that are no part of the batch, so that nothing is looked ahead."""

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        order = list(range(len(SETTINGS)))
        return super().forward(Batch(batch.sparse.permute(order), batch.click_labels))


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
        self.clicks = [0] * NUM_IDS
        self.held = [False] * NUM_IDS
        self.times: dict[int, int] = {}
        self.scores: dict[int, float] = {}
        self.latest = 0

    @staticmethod
    def first_VD() -> torch.Tensor:
        first_VD = torch.empty(NUM_IDS, WIDTH)
        weight_init(first_VD)
        return first_VD

    def see(self, step: int, ids: list[int], times: list[int], clicks: list[int]) -> None:
        """A step of all ranks' ids; steps count from 1."""
        self.latest = max(self.latest, *times)
        if self.settings.is_feature_evict_enabled() and step > 1:
            self._expire(step, ids)
        for key, num_clicks in zip(ids, clicks, strict=True):
            self.counts[key] += 1
            self.clicks[key] += num_clicks
        for key, time in zip(ids, times, strict=True):
            self.held[key] |= self._is_admitted(key)
            if self.held[key]:
                self.times[key] = max(self.times.get(key, 0), time)
        self.num_kept_out += sum(not self.held[key] for key in ids)
        for key in set(ids):
            self._score(key)

    @property
    def is_as_code(self) -> bool:
        """By shows and clicks as Rec SDK's code goes by them."""
        is_by_count = self.settings.policy_type == AdmitAndEvictPolicyType.POLICY_COUNT
        return self.settings.compat == "upstream" and not is_by_count

    def _score(self, key: int) -> None:
        """After a step that has the key."""
        if self.is_as_code and not self.held[key]:
            self.counts[key] = self.clicks[key] = 0
        elif not self.is_as_code or key not in self.scores:
            self.scores[key] = self._worth(key)
        else:
            decay = self.settings.showclick_params.score_decay
            self.scores[key] = (self.scores[key] + self._worth(key)) * decay

    def _worth(self, key: int) -> float:
        params = self.settings.showclick_params
        return params.alpha * self.counts[key] + params.beta * self.clicks[key]

    def _is_admitted(self, key: int) -> bool:
        if self.settings.policy_type == AdmitAndEvictPolicyType.POLICY_COUNT:
            return self.counts[key] >= self.settings.admit_threshold
        return self._worth(key) >= self.settings.showclick_params.admit_threshold

    def _expire(self, step: int, ids: list[int]) -> None:
        if step % self.settings.evict_step_interval:
            return
        is_by_count = self.settings.policy_type == AdmitAndEvictPolicyType.POLICY_COUNT
        for key in (self._stale() if is_by_count else self._lowest()) - set(ids):
            self.num_expired += 1
            del self.times[key], self.scores[key]
            self.held[key], self.counts[key], self.clicks[key] = False, 0, 0
            self.weight_VD.data[key] = self.first_VD()[key]
            self.optimizer.state[self.weight_VD]["sum"][key] = 0

    def _stale(self) -> set[int]:
        least = self.settings.evict_threshold + int(self.settings.compat == "upstream")
        return {key for key, time in self.times.items() if self.latest - time >= least}

    def _lowest(self) -> set[int]:
        """The part of each group that is worth least, rounded down, but one id at least."""
        params, groups = self.settings.showclick_params, defaultdict(list)
        for key in self.times:
            tie = key if self.is_as_code else key_hash(key)
            groups[ROOM.group(key)].append((self.scores[key], tie, key))
        return {
            key
            for group in groups.values()
            for *_, key in sorted(group)[: max(int(len(group) * params.evict_percentage), 1)]
        }

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
        clicks = torch.cat([clicked(number, rank) for rank in range(self.num_ranks)]).int().tolist()
        for name, twin in self.twins.items():
            parts = [of_rank[name] for of_rank in given]
            ids, times = (torch.cat([part[i] for part in parts]).tolist() for i in (0, 1))
            twin.see(number + 1, ids, times, clicks)
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


def spread(world: World, model: Model) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """The model with its tables cut by rows, and its optimizer."""
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
    model, optimizer = spread(world, Model())
    pipeline: Any = HybridTrainPipelineSparseDist(model, optimizer, DEVICE)
    golden = Golden(world.size)
    iterator = iter([batch_of(step, world.rank) for step in range(NUM_STEPS)])
    for step in range(NUM_STEPS):
        output = pipeline.progress(iterator)
        expected = golden.step(step)[world.rank]
        assert torch.allclose(output.cpu(), expected, rtol=1e-4, atol=1e-4), step
    kinds = {name: (t.num_expired, t.num_kept_out) for name, t in golden.twins.items()}
    leaving = [name for name, settings in SETTINGS.items() if settings.is_feature_evict_enabled()]
    assert all(kinds[name][0] > 5 for name in leaving), kinds
    assert all(kinds[name][1] > 20 for name in KEEPING_OUT), kinds
    held, counts = _kept(model)
    for name, twin in golden.twins.items():
        assert held[name] == {key for key in range(NUM_IDS) if twin.held[key]}, name
        if twin.settings.is_feature_admit_enabled() and not twin.is_as_code:
            left = {k: n for k, n in enumerate(twin.counts) if n and not twin.held[k]}
            assert counts[name] == left, name


def case_clicks_reach_tables_that_run_inside_forward(world: World) -> None:
    found = []
    for made in (Model(), InForward()):
        model, optimizer = spread(world, made)
        pipeline: Any = HybridTrainPipelineSparseDist(model, optimizer, DEVICE)
        iterator = iter([batch_of(step, world.rank) for step in range(6)])
        outputs = [pipeline.progress(iterator).cpu() for _ in range(6)]
        found.append((torch.stack(outputs), *_kept(model)))
    assert torch.allclose(found[0][0], found[1][0], rtol=1e-4, atol=1e-4)
    assert found[0][1:] == found[1][1:]
    assert found[0][1]["clicked"]


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
