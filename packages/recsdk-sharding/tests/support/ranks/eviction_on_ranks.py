"""What each rank runs to see which keys stay in tables that evict, and what their rows are.

Shape letters: B samples, W ranks.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from loops import LOOPS
from plans import Spec, module_plan
from policy_batches import (
    FEATURES,
    NUM_SAMPLES,
    Bags,
    Shape,
    bags_of,
    batches,
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
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.feature_processor_ import FeatureProcessor
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.streamable import Pipelineable
from worlds import Setup, collection_of, configs_of, host_env, shard, use_nodes_of

from recsdk_core import (
    Admit,
    CapacityError,
    Default,
    Evict,
    LeaveCause,
    Outcome,
    RecsdkError,
    init,
    initial_rows,
    optim,
)
from recsdk_core.checkpoint import open_checkpoint
from recsdk_core.nn import HashEmbeddingBag
from recsdk_sharding import (
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    HashEmbeddingCollection,
    HashEmbeddingConfig,
    HashEmbeddingShardingPlanner,
    HashLoadPlanner,
    KeyedJaggedTensorWithTimestamp,
    RowOptimizer,
    Saver,
    get_default_hybrid_sharders,
)
from recsdk_sharding._batch import host_job
from recsdk_sharding.device.host_index import HostIndex, latest_rows
from recsdk_sharding.exchange import EndOfData, PeerError
from recsdk_sharding.placement.layout import Shard

BY_HAND = "by hand"
"""How batches run that are mapped ahead and then trained, one after another."""
RULES: dict[str, Evict | None] = {
    "user": Evict.lfu(half_life=2.0).expiring(rare_ttl=2, rare_count=2, every=2).with_churn(3),
    "item": Evict.lru(by="time", min_age=2).expiring(ttl=6, every=1).with_churn(99),
    "ad": Evict.lru().expiring(rare_ttl=3, rare_count=2, every=2).with_churn(9, max_records=16),
    "full": None,
}
"""Of each table; the last one refuses."""
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


class _Model(nn.Module):
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


class _Stepped(_Model):
    """What pipelines take."""

    def __init__(self, case: Case, device: str) -> None:
        super().__init__(case, device)
        self._names = list(case.shape.shown.values())
        if case.shape.is_processed:
            # DistributedDataParallel takes no model all of whose dense parameters are frozen.
            self.offset.requires_grad_(True)

    def forward(self, batch: Batch) -> Any:  # type: ignore[override]
        out = self.ebc(batch.ids)
        return _loss_of(out, self._names, batch.gradients) + self.offset * 0.0, out


@torch.fx.wrap
def _loss_of(out: Any, names: list[str], gradients: torch.Tensor) -> torch.Tensor:
    found = [out[name] for name in names]
    vectors = [each if isinstance(each, torch.Tensor) else each.values() for each in found]
    return torch.cat([each.sum(1) for each in vectors]) @ gradients


def model_of(case: Case) -> Any:
    if case.plan is None:
        return _Model(case, "cpu")
    setup = Setup(
        plan=case.plan,
        local_size=case.local_size,
        device=case.device,
        drops_duplicates=case.drops_duplicates,
    )
    model = (_Model if case.way == BY_HAND else _Stepped)(case, "meta")
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


def _own_part(step: list[list[list[int]]]) -> KeyedJaggedTensor:
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


def _own_bags(case: Case, step: int) -> dict[str, Bags]:
    samples = slice(0, NUM_SAMPLES) if case.plan is None else _own_samples()
    bags = bags_of(case.shape, step)
    return {name: each.own(samples.start, samples.stop) for name, each in bags.items()}


def _batch_of(case: Case, step: int) -> Batch:
    """This rank's batch."""
    samples = slice(None) if case.plan is None else _own_samples()
    bags, shape = _own_bags(case, step), case.shape
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


def _train(model: Any, out: Any) -> None:
    """Each key's row loses 1 for each of its occurrences, whatever the number of ranks."""
    vectors = [v.values() for v in out.values()] if isinstance(out, dict) else [out.values()]
    scale = dist.get_world_size() if isinstance(model, DistributedModelParallel) else 1
    (sum(each.sum() for each in vectors) * scale).backward()


