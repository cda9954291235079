"""What each rank runs of a random program, and what the unsharded collection runs.

Shape letters: B samples, D columns, N ids.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from comparing import assert_identical
from default_types import of_type
from eviction_on_ranks import Saved
from loops import LOOPS
from plans import module_plan
from policy_batches import Array, Bags, jagged, time_of
from policy_cases import Batch, Halving
from policy_crossing import BY_HAND
from processors import processed
from random_batches import FIRST_TIME
from random_batches import Batch as Whole
from random_models import codecs_of
from random_programs import Part, Program, Turn, gradients_of, local_size_of, rate_of
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import PoolingType
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from worlds import Rows, collection_of, configs_of, host_env, rows_of, use_nodes_of

from quick_folders import quick_folder
from recsdk_core import BusyError, CapacityError, NonFiniteError, Outcome
from recsdk_sharding import (
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    HashEmbeddingCollection,
    HashEmbeddingConfig,
    RowOptimizer,
    Saver,
    get_default_hybrid_sharders,
)
from recsdk_sharding.exchange import PeerError, go_on

ALONE = "of no processor"


class Seen(NamedTuple):
    """What a batch gave, by what each feature's vectors are called."""

    batch: int
    vectors: dict[str, Any]
    outcomes: dict[str, Any]
    """Of ids; of those that have a row FOUND, as ranks tell the first of an id apart."""
    of_weights: dict[str, Any]
    """The gradients of ids' weights by feature, of the mean over ranks, where they are learned."""
    error: str | None = None
    """What the step raised, which then gave nothing; the run has gone back to before it."""


class Model(nn.Module):
    """The program's collection, and a loss whose gradients are the batch's."""

    def __init__(self, program: Program, device: str) -> None:
        super().__init__()
        at, row = torch.device(device), program.row
        self._names = list(program.shown)
        self.offset: Any = 0.0
        self.ebc: Any
        if row["kind"] == "sequences":
            sequences = [HashEmbeddingConfig(**table) for table in program.tables]
            self.ebc = HashEmbeddingCollection(sequences, at)
        else:
            bags = [_bag_config(dict(table)) for table in program.tables]
            is_weighted = row["weights"] != "none"
            self.ebc = HashEmbeddingBagCollection(bags, is_weighted=is_weighted, device=at)
        for config, parameter in zip(program.tables, self.ebc.parameters(), strict=True):
            settings = {"settings": program.optimizers[config["name"]]}
            _apply_optimizer_in_backward(RowOptimizer, [parameter], settings)
        if row["weights"] == "processed":
            self.ebc = processed(self.ebc, {name: Halving(at) for name in program.names})
            self.offset = nn.Parameter(torch.zeros(1))  # DDP takes no model without such

    def forward(self, batch: Batch) -> Any:
        out = self.ebc(batch.ids)
        return _loss_of(out, self._names, batch.gradients) + self.offset * 0.0, out


def _bag_config(table: dict[str, Any]) -> HashEmbeddingBagConfig:
    pooling = PoolingType.MEAN if table.pop("is_mean") else PoolingType.SUM
    return HashEmbeddingBagConfig(**table, pooling=pooling)


@torch.fx.wrap
def _loss_of(out: Any, names: list[str], gradients: torch.Tensor) -> torch.Tensor:
    vectors = [
        each if isinstance(each, torch.Tensor) else each.values() for each in _of(out, names)
    ]
    return torch.cat([each.float().reshape(-1) for each in vectors]) @ gradients


def _of(out: Any, names: list[str]) -> list[Any]:
    return [out[name] for name in names]


def sharded(program: Program, part: Part, codec: str | None = None) -> DistributedModelParallel:
    """The program's model on this rank; vectors travel by the codec, if any."""
    model = Model(program, "meta")
    local_size = local_size_of(part.world_size)
    use_nodes_of(local_size)
    plan = module_plan(configs_of(model), part.specs, part.world_size, local_size, part.device)
    drops = program.row["duplicates"] == "dropped"
    return DistributedModelParallel(
        model,
        device=torch.device(part.device),
        plan=ShardingPlan({"ebc": plan}),
        sharders=get_default_hybrid_sharders(
            host_env(),
            part.rule,
            qcomm_codecs_registry=codecs_of(codec),
            use_index_dedup=drops,
        ),
    )


