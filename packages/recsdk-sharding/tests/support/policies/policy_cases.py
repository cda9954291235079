"""How tables with policies are cut, and the models and batches that train them.

Shape letters: G bags of a feature, N ids, S samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from plans import Spec
from policy_batches import (
    FEATURES,
    NUM_SAMPLES,
    Bags,
    Shape,
    bags_of,
    jagged,
    joined,
    of_samples,
    time_of,
)
from processors import places, processed
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.feature_processor_ import FeatureProcessor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.streamable import Pipelineable
from worlds import Setup, host_env, shard, use_nodes_of

from recsdk_core import Admit, Default, Evict, init, optim
from recsdk_sharding import (
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    HashEmbeddingCollection,
    HashEmbeddingConfig,
    HashEmbeddingShardingPlanner,
    RowOptimizer,
    get_default_hybrid_sharders,
)

BY_HAND = "by hand"
"""How batches run that are mapped ahead and then trained, one after another."""
RULES: dict[str, Evict | None] = {
    "user": Evict.lfu(half_life=2.0).expiring(rare_ttl=2, rare_count=2, every=2).with_churn(3),
    "item": Evict.lru(by="time", min_age=2).expiring(ttl=6, every=1).with_churn(99),
    "ad": Evict.lru().expiring(rare_ttl=3, rare_count=2, every=2).with_churn(9, max_records=16),
    "full": None,
}
"""Of each table; the last one refuses."""


def placed(count: Any, step: Any) -> Any:
    """Where keys stand."""
    return count + step / 2


def by_time(now: int, time: Any) -> Any:
    """Where keys stand of which times are known."""
    return (time * 7 + now) % 5


MEASURED: dict[str, Evict | None] = {
    "user": Evict.low_norm(every=3),
    "item": Evict.function(by_time, every=2, min_age=1),
    "ad": Evict.low_norm(every=2, below=2.5, min_age=1).with_churn(3),
    "full": Evict.function(placed, every=1),
}
MAX_ROWS = 40
GROUPS = {"user": 8, "item": 4, "ad": 16, "full": 8}
WIDTH = 4
TTL = 9
"""Of tables by time, whose first step of two looks at keys."""
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
FIRST = 2.0
"""What rows begin with."""
ROW_WISE: dict[str, Spec] = dict.fromkeys(RULES, ("row_wise",))
ADMISSION: dict[str, Admit] = {
    "user": Admit.count(2),
    "item": Admit.probability(0.5),
    "ad": Admit.count(3, max_records=32) | Admit.probability(0.2),
    "full": Admit.count_sketch(2, max_bytes=2**19) & Admit.probability(0.8),
}
"""Of each table, in cases with admission."""
PLANNERS = {"torchrec's": EmbeddingShardingPlanner, "recsdk's": HashEmbeddingShardingPlanner}
Rows = dict[str, dict[int, list[float]]]
Outcomes = dict[str, dict[int, int]]
"""What becomes of the keys of a step, by table; of those that have a row FOUND."""
Reads = dict[str, dict[int, float]]
"""What the keys of a step read in each column, by table."""
Left = dict[str, dict[int, list[tuple[int, int, float]]]]
"""By table and key the steps at which it leaves, why, and what its row has in each column then."""


@dataclass(frozen=True)
class Case:
    """How tables are cut and batches run."""

    plan: dict[str, Spec] | None
    """None: unsharded."""
    local_size: int | None = None
    is_sequence: bool = False
    device: str = "cpu"
    depth: int = 1
    """By hand, how many batches are mapped before the first of them is trained."""
    way: str = BY_HAND
    """By hand, or by which of `loops.LOOPS`."""
    shape: Shape = field(default_factory=Shape)
    optimizer: Any = optim.SGD(lr=1.0)
    drops_duplicates: bool = False
    accumulate: dict[str, int] = field(default_factory=dict)
    """Of each table, how many backwards make an update; by default 1."""
    rates: tuple[float, ...] = (1.0,)
    """By which a scheduler multiplies the learning rate of each step, over and over."""
    is_cast: bool = False
    """Whether the model runs under `torch.autocast`."""
    planner: str = BY_HAND
    """By hand, or which of PLANNERS makes the plan."""
    codec: Any = "none"
    """Of checkpoints."""
    state: dict[str, Any] = field(default_factory=dict)
    """Further arguments of tables."""
    rules: dict[str, Evict | None] = field(default_factory=lambda: RULES)
    """Of eviction, by table."""
    admission: dict[str, Admit] = field(default_factory=dict)
    """Rules, by table."""
    has_data: bool = False
    """Whether ids come with times and all else; if not, a time is set for each batch."""
    outcomes: list[Outcomes] | None = None
    """What is to become of the keys of each step; None: no matter."""
    returned: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By table, how many keys return and are forgotten too early; of row-wise ones, if at all."""
    default: dict[str, Default] = field(default_factory=dict)
    """What keys without a row read, by table."""
    reads: list[Reads] | None = None
    """What the keys of each step are to read; None: no matter."""
    left: Left | None = None
    """What is to leave; None: no matter."""
    undone: str | None = None
    """Where to save before the first step, to go back there after two; None: it begins at once."""