def _check_outcomes(case: Case, collection: Any, step: int) -> None:
    """What became of the keys of this rank's part of a step."""
    if case.outcomes is None:
        return
    found, bags = collection.outcomes(), _own_bags(case, step)
    for (table, name), shown in case.shape.shown.items():
        keys_N = bags[name].keys_N
        keys_N = keys_N[bags[name].positions()] if case.is_sequence else keys_N
        outcomes = [0 if each == Outcome.INSERTED else each for each in found[shown].tolist()]
        expected = [case.outcomes[step][table][key] for key in keys_N.tolist()]
        assert outcomes == expected, (shown, step)


def _check_reads(case: Case, out: Any, step: int) -> None:
    """What the keys of this rank's part of a step read."""
    if case.reads is None:
        return
    bags = _own_bags(case, step)
    for (table, name), shown in case.shape.shown.items():
        of = case.reads[step][table]
        reads_N = np.array([of[key] for key in bags[name].keys_N.tolist()])
        numbers, found = bags[name].pooled(reads_N, case.shape), out[shown]
        if case.is_sequence:
            numbers, found = reads_N[bags[name].positions()], found.values()
        expected = np.repeat(numbers[:, None], WIDTH, axis=1)
        found = found.detach().cpu().numpy()
        np.testing.assert_allclose(found, expected, **TOLERANCE, err_msg=f"{shown} of {step}")


class Saved(NamedTuple):
    """Where a model is saved, and by what."""

    folder: str
    by: str = "Saver"
    """Or torch."""
    codec: Any = "none"
    had_other_rule: bool = False
    """Whether other ranks own ids than by the rule of the model that loads it."""

    def load(self, model: Any) -> None:
        if self.by == "torch":
            planner = HashLoadPlanner(all_ranks=True) if self.had_other_rule else None
            dcp.load({"model": model}, checkpoint_id=self.folder, planner=planner)
        else:
            Saver().load(model, [Path(self.folder, name) for name in ("full", "changes")])

    def begin(self, model: Any) -> None:
        """Saves what there is after the first batches."""
        if self.by == "Saver":
            Saver().save(model, Path(self.folder, "full"), codec=self.codec)

    def end(self, model: Any) -> None:
        """Saves the rest."""
        if self.by == "torch":
            dcp.save({"model": model}, checkpoint_id=self.folder)
        else:
            Saver().save(model, Path(self.folder, "changes"), incremental=True, codec=self.codec)


def _go_back(case: Case, model: Any, folder: Path) -> None:
    """Trains what loading then undoes."""
    Saver().save(model, folder)
    for _ in _trained(case, model, 0, 2):
        pass
    Saver().load(model, folder)


def run(
    case: Case, first: int, last: int, load: Saved | None = None, save: Saved | None = None
) -> Rows:
    """Trains the steps from `first` to below `last`, and gives this rank's rows."""
    model = model_of(case)
    front = getattr(model, "module", model).ebc
    collection = collection_of(getattr(model, "module", model))
    if load is not None:
        load.load(model)
    if case.undone is not None:
        _go_back(case, model, Path(case.undone))
    leaving = None if case.left is None else _Leaving(collection)
    if case.outcomes is not None:
        collection.keep_outcomes()
    for step, out in _trained(case, model, first, last):
        _check_reads(case, out, step)
        _check_outcomes(case, collection, step)
        if leaving is not None:
            leaving.read()
        if save is not None and step == first:
            save.begin(model)
    model.eval()
    before = _rows(collection)
    front(_batch_of(case, 999).ids)
    assert _rows(collection) == before
    if save is not None:
        save.end(model)
    for name, table in collection.tables().items():
        table.check_invariants()
        _check_returned(case, name, table)
    if leaving is not None and case.left is not None:
        leaving.check(case, first, last)
    return before


