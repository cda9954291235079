"""What each rank runs to see which keys stay in tables that evict, and what their rows are.

Shape letters: D columns, N ids, n new rows.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from loops import LOOPS
from policy_batches import batches, time_of
from policy_cases import (
    BY_HAND,
    FIRST,
    GROUPS,
    MAX_ROWS,
    RULES,
    TOLERANCE,
    WIDTH,
    Case,
    Model,
    Rows,
    batch_of,
    loss_of,
    model_of,
    own_bags,
    own_part,
    train,
)
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from worlds import Setup, collection_of, host_env, shard

from recsdk_core import (
    Admit,
    CapacityError,
    Evict,
    NonFiniteError,
    Outcome,
    RecsdkError,
    init,
    initial_rows,
    optim,
)
from recsdk_core.nn import HashEmbeddingBag
from recsdk_sharding import (
    HashEmbeddingBagConfig,
    HashLoadPlanner,
    Saver,
    get_default_hybrid_sharders,
)
from recsdk_sharding.device.host_index import HostIndex, latest_rows
from recsdk_sharding.placement.layout import Shard


def _check_outcomes(case: Case, collection: Any, step: int) -> None:
    """What became of the keys of this rank's part of a step."""
    if case.outcomes is None:
        return
    found, bags = collection.outcomes(), own_bags(case, step)
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
    bags = own_bags(case, step)
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
    in_one: bool = False
    """Whether all is saved at the end, as the model is saved elsewhere in between."""

    def load(self, model: Any) -> None:
        if self.by == "torch":
            planner = HashLoadPlanner(all_ranks=True) if self.had_other_rule else None
            dcp.load({"model": model}, checkpoint_id=self.folder, planner=planner)
        else:
            names = ("full",) if self.in_one else ("full", "changes")
            Saver().load(model, [Path(self.folder, name) for name in names])

    def begin(self, model: Any) -> None:
        """Saves what there is after the first batches."""
        if self.by == "Saver" and not self.in_one:
            Saver().save(model, Path(self.folder, "full"), codec=self.codec)

    def end(self, model: Any) -> None:
        """Saves the rest."""
        if self.by == "torch":
            dcp.save({"model": model}, checkpoint_id=self.folder)
        elif self.in_one:
            Saver().save(model, Path(self.folder, "full"), codec=self.codec)
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
    before = rows_of(collection)
    front(batch_of(case, 999).ids)
    assert rows_of(collection) == before
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
    given: Any = [batch_of(case, step) for step in range(first, last)]
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
                loss = loss_of(out, names, batch.gradients.to(case.device))
            loss.backward()
            yield step, out
        flying.clear()

    for step in range(first, last):
        if len(flying) == case.depth or (flying and collection.looks_next()):
            yield from finished()
        batch = batch_of(case, step)
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


def rows_of(collection: Any) -> Rows:
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


def copies(case: Case, first: int, middle: int, last: int) -> tuple[Rows, Rows]:
    """Rows at the end, of one model and of one that took its `state_dict` in the middle."""
    model, other = model_of(case), model_of(case)
    found = []
    for each in (model, other):
        collection = each.module.ebc
        end = middle if each is model else first + 1
        for step, lists in enumerate(batches(first, end), first):
            collection.set_time(time_of(step))
            train(each, collection(own_part(lists)).wait())
    other.load_state_dict(model.state_dict())
    for each in (model, other):
        collection = each.module.ebc
        for step, lists in enumerate(batches(middle, last), middle):
            collection.set_time(time_of(step))
            train(each, collection(own_part(lists)).wait())
        found.append(rows_of(collection))
    return found[0], found[1]


def refusal(call: Callable[[], Any]) -> str:
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
        model = Model(case, "meta")
        return planner.plan(model, sharders)  # on each rank

    by_hand = Setup(plan=case.plan, rank_rule=rank_rule)
    found = [
        refusal(lambda: shard(Model(case, "meta"), by_hand)),
        refusal(lambda: planned(["row_wise"])),
    ]
    kinds = {each.sharding_type for each in planned(None).plan["ebc"].values()}
    return [*found, *sorted(kinds)]


def refusal_of(case: Case) -> str:
    """What is said of a plan."""
    return refusal(lambda: model_of(case))


def map_ahead(case: Case) -> None:
    """Maps batches up to a look, and beyond, without training any."""
    collection = model_of(case).module.ebc
    flying = []
    for step, lists in enumerate(batches(0, 4)):
        collection.set_time(time_of(step))
        context = collection.create_context()
        flying.append(collection.input_dist(context, own_part(lists)).wait().wait())


def map_until_refused(case: Case) -> tuple[int, Rows]:
    """Maps batches without training any; the step that is refused, and the rows there are then."""
    collection = model_of(case).module.ebc
    flying = [_mapped(collection, lists, step) for step, lists in enumerate(batches(0, 4))]
    refused = flying.index(None)
    flying.clear()
    gc.collect()  # readers see what batches in flight have brought once nothing refers to them
    return refused, rows_of(collection)


def _mapped(collection: Any, lists: list[list[list[int]]], step: int) -> Any:
    """A batch, mapped; None: it is refused."""
    collection.set_time(time_of(step))
    started = collection.input_dist(collection.create_context(), own_part(lists))
    try:
        return started.wait().wait()
    except RecsdkError:
        return None


def train_on_nan(case: Case) -> None:
    """Batches of one look after the other, whose backwards raise; torch keeps what is left."""
    collection = model_of(case).module.ebc
    for step, lists in enumerate(batches(0, 3)):
        collection.set_time(time_of(step))
        loss = collection(own_part(lists)).wait().values().sum() * float("nan")
        with pytest.raises(NonFiniteError):
            loss.backward()
        del loss  # its graph has the batch


def look_after_drops(case: Case) -> Rows:
    """The rows of a model that drops every other batch and erases its keys, of later ones some: a
    look meets rows that no batch has read."""
    model = model_of(case)
    collection = model.module.ebc
    for step, lists in enumerate(batches(0, 6)):
        if step % 2:
            collection.set_time(time_of(step))
            train(model, collection(own_part(lists)).wait())
            continue
        assert _mapped(collection, lists, step) is not None
        gc.collect()
        for table, bags in zip(collection.tables().values(), lists, strict=True):
            keys = sorted({key for bag in bags for key in bag})
            table.erase(np.array(keys[:: 1 + step // 2]))
    return rows_of(collection)


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
    return rows_of(bag.collection)


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