class Model(nn.Module):
    def __init__(self, case: Case, device: str) -> None:
        super().__init__()
        common = {
            "embedding_dim": WIDTH,
            "num_embeddings": MAX_ROWS,
            "max_rows": MAX_ROWS,
            "initializer": init.Constant(value=FIRST),
            **case.state,
        }
        tables = [
            {
                "name": name,
                "feature_names": list(FEATURES[case.shape.features][name]),
                "eviction": rule,
                "eviction_groups": GROUPS[name],
                "admission": case.admission.get(name),
                "accumulate_steps": case.accumulate.get(name, 1),
                "default": case.default.get(name, Default.zeros()),
                **common,
            }
            for name, rule in case.rules.items()
        ]
        at = torch.device(device)
        self.ebc: Any
        if case.is_sequence:
            self.ebc = HashEmbeddingCollection([HashEmbeddingConfig(**t) for t in tables], at)
        else:
            pooling = PoolingType.MEAN if case.shape.is_mean else PoolingType.SUM
            bags = [HashEmbeddingBagConfig(**t, pooling=pooling) for t in tables]
            self.ebc = HashEmbeddingBagCollection(
                bags, is_weighted=case.shape.is_weighted, device=at
            )
        _apply_optimizer_in_backward(
            RowOptimizer, self.ebc.parameters(), {"settings": case.optimizer}
        )
        self.offset: Any = 0.0
        if case.shape.is_processed:
            names = case.shape.names
            self.ebc = processed(self.ebc, {name: Halving(at) for name in names})
            # That pipeline takes none that train.
            is_trained = not case.way.startswith("TrainPipelineSemiSync")
            self.ebc._feature_processors.requires_grad_(is_trained)
            # For models in pipelines; others have it, too, as they load what those saved.
            self.offset = nn.Parameter(torch.zeros(1), requires_grad=False)

    def forward(self, batch: KeyedJaggedTensor) -> Any:
        return self.ebc(batch)