class Runner:
    """One model, with the samples of one rank or of all."""

    def __init__(self, program: Program, part: Part, model: Any, ranks: slice) -> None:
        self.program, self.part, self.model, self.ranks = program, part, model, ranks
        self.module = getattr(model, "module", model)
        self.collection = collection_of(self.module)
        self.collection.keep_outcomes()
        self.is_sharded = self.module is not model
        self._weights: dict[int, torch.Tensor] = {}
        self.folder: str | None = None
        """Where what it goes back to is saved, if steps may raise."""
        self._num_tried = 0
        self._groups = _groups_of(model.fused_optimizer) if self.is_sharded else []

    def run(self, turns: tuple[Turn, ...]) -> Iterator[Seen]:
        is_by_hand = not self.is_sharded or self._way == BY_HAND
        for kind, group in groupby(turns, lambda turn: turn.kind):
            of_kind = list(group)
            if kind == "train" and not is_by_hand:
                yield from self._by_pipeline(of_kind)
                continue
            for turn in of_kind:
                yield from getattr(self, f"_{kind}")(turn)

    @property
    def _way(self) -> str:
        """torchrec's pipelines for devices are none for cpus."""
        way = self.program.row["way"]
        return BY_HAND if way.startswith("Prefetch") and self.part.device == "cpu" else way

    def _train(self, turn: Turn) -> Iterator[Seen]:
        if self.program.row["errors"] == "raised":
            yield from self._tried(turn)
        else:
            yield from self._trained(turn)

    def _tried(self, turn: Turn) -> Iterator[Seen]:
        """Trains, or goes back to what it was before if that raises."""
        self._num_tried += 1
        path, before = f"{self.folder}/{self._num_tried}", self.rows()
        Saver().save(self.model, path)
        counts = {name: table.update_count for name, table in self.collection.tables().items()}
        try:
            yield from list(self._trained(turn))
            return
        except (CapacityError, NonFiniteError, PeerError) as error:
            name, text = type(error).__name__, str(error)
        self._assert_unchanged(name, text, before, counts, is_first=len(turn.batches) == 1)
        self._go_on()
        Saver().load(self.model, path)
        if any(table.time is None for table in self.collection.tables().values()):
            self.collection.set_time(FIRST_TIME)  # as before the first batch, which had taken it
        for batch in turn.batches:  # for the next one, as that of a batch that came to nothing
            self._set_time(batch)
        yield Seen(turn.batches[0], {}, {}, {}, name)

    def _go_on(self) -> None:
        """Lets batches come again after one that has raised."""
        go_on(self.model)

    def _assert_unchanged(
        self, name: str, text: str, before: Rows, counts: dict[str, int], *, is_first: bool
    ) -> None:
        """What raised is as it was: tables without room, rows whose update has raised.

        `is_first`: whether no batch was mapped, and none trained, before the one that raised.
        """
        after = self.rows()
        if not is_first:
            return
        for title, table in self.collection.tables().items():
            is_of_it = name != "PeerError" and f"table '{table.name}'" in text
            if is_of_it or name != "NonFiniteError":
                assert table.update_count == counts[title], text
            if is_of_it:
                old, new = before[title], after[title]
                if name == "NonFiniteError":  # once ids have got rows, and others left for them
                    both = old.keys() & new.keys()
                    old, new = ({key: each[key] for key in both} for each in (old, new))
                assert_identical(new, old)

    def _trained(self, turn: Turn) -> Iterator[Seen]:
        started = [(batch, *self.model(self._given(batch))) for batch in turn.batches]
        for batch, loss, out in started:
            self._set_rate(batch)
            loss.backward()
            seen = self._seen(batch, out, with_outcomes=len(started) == 1)
            grads = self._of_weights(batch)
            # Of two in flight the second's are of rows that the first has trained; on ranks a mean
            # takes off that of the forward.
            yield seen._replace(of_weights=grads if len(started) == 1 else {})

    def _leave(self, turn: Turn) -> Iterator[Seen]:
        [batch] = turn.batches
        _, out = self.model(self._given(batch))
        yield self._seen(batch, out)

    def _read(self, turn: Turn) -> Iterator[Seen]:
        [batch] = turn.batches
        self.model.eval()
        with torch.no_grad():
            _, out = self.model(self._on_device(batch))
        self.model.train()
        yield self._seen(batch, out)

    def _erase(self, turn: Turn) -> Iterator[Seen]:
        [batch] = turn.batches
        bags = self._whole(batch).own(slice(None))
        keys_N = np.concatenate([each.keys_N for each in bags.values()])
        for table in self.collection.tables().values():
            with contextlib.suppress(BusyError):  # where gradients wait for others
                table.erase(keys_N[::2].copy())
        yield from ()

    def _by_pipeline(self, turns: list[Turn]) -> Iterator[Seen]:
        batches = [batch for turn in turns for batch in turn.batches]
        given = [self._batch_of(batch) for batch in batches]
        optimizer = CombinedOptimizer([self.model.fused_optimizer])
        loop = iter(LOOPS[self._way](self.model, optimizer, given))
        for batch in batches:
            self._set_rate(batch)
            yield self._seen(batch, next(loop), with_outcomes=False)
        assert next(loop, None) is None

    def _set_rate(self, batch: int) -> None:
        """As a scheduler does: of one process for each table."""
        for group, name, first in self._groups:
            group["lr"] = first * rate_of(self.program, batch, name)
        if self._groups:
            self.model.fused_optimizer.zero_grad()
            return
        for name, table in self.collection.tables().items():
            rate = rate_of(self.program, batch, name)
            table.learning_rate = self.program.optimizers[name].lr * rate

    def _given(self, batch: int) -> Batch:
        """A batch to train, on its device, before which its times are set."""
        if self.program.row["way"] == BY_HAND:
            self._set_time(batch)
        return self._on_device(batch)

    def _set_time(self, batch: int) -> None:
        """The latest that the ranks set, if any does."""
        given = self._whole(batch).times_set[self.ranks]
        times = [time for time in given if time is not None]
        if times:
            self.collection.set_time(max(times))

    def _on_device(self, batch: int) -> Batch:
        made = self._batch_of(batch)
        return made.to(torch.device(self.part.device)) if self.is_sharded else made

    def _whole(self, batch: int) -> Whole:
        return self.program.batch(batch, self.part.world_size)

    def bags_of(self, batch: int) -> dict[str, Bags]:
        """What these ranks have."""
        return self._whole(batch).own(self.ranks)

    def _batch_of(self, batch: int) -> Batch:
        whole, row = self._whole(batch), self.program.row
        bags = self._with_data(whole, batch)
        begin, end, _ = self.ranks.indices(self.part.world_size)
        gradients_BD = gradients_of(self.program, batch, slice(whole.ends[begin], whole.ends[end]))
        flat = [np.zeros(0, np.float32)]
        for shown, (name, _) in self.program.shown.items():
            found = gradients_BD[shown]
            if row["kind"] == "sequences":
                found = np.repeat(found, bags[name].lengths_G[bags[name].bag_S], axis=0)
            flat.append(found.reshape(-1))
        if row["weights"] == "processed":
            bags = {**bags, ALONE: next(iter(bags.values()))}
        ids = jagged(
            bags,
            has_weights=row["weights"] in ("given", "learned"),
            batches_vary=row["sizes"] != "one",
            has_data=bool(next(iter(bags.values())).data),
        )
        scale = self.part.world_size if self.is_sharded else 1
        if self.is_sharded:
            ids = _of_type(ids, whole.types[begin])
        if row["weights"] == "learned":
            self._weights[batch] = ids.weights().requires_grad_()
        return Batch(ids, torch.from_numpy(np.concatenate(flat)) * scale)

    def _with_data(self, whole: Whole, batch: int) -> dict[str, Bags]:
        """What the ranks have; of what comes with some ids, others have what tables read for it."""
        bags, row = self.bags_of(batch), self.program.row
        if row["data"] == "no":
            names = [] if row["way"] == BY_HAND else ["times"]
            for name, each in bags.items():
                times = np.full_like(each.keys_N, time_of(batch))
                bags[name] = replace(each, data=dict.fromkeys(names, times))
        has_times = whole.has_times[self.ranks]
        if all(has_times):
            return bags
        if not any(has_times):
            return {n: replace(each, data=_without_times(each.data)) for n, each in bags.items()}
        of_ranks = [whole.own(slice(rank, rank + 1)) for rank in range(self.part.world_size)]
        is_timed = {
            name: np.repeat(has_times, [len(of_rank[name].keys_N) for of_rank in of_ranks])
            for name in bags
        }
        clocks = self._clocks(bags, is_timed)
        return {
            name: replace(each, data=_filled(each.data, is_timed[name], clocks.get(name, 0)))
            for name, each in bags.items()
        }

    def _of_weights(self, batch: int) -> dict[str, Array]:
        if batch not in self._weights:
            return {}
        grad = self._weights.pop(batch).grad
        assert grad is not None
        grads_N = grad.numpy() / (self.part.world_size if self.is_sharded else 1)
        bags = self.bags_of(batch)
        ends = np.cumsum([len(each.keys_N) for each in bags.values()])
        return dict(zip(bags, np.split(grads_N, ends[:-1]), strict=True))

    def _clocks(self, bags: Mapping[str, Bags], is_timed: Mapping[str, Array]) -> dict[str, int]:
        """What time it is in the batch for the features of tables that go by time."""
        found = {}
        for table, names in self.program.timed.items():
            latest = [bags[n].data["times"][is_timed[n]] for n in names if "times" in bags[n].data]
            known = self.collection.tables()[table].time
            clock = int(np.concatenate([[known], *latest]).max())
            found.update(dict.fromkeys(names, clock))
        return found

    def _seen(self, batch: int, out: Any, with_outcomes: bool = True) -> Seen:
        names = list(self.program.shown)
        vectors = dict(zip(names, _of(out, names), strict=True))
        outcomes = self.collection.outcomes() if with_outcomes else {}
        return Seen(
            batch,
            {name: _array(each) for name, each in vectors.items()},
            {
                name: np.where(each == int(Outcome.INSERTED), int(Outcome.FOUND), each)
                for name, each in ((name, outcomes[name].numpy()) for name in names if outcomes)
            },
            {},
        )

    def rows(self) -> Rows:
        for table in self.collection.tables().values():
            table.check_invariants()
        return rows_of(self.collection.tables())