def _trained(case: Case, model: Any, first: int, last: int) -> Iterator[tuple[int, Any]]:
    """Steps that are trained, and what the collection gave."""
    rates = _Rates(case, model)
    if case.way == BY_HAND:
        yield from _by_hand(case, model, first, last, rates)
        return
    optimizer = CombinedOptimizer([model.fused_optimizer])
    given: Any = [_batch_of(case, step) for step in range(first, last)]
    loop = LOOPS[case.way](model, optimizer, given)
    for step in range(first, last):
        rates.set(step)
        with _casting(case):
            out = next(loop)
        yield step, out
    assert next(loop, None) is None


def _casting(case: Case) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=case.is_cast)


class _Rates:
    """What a scheduler does to the learning rates of a model."""

    def __init__(self, case: Case, model: Any) -> None:
        self._rates = case.rates
        self._optimizer: Any = getattr(model, "fused_optimizer", None)
        self._base = case.optimizer.lr
        self._tables = [] if self._optimizer else collection_of(model).tables().values()

    def set(self, step: int) -> None:
        if len(self._rates) == 1:
            return
        rate = self._base * self._rates[step % len(self._rates)]
        for table in self._tables:
            table.learning_rate = rate
        if self._optimizer is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.zero_grad()


def _by_hand(
    case: Case, model: Any, first: int, last: int, rates: _Rates
) -> Iterator[tuple[int, Any]]:
    front = getattr(model, "module", model).ebc
    collection = collection_of(getattr(model, "module", model))
    names, flying = list(case.shape.shown.values()), []

    def finished() -> Iterator[tuple[int, Any]]:
        for step, batch, compute in flying:
            rates.set(step)
            with _casting(case):
                out = compute()
                loss = _loss_of(out, names, batch.gradients.to(case.device))
            loss.backward()
            yield step, out
        flying.clear()

    for step in range(first, last):
        if len(flying) == case.depth or (flying and collection.looks_next()):
            yield from finished()
        batch = _batch_of(case, step)
        if not case.has_data:
            collection.set_time(time_of(step))
        flying.append((step, batch, _begun(case, front, batch.ids)))
    yield from finished()


def _begun(case: Case, front: Any, ids: KeyedJaggedTensor) -> Callable[[], Any]:
    """What computes the collection's output for ids that are mapped."""
    if case.plan is None:
        out = front(ids)
        return lambda: out
    context = front.create_context()
    started = front.input_dist(context, ids)
    return lambda: front.compute_and_output_dist(context, started.wait().wait()).wait()


class _Leaving:
    """What leaves the tables of a rank."""

    def __init__(self, collection: Any) -> None:
        self._tables = collection.tables()
        self._readers = {name: table.leavers() for name, table in self._tables.items()}
        self._found: dict[str, dict[int, list[tuple[int, float]]]] = {}
        self._num_before = {name: self._num_left(name) for name in self._tables}

    def _num_left(self, name: str) -> int:
        stats = self._tables[name].stats()
        return int(stats.evicted + stats.expired)

    def read(self) -> None:
        for name, reader in self._readers.items():
            of_table = self._found.setdefault(name, {})
            for batch in reader:
                assert (batch.weights == batch.weights[:, :1]).all()
                columns = batch.keys, batch.causes, batch.weights[:, 0]
                for key, cause, number in zip(*(c.tolist() for c in columns), strict=True):
                    of_table.setdefault(key, []).append((cause, number))

    def check(self, case: Case, first: int, last: int) -> None:
        """What left did so when, why and with what it was to."""
        self.read()
        for name, of_table in self._found.items():
            table, _, _ = name.partition(".")
            wanted = case.left[table] if case.left is not None else {}
            # The leases of batches that wait keep what others have evicted.
            num_waiting = last % case.accumulate.get(table, 1)
            steps, is_all = range(first, last - num_waiting), num_waiting == 0
            for key, found in of_table.items():
                own = [(why, row) for step, why, row in wanted[key] if step in steps]
                own = own if is_all else own[: len(found)]
                np.testing.assert_allclose(found, own, **TOLERANCE, err_msg=f"{key} of {name}")
            num_left = self._num_left(name) - self._num_before[name]
            assert sum(map(len, of_table.values())) == num_left or not is_all
            assert self._readers[name].num_lost == 0


