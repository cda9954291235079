"""The calls of recsdk_sharding that all ranks make together, for tests in which one is wrong."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import bags_on_ranks
import numpy as np
import tensor_parallel_on_ranks
import torch
import torch.distributed as dist
from on_ranks import own_batches
from plans import module_plan
from setups import ADAGRAD
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.types import ShardingPlan
from worlds import (
    Setup,
    collection_of,
    configs_of,
    host_env,
    new_model,
    rows_of,
    shard,
    unwrapped,
    use_nodes_of,
)

from one_rank_alone import Collective, Outcome, failed_calls, steps_of
from recsdk_core import RecsdkError
from recsdk_core.checkpoint import open_checkpoint
from recsdk_sharding import (
    Saver,
    export_rows,
    failing_together,
    get_default_hybrid_sharders,
    import_rows,
    parallelize,
)
from recsdk_sharding.exchange import go_on

SETUP = replace(
    ADAGRAD, plan={"user": ("row_wise",), "genre": ("data_parallel",), "other": ("table_wise", 0)}
)
_SEEDS = (5, 9)


def _trained(seed: int) -> Any:
    model = shard(new_model(SETUP, "meta"), SETUP)
    _train(model, seed)
    return model


def _train(model: Any, seed: int, sizes: Sequence[int] = (4, 3, 2)) -> None:
    size = dist.get_world_size()
    for batch in own_batches([list(sizes[:size])] * 2, False, seed):
        loss, _ = model(batch)
        loss.backward()


def _rows(model: Any) -> Any:
    return rows_of(unwrapped(model).ebc.tables())


def _folder(path: str) -> list[str]:
    return sorted(os.listdir(path))


def _saving(folder: str) -> Collective:
    model, rank = _trained(1), dist.get_rank()
    saver, count = Saver(), iter(range(10**6))
    state = {"epoch": 3, "order": np.arange(4)}

    def arguments(turn: int) -> dict[str, Any]:
        return {"path": f"{folder}/{next(count)}", "step": turn, "user_state": state}

    def read(_: Any, path: Any, **given: Any) -> Any:
        found = open_checkpoint(path)
        found.verify()
        return found.manifest.step, [
            (table.name, table.num_rows) for table in found.manifest.tables
        ]

    return Collective(
        arguments,
        partial(saver.save, model),
        read,
        last=("save_shards.", "refuse_different"),
        bad={
            "path": "",
            "incremental": "yes",
            "overwrite": "yes",
            "step": -1,
            "user_state": {"model": object()},
            "codec": "gzip",
            "progress": "bar",
        },
        other={"incremental": True, "overwrite": True, "step": 77, "codec": "zstd"},
        state=lambda: (_rows(model), _folder(folder) if rank == 0 else None),
    )


def _loading(folder: str) -> Collective:
    saver = Saver()
    for turn, seed in enumerate(_SEEDS):
        saver.save(_trained(seed), f"{folder}/{turn}")
    model = _trained(1)

    return Collective(
        lambda turn: {"path": f"{folder}/{turn}"},
        partial(saver.load, model),
        lambda *_, **given: _rows(model),
        last=("_Staged.adopt", "_each", "Table.", "TableRows.", "EngineShard.", "Saver._load."),
        bad={
            "path": f"{folder}/none",
            "incremental": "yes",
            "allow": ["everything"],
            "progress": "bar",
        },
        other={"incremental": True, "allow": ["seed"]},
        state=lambda: _rows(model),
    )


_IDS = {"user": torch.arange(-3, 30), "genre": torch.arange(9)}
_WIDTHS = {"user": 8, "genre": 3}


def _importing(folder: str) -> Collective:
    model = _trained(1)

    def arguments(turn: int) -> dict[str, Any]:
        rows = {
            f"{name}.weight": torch.full((len(ids), _WIDTHS[name]), turn + 0.5)
            for name, ids in _IDS.items()
        }
        return {"state_dict": rows, "ids": dict(_IDS)}

    return Collective(
        arguments,
        partial(import_rows, model),
        lambda *_, **given: _rows(model),
        last=("",),  # rows are written as they come
        bad={"state_dict": 3, "ids": {"nobody": torch.arange(3)}, "optimizer": 3},
        other={"ids": {**_IDS, "user": torch.arange(33)}},
        state=lambda: _rows(model),
    )


def _exporting(folder: str) -> Collective:
    model = _trained(1)
    return Collective(
        lambda turn: {"ids": _IDS if turn else {"user": torch.arange(12)}},
        partial(export_rows, model),
        lambda found, ids: found,
        bad={"ids": {"user": torch.arange(3.0)}},
        other={"ids": {"genre": torch.arange(7)}},
        state=lambda: _rows(model),
    )


def _plan_of(model: Any, specs: Any) -> ShardingPlan:
    size = dist.get_world_size()
    return ShardingPlan({"ebc": module_plan(configs_of(model), specs, size, size)})


def _making(folder: str) -> Collective:
    use_nodes_of(dist.get_world_size(), has_groups=False)
    (batch, *_) = own_batches([[4, 3, 2][: dist.get_world_size()]], False, 3)
    rows = dict.fromkeys(SETUP.plan or (), ("row_wise",))

    def arguments(turn: int) -> dict[str, Any]:
        model = new_model(replace(SETUP, plan=None), "meta")
        return {
            "module": model,
            "device": torch.device("cpu"),
            "plan": _plan_of(model, SETUP.plan if turn else rows),
            "sharders": get_default_hybrid_sharders(host_env()),
        }

    def read(model: Any, **given: Any) -> Any:
        loss, output = model(batch)
        loss.backward()
        return loss, output, _rows(model)

    return Collective(
        arguments,
        DistributedModelParallel,
        read,
        bad={"module": 3, "device": "cpu", "plan": "row_wise", "sharders": None},
        other={"plan": _plan_of(new_model(SETUP, "meta"), {**rows, "other": ("table_wise", 0)})},
    )


def _planning(folder: str) -> Collective:
    size = dist.get_world_size()
    use_nodes_of(size, has_groups=False)
    planner = EmbeddingShardingPlanner(topology=Topology(world_size=size, compute_device="cpu"))

    def arguments(turn: int) -> dict[str, Any]:
        return {
            "module": new_model(SETUP if turn else Setup(), "meta"),
            "sharders": get_default_hybrid_sharders(host_env()),
        }

    return Collective(
        arguments,
        partial(planner.collective_plan, pg=dist.GroupMember.WORLD),
        lambda found, **given: repr(found.plan),
        bad={"module": 3, "sharders": []},
    )


def _parallelizing(folder: str) -> Collective:
    size = dist.get_world_size()
    mesh = tensor_parallel_on_ranks.mesh_of((size,))
    (batch, *_) = own_batches([[3] * size], False, 3)

    def arguments(turn: int) -> dict[str, Any]:
        model = new_model(_STILL, "meta")
        sharders, plan = tensor_parallel_on_ranks.sparse_part(model, _STILL)
        return {
            "model": model,
            "mesh": mesh,
            "dense_plan": tensor_parallel_on_ranks.PLANS["half" if turn else "whole"](),
            "sharders": sharders,
            "sparse_plan": plan,
        }

    def read(made: Any, **given: Any) -> Any:
        loss, output = made(batch)
        loss.backward()
        return loss, output, _rows(made)

    return Collective(
        arguments,
        parallelize,
        read,
        bad={
            "model": 3,
            "mesh": "cpu",
            "dense_plan": {},
            "sharders": None,
            "sparse_plan": "row_wise",
        },
        other={"dense_plan": {"over.0": ColwiseParallel(output_layouts=Shard(0))}},
    )


_STILL = replace(SETUP, optimizer=torch.optim.SGD, arguments={"lr": 0.0})
"""Rows stay as they are first made, however many steps there are."""


def _stepping(setup: Setup, *, trains: bool = True) -> Callable[[str], Collective]:
    """One step of a sharded module, by itself; a step that trains as users' loops make it."""
    guard = failing_together if trains else nullcontext

    def made(folder: str) -> Collective:
        model = shard(new_model(setup, "meta"), setup)
        _train(model, 1)
        module = unwrapped(model).ebc
        module.train(trains)
        batches = own_batches([[4, 3, 2][: dist.get_world_size()]] * 2, False, 3)

        def step(features: Any) -> torch.Tensor:
            _open(module)
            with guard():
                values = module(features).values()
                if not isinstance(values, torch.Tensor):
                    values = torch.cat([jagged.values() for jagged in values])
                if trains:
                    values.sum().backward()
                return values.detach()

        return Collective(
            lambda turn: {"features": batches[turn].sparse},
            step,
            lambda found, features: found,
            bad={"features": "ids"},
            state=lambda: rows_of(collection_of(unwrapped(model)).tables()),
            last=("",) if trains else (),  # ids have rows by then
        )

    return made