class Halving(FeatureProcessor):
    """Weighs ids as `policy_batches.halves` says, times a parameter that stays 1."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, device=device))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.scale.fill_(1)

    def forward(self, features: JaggedTensor) -> JaggedTensor:
        _, place_N = places(features.lengths(), len(features.values()))
        return JaggedTensor(
            values=features.values(),
            lengths=features.lengths(),
            weights=0.5 ** (place_N % 3) * self.scale,
        )


class Batch(Pipelineable):
    """A rank's samples."""

    def __init__(self, ids: KeyedJaggedTensor, gradients: torch.Tensor) -> None:
        self.ids = ids
        self.gradients = gradients
        """Of each vector of the tables' features, in each of its columns."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(
            self.ids.to(device, non_blocking=non_blocking),
            self.gradients.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: Any) -> None:
        self.ids.record_stream(stream)
        self.gradients.record_stream(stream)

    def pin_memory(self) -> Batch:
        return Batch(self.ids.pin_memory(), self.gradients.pin_memory())


class _Stepped(Model):
    """What pipelines take."""

    def __init__(self, case: Case, device: str) -> None:
        super().__init__(case, device)
        self._names = list(case.shape.shown.values())
        if case.shape.is_processed:
            # DistributedDataParallel takes no model all of whose dense parameters are frozen.
            self.offset.requires_grad_(True)

    def forward(self, batch: Batch) -> Any:  # type: ignore[override]
        out = self.ebc(batch.ids)
        return loss_of(out, self._names, batch.gradients) + self.offset * 0.0, out


@torch.fx.wrap
def loss_of(out: Any, names: list[str], gradients: torch.Tensor) -> torch.Tensor:
    found = [out[name] for name in names]
    vectors = [each if isinstance(each, torch.Tensor) else each.values() for each in found]
    return torch.cat([each.sum(1) for each in vectors]) @ gradients


def model_of(case: Case) -> Any:
    if case.plan is None:
        return Model(case, "cpu")
    setup = Setup(
        plan=case.plan,
        local_size=case.local_size,
        device=case.device,
        drops_duplicates=case.drops_duplicates,
    )
    model = (Model if case.way == BY_HAND else _Stepped)(case, "meta")
    if case.planner == BY_HAND:
        return shard(model, setup)
    use_nodes_of(case.local_size or dist.get_world_size())
    sharders = get_default_hybrid_sharders(
        host_env(), setup.rank_rule, use_index_dedup=setup.drops_duplicates
    )
    constraints = {
        name: ParameterConstraints(sharding_types=[spec[0]], min_partition=1)
        for name, spec in case.plan.items()
    }
    topology = Topology(
        world_size=dist.get_world_size(),
        local_world_size=case.local_size,
        compute_device=case.device,
    )
    planner = PLANNERS[case.planner](topology=topology, constraints=constraints)
    return DistributedModelParallel(
        model,
        device=torch.device(case.device),
        plan=planner.collective_plan(model, sharders, dist.GroupMember.WORLD),
        sharders=sharders,
    )


def own_part(step: list[list[list[int]]]) -> KeyedJaggedTensor:
    """This rank's samples, of which it has more the higher its number is."""
    return _plain(_own_lists(step))


def _own_samples() -> slice:
    if not dist.is_initialized():
        return slice(None)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ends = [12 * i * i // (world_size * world_size) for i in range(world_size + 1)]
    return slice(ends[rank], ends[rank + 1])


def _own_lists(step: list[list[list[int]]]) -> list[list[list[int]]]:
    return [of_table[_own_samples()] for of_table in step]


def _plain(lists: list[list[list[int]]]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=list(RULES),
        values=torch.tensor(
            [key for of in lists for keys in of for key in keys], dtype=torch.int64
        ),
        lengths=torch.tensor([len(keys) for of in lists for keys in of], dtype=torch.int64),
    )


def own_bags(case: Case, step: int) -> dict[str, Bags]:
    samples = slice(0, NUM_SAMPLES) if case.plan is None else _own_samples()
    bags = bags_of(case.shape, step)
    return {name: each.own(samples.start, samples.stop) for name, each in bags.items()}


def batch_of(case: Case, step: int) -> Batch:
    """This rank's batch."""
    samples = slice(None) if case.plan is None else _own_samples()
    bags, shape = own_bags(case, step), case.shape
    own = {name: bags[name] for name in shape.names}
    gradients = []
    for table, name in shape.shown:
        of_samples_S = of_samples(shape, step, table)[samples]
        lengths_S = bags[name].lengths_G[bags[name].bag_S]
        gradients.append(np.repeat(of_samples_S, lengths_S) if case.is_sequence else of_samples_S)
    scale = 1 if case.plan is None else dist.get_world_size()
    return Batch(_ids_of(case, own, step), joined(gradients).float() * scale)


def _ids_of(case: Case, bags: dict[str, Bags], step: int) -> KeyedJaggedTensor:
    shape = case.shape
    if shape.is_processed:
        bags = {**bags, "of no processor": next(iter(bags.values()))}
    return jagged(
        bags,
        has_weights=shape.is_weighted and not shape.is_processed,
        batches_vary=shape.batches_vary,
        has_data=case.has_data,
        time=None if case.way == BY_HAND else time_of(step),  # nobody sets it while they wait
    )


def train(model: Any, out: Any) -> None:
    """Each key's row loses 1 for each of its occurrences, whatever the number of ranks."""
    vectors = [v.values() for v in out.values()] if isinstance(out, dict) else [out.values()]
    scale = dist.get_world_size() if isinstance(model, DistributedModelParallel) else 1
    (sum(each.sum() for each in vectors) * scale).backward()