def _groups_of(optimizer: Any) -> list[tuple[dict[str, Any], str, float]]:
    """Each group of parameters, the table that it is of, and its learning rate."""
    names = {id(parameter): name.split(".")[-2] for name, parameter in optimizer.params.items()}
    groups = optimizer.param_groups
    return [(group, names[id(group["params"][0])], group["lr"]) for group in groups]


def _of_type(ids: KeyedJaggedTensor, dtype: torch.dtype) -> KeyedJaggedTensor:
    ids._values = ids.values().to(dtype)
    return ids


def _without_times(data: Mapping[str, Array]) -> dict[str, Array]:
    return {name: each for name, each in data.items() if name not in ("times", "counts")}


def _filled(data: Mapping[str, Array], is_timed: Array, clock: int) -> dict[str, Array]:
    fills = {"times": clock, "counts": 1}
    return {
        name: np.where(is_timed, each, fills[name]) if name in fills else each
        for name, each in data.items()
    }


def _array(vectors: Any) -> Any:
    values = vectors if isinstance(vectors, torch.Tensor) else vectors.values()
    assert values.dtype in (torch.float32, torch.bfloat16)  # the second under autocast
    return values.detach().float().cpu().numpy().copy()


def run_part(program: Program, number: int, folder: str) -> tuple[list[Seen], Rows]:
    """Runs a part of a program on this rank, from what the part before it saved in the folder."""
    with of_type(program.row["default type"]):
        return _run_part(program, number, folder)