def _open(module: Any) -> None:
    if module.host_exchange.state != "open":
        module.host_exchange.reset()


def _stepping_bag(folder: str) -> Collective:
    """One step of a single bag, as users' loops make it."""
    model = bags_on_ranks.spread(bags_on_ranks.Model("sum"), ("row_wise",))
    bag = unwrapped(model).bag

    def step(keys: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        _open(bag)
        with failing_together():
            pooled = bag(keys, None, weights) + 0
            pooled.sum().backward()
        return torch.zeros_like(pooled)  # the rows are trained

    return Collective(
        lambda turn: {"keys": torch.arange(6).view(2 + turn, -1), "weights": None},
        step,
        lambda found, **_: found,
        bad={"keys": "ids", "weights": torch.ones(5)},
        last=("",),
    )


def _stepping_cut_layers(folder: str) -> Collective:
    """One step of a model whose dense part is cut over a mesh, as users' loops make it."""
    size = dist.get_world_size()
    model = tensor_parallel_on_ranks.cut(_STILL, (size,), "whole")
    _train(model, 1, [3] * size)
    batches = own_batches([[3] * size] * 2, False, 3)

    def step(batch: Any) -> Any:
        _open(unwrapped(model).ebc)
        with failing_together():
            loss, output = model(batch)
            loss.backward()
        return output.detach()

    return Collective(
        lambda turn: {"batch": batches[turn]},
        step,
        lambda found, batch: found,
        bad={"batch": 3},
        last=("",),
    )


CALLS: dict[str, Callable[[str], Collective]] = {
    "Saver.save": _saving,
    "Saver.load": _loading,
    "import_rows": _importing,
    "export_rows": _exporting,
    "DistributedModelParallel": _making,
    "collective_plan": _planning,
    "parallelize": _parallelizing,
    "evaluation": _stepping(SETUP, trains=False),
    "training": _stepping(_STILL),
    "training_sequences": _stepping(replace(_STILL, is_sequence=True)),
    "training_processors": _stepping(replace(_STILL, processor="attention")),
    "training_bag": _stepping_bag,
    "training_cut_layers": _stepping_cut_layers,
}


def make_with_tables_in_another_order() -> Any:
    """The rows of a model that is made of a plan whose tables every rank has in another order."""
    model = new_model(SETUP, "meta")
    plan = _plan_of(model, SETUP.plan)
    tables = list(plan.plan["ebc"].items())
    at = dist.get_rank() % len(tables)
    plan.plan["ebc"].clear()
    plan.plan["ebc"].update(tables[at:] + tables[:at])
    sharders = get_default_hybrid_sharders(host_env())
    made = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
    _train(made, 3)
    return _rows(made)


def save_from_other_numbers_of_groups(folder: str) -> int:
    """The rows that are loaded where the first rank alone is in a group more."""
    model = _trained(1)
    if dist.get_rank() == 0:
        dist.new_group([0], backend="gloo", use_local_synchronization=True)
    Saver().save(model, f"{folder}/one")
    loaded = shard(new_model(SETUP, "meta"), SETUP)
    Saver().load(loaded, f"{folder}/one")
    assert _rows(loaded).keys() == _rows(model).keys()
    return sum(map(len, _rows(loaded).values()))


def make_while_another_saves(folder: str) -> str:
    """What a rank raises where one saves and the others make a model; all go on then."""
    model, text = _trained(1), ""
    try:
        if dist.get_rank() == 0:
            Saver().save(model, f"{folder}/one")
        else:
            shard(new_model(SETUP, "meta"), SETUP)
    except RecsdkError as error:
        text = str(error)
    Saver().save(_trained(1), f"{folder}/all")
    Saver().load(model, f"{folder}/all")
    return text


def train_while_another_saves(folder: str) -> str:
    """What a rank raises that trains a batch more before it saves, as the other does at once."""
    model, text = _trained(1), ""
    if dist.get_rank() == 1:
        try:
            _train(unwrapped(model), 1)
        except RecsdkError as error:
            text = str(error)
    Saver().save(model, f"{folder}/one")
    go_on(model)
    _train(model, 1)
    Saver().load(model, f"{folder}/one")
    return text


def cases_of(name: str, folder: str) -> tuple[list[str], list[str]]:
    """The wrong arguments of a call, and the functions that it runs on this rank."""
    made = CALLS[name](folder)
    wrong = [f"bad {each}" for each in made.bad] + [f"other {each}" for each in made.other]
    return wrong, steps_of(made)


def fail(name: str, folder: str, cases: Sequence[str], guilty: int) -> list[Outcome]:
    """How the call ended here in each case; see `failed_calls`."""
    return failed_calls(CALLS[name](folder), cases, guilty)