def _check_returned(case: Case, name: str, table: Any) -> None:
    if name not in case.returned:
        return
    counts = torch.tensor([table.stats().returned, table.stats().churn_lost])
    if dist.is_initialized():
        dist.all_reduce(counts, group=host_env().process_group)
    assert tuple(counts.tolist()) == case.returned[name], name


def _rows(collection: Any) -> Rows:
    found: Rows = {}
    for name, table in collection.tables().items():
        found[name] = {}
        for batch in table.export():
            found[name].update(zip(batch.keys.tolist(), batch.weights.tolist(), strict=True))
    return found


def whole(parts: list[Rows], replicated: Collection[str] = ()) -> Rows:
    """The rows of all ranks, with their columns side by side; `replicated`: those that all have."""
    columns: dict[str, dict[int, dict[int, list[float]]]] = {}
    for part in parts:
        for name, rows in part.items():
            table, _, which = name.partition(".columns_")
            held = columns.setdefault(table, {}).setdefault(int(which.partition("_")[0] or 0), {})
            assert table in replicated or not set(held) & set(rows)
            assert all(held.get(key, row) == row for key, row in rows.items())
            held.update(rows)
    return {
        table: {
            key: [number for first in sorted(by_first) for number in by_first[first][key]]
            for key in by_first[min(by_first)]
        }
        for table, by_first in columns.items()
    }


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


def copies(case: Case, first: int, middle: int, last: int) -> tuple[Rows, Rows]:
    """Rows at the end, of one model and of one that took its `state_dict` in the middle."""
    model, other = model_of(case), model_of(case)
    found = []
    for each in (model, other):
        collection = each.module.ebc
        end = middle if each is model else first + 1
        for step, lists in enumerate(batches(first, end), first):
            collection.set_time(time_of(step))
            _train(each, collection(_own_part(lists)).wait())
    other.load_state_dict(model.state_dict())
    for each in (model, other):
        collection = each.module.ebc
        for step, lists in enumerate(batches(middle, last), middle):
            collection.set_time(time_of(step))
            _train(each, collection(_own_part(lists)).wait())
        found.append(_rows(collection))
    return found[0], found[1]


def _refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def refusals(groups: int, rank_rule: str) -> list[str]:
    """What is said of tables whose groups do not suffice for the ranks."""
    case = Case(plan=dict.fromkeys(RULES, ("row_wise",)), state={"eviction_groups": groups})

    def planned(types: list[str] | None) -> Any:
        constraint = ParameterConstraints(sharding_types=types)
        planner = EmbeddingShardingPlanner(
            topology=Topology(world_size=dist.get_world_size(), compute_device="cpu"),
            constraints=None if types is None else dict.fromkeys(RULES, constraint),
        )
        sharders = get_default_hybrid_sharders(host_env=host_env(), rank_rule=rank_rule)
        model = _Model(case, "meta")
        return planner.plan(model, sharders)  # on each rank

    by_hand = Setup(plan=case.plan, rank_rule=rank_rule)
    found = [
        _refusal(lambda: shard(_Model(case, "meta"), by_hand)),
        _refusal(lambda: planned(["row_wise"])),
    ]
    kinds = {each.sharding_type for each in planned(None).plan["ebc"].values()}
    return [*found, *sorted(kinds)]


def refusal_of(case: Case) -> str:
    """What is said of a plan."""
    return _refusal(lambda: model_of(case))


def map_ahead(case: Case) -> None:
    """Maps batches up to a look, and beyond, without training any."""
    collection = model_of(case).module.ebc
    flying = []
    for step, lists in enumerate(batches(0, 4)):
        collection.set_time(time_of(step))
        context = collection.create_context()
        flying.append(collection.input_dist(context, _own_part(lists)).wait().wait())