def _run_part(program: Program, number: int, folder: str) -> tuple[list[Seen], Rows]:
    part = program.parts[number]
    rank = dist.get_rank()
    runner = Runner(program, part, sharded(program, part), slice(rank, rank + 1))
    runner.folder = f"{folder}/tried_{number}"
    if rank == 0:
        Path(runner.folder).mkdir()
    dist.barrier()
    if number == 0 or part.is_used:
        runner.collection.set_time(FIRST_TIME)  # the first ids may have none
    if number:
        if part.is_used:
            list(runner.run(tuple(turn for turn in part.turns if turn.kind == "train")[:1]))
        _saved(program, number - 1, folder).load(runner.model)
    middle = len(part.turns) // 2
    seen = list(runner.run(part.turns[:middle]))
    is_last = part is program.parts[-1]
    if not is_last:
        _saved(program, number, folder).begin(runner.model)
    seen += runner.run(part.turns[middle:])
    if not is_last:
        _saved(program, number, folder).end(runner.model)
    return seen, runner.rows()


def _saved(program: Program, number: int, folder: str) -> Saved:
    part, after = program.parts[number : number + 2]
    had_other_rule = part.rule != after.rule
    return Saved(
        f"{folder}/{number}",
        program.row["before"],
        part.codec,
        had_other_rule,
        in_one=program.row["errors"] == "raised",
    )


def run_unsharded(program: Program) -> tuple[list[Seen], Rows]:
    """All parts of a program, one after another, with the samples of all ranks."""
    seen: list[Seen] = []
    model = Model(program, "cpu")
    collection_of(model).set_time(FIRST_TIME)
    with quick_folder() as folder:
        for number, part in enumerate(program.parts):
            runner = Runner(program, part, model, slice(None))
            runner.folder = f"{folder}/tried_{number}"
            Path(runner.folder).mkdir()
            seen += runner.run(part.turns)
    return seen, runner.rows()