def map_until_refused(case: Case) -> tuple[int, Rows]:
    """Maps batches without training any; the step that is refused, and the rows there are then."""
    collection = model_of(case).module.ebc
    flying = [_mapped(collection, lists, step) for step, lists in enumerate(batches(0, 4))]
    refused = flying.index(None)
    flying.clear()
    gc.collect()  # readers see what batches in flight have brought once nothing refers to them
    return refused, _rows(collection)


def _mapped(collection: Any, lists: list[list[list[int]]], step: int) -> Any:
    """A batch, mapped; None: it is refused."""
    collection.set_time(time_of(step))
    started = collection.input_dist(collection.create_context(), _own_part(lists))
    try:
        return started.wait().wait()
    except RecsdkError:
        return None


def look_after_drops(case: Case) -> Rows:
    """The rows of a model that drops every other batch and erases its keys, of later ones some: a
    look meets rows that no batch has read."""
    model = model_of(case)
    collection = model.module.ebc
    for step, lists in enumerate(batches(0, 6)):
        if step % 2:
            collection.set_time(time_of(step))
            _train(model, collection(_own_part(lists)).wait())
            continue
        assert _mapped(collection, lists, step) is not None
        gc.collect()
        for table, bags in zip(collection.tables().values(), lists, strict=True):
            keys = sorted({key for bag in bags for key in bag})
            table.erase(np.array(keys[:: 1 + step // 2]))
    return _rows(collection)


class _Bag(nn.Module):
    def __init__(self, admission: Admit | None) -> None:
        super().__init__()
        self.bag = HashEmbeddingBag(
            WIDTH,
            name="user",
            optimizer=optim.SGD(lr=1.0),
            initializer=init.Constant(value=FIRST),
            max_rows=MAX_ROWS,
            eviction_groups=GROUPS["user"],
            eviction=RULES["user"],
            admission=admission,
        )


def bag_on_ranks(middle: int, last: int, admission: Admit | None = None) -> Rows:
    """A plain module that is trained alone, and spread over the ranks in the middle."""
    model = _Bag(admission)
    for [lists, *_] in batches(0, middle):
        model.bag(torch.tensor(lists)).sum().backward()
    names = {"user": ParameterConstraints(sharding_types=["row_wise"])}
    topology = Topology(world_size=dist.get_world_size(), compute_device="cpu")
    sharders = get_default_hybrid_sharders(host_env=host_env())
    plan = EmbeddingShardingPlanner(topology=topology, constraints=names).plan(model, sharders)
    sharded = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=plan, sharders=sharders
    )
    bag = sharded.module.bag
    for [lists, *_] in batches(middle, last):
        own = torch.tensor(lists[dist.get_rank() :: dist.get_world_size()])
        (bag(own).wait().sum() * dist.get_world_size()).backward()
    return _rows(bag.collection)


def _index_on_device(capacity: int) -> HostIndex:
    config = HashEmbeddingBagConfig(
        name="user",
        embedding_dim=2,
        num_embeddings=4,
        feature_names=["user"],
        max_rows=4,
        eviction_groups=1,
        eviction=Evict.lru(),
    )
    return HostIndex(config, capacity, Shard.whole(2))


def rows_of_batches_that_nobody_read() -> tuple[dict[int, list[float]], dict[int, list[float]]]:
    """What is written to each row at last, and the first values of the key that has it."""
    keys = _index_on_device(capacity=20)
    for first in range(0, 24, 3):
        with keys.index.lease(step=first) as lease:
            keys.index.map(np.arange(first, first + 3), insert=True, lease=lease)
    entries = latest_rows(keys.take_new_rows())
    numbers = [number for each in entries for number in each.numbers.tolist()]
    assert len(set(numbers)) == len(numbers) < 24
    values = torch.cat([each.values_nD for each in entries])
    written = dict(zip(numbers, values.tolist(), strict=True))
    held, rows = keys.index.keys_and_rows()
    first_nD = initial_rows(held, 2, initializer=keys._initializer, name="user", seed=0)
    found = {row: written[row] for row in rows.tolist()}
    return found, dict(zip(rows.tolist(), first_nD.tolist(), strict=True))


def leases_that_keep_all_rows() -> tuple[str, list[int]]:
    """What is said once batches in flight keep back all rows, and the keys that stay."""
    keys, open_leases = _index_on_device(capacity=8), []
    text = ""
    for first in range(0, 12, 3):
        lease = keys.index.lease(step=first)
        try:
            keys.index.map(np.arange(first, first + 3), insert=True, lease=lease)
        except CapacityError as error:
            text = str(error)
            lease.release()
            break
        open_leases.append(lease)
    for lease in open_leases:
        lease.release()
    held, _ = keys.index.keys_and_rows()
    keys.index.map(np.arange(100, 104), insert=True)  # there are rows again
    assert sorted(keys.index.keys_and_rows()[0].tolist()) == [100, 101, 102, 103]
    return text, sorted(held.tolist())


def more_keys_than_were_planned() -> list[list[int]]:
    """The keys of a table for four, after each step; 0 comes in all of them."""
    config = HashEmbeddingBagConfig(
        name="user",
        embedding_dim=2,
        num_embeddings=4,
        feature_names=["user"],
        eviction=Evict.lru().expiring(ttl=1000),
    )
    keys, found = HostIndex(config, 20, Shard.whole(2)), []
    for key in range(1, 6):
        with keys.index.lease(step=key) as lease:
            keys.index.map(np.array([0, key]), insert=True, lease=lease)
        found.append(sorted(keys.index.keys_and_rows()[0].tolist()))
    return found


def times_of_some_ranks(plan: dict[str, Spec], is_sequence: bool) -> Any:
    """What is kept of the keys of a table if rank 1 has no times, and what time it is there.

    Sequences send an id once. The last batch is evaluated.
    """
    rules: dict[str, Evict | None] = {"user": Evict.lru(by="time").expiring(ttl=100)}
    unsharded = _Model(Case(plan, is_sequence=is_sequence, rules=rules), "meta")
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
            _train(model, out)
    [table] = model.module.ebc.tables().values()
    [keys] = _rows(model.module.ebc).values()
    return table.time, {key: table.explain(key).columns["time"] for key in keys}


def times_of_a_bag() -> Any:
    """The same of a plain module's bag over ranks, with times of each id, and one for all."""
    made = _bag_over_ranks()
    ids = torch.tensor([[5, 7 + dist.get_rank()]])
    made(ids, times=torch.tensor([[30, 40]]), counts=torch.tensor([[1, 2]])).wait().sum().backward()
    made(ids, times=np.int64(35)).wait().sum().backward()
    texts = []
    for wrong in ({"counts": ids[:0]}, {"times": True}, {"times": 1.5}, {"scores": 3}):
        texts.append(_refusal(lambda wrong=wrong: made(ids, **wrong).wait()))
        made.host_exchange.reset()
    [table] = made.collection.tables().values()
    keys = _rows(made.collection)["user"]
    return texts, table.time, {key: table.explain(key).columns["time"] for key in keys}


def keys_of_a_bag_after_a_failure(keeping: list[int]) -> tuple[str, list[int]]:
    """What one call raised, and the keys of a bag made after it; some ranks keep the first bag."""
    first: Any = _bag_over_ranks()
    ids = torch.tensor([[5, 7 + dist.get_rank()]])
    text = _refusal(lambda: first(ids, times=1, counts=ids[:0]).wait())
    if dist.get_rank() not in keeping:
        first = None
        gc.collect()
    made = _bag_over_ranks()
    made(ids, times=2, counts=torch.tensor([[2, 2]])).wait().sum().backward()
    return text, sorted(_rows(made.collection)["user"])


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


def clocks(turns: list[tuple[int | None, int | None]]) -> list[list[int]]:
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
    _train(model, collection(_id_at()).wait())
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

    _train(model, collection(_id_at(7)).wait())
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
    _train(model, collection.compute_and_output_dist(context, batch).wait())
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
            _train(model, collection(batch.to(torch.device(device))).wait())
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
    batch = _batch_of(case, 0).ids
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
        self.ebc = _Model(case, "meta").ebc

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
    return list(_rows(model.module.ebc).popitem()[1]), table.time
