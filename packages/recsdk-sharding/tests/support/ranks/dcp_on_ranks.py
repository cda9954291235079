"""What the tests of torch.distributed.checkpoint run on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from comparing import assert_identical
from loops import plain
from on_ranks import own_batches
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.optim.lr_scheduler import StepLR
from worlds import (
    Setup,
    dense_of,
    make_batch,
    new_model,
    optimizer_of,
    rows_of,
    shard,
    unwrapped,
)

from recsdk_sharding import HashLoadPlanner, Saver


def _state(setup: Setup) -> tuple[Any, Any]:
    model = shard(new_model(setup, "meta"), setup)
    return model, optimizer_of(model, setup.dense_lr)


def _train(model: Any, optimizer: Any, sizes: list[list[int]], setup: Setup, seed: int) -> Any:
    batches = own_batches(sizes, setup.weighted, seed)
    return [out.detach().cpu().numpy() for out in plain(model, optimizer, batches)]


def _content(model: Any) -> dict[str, Any]:
    return {"rows": rows_of(unwrapped(model).ebc.tables()), "dense": dense_of(model)}


def save(setup: Setup, sizes: list[list[int]], path: str, is_async: bool) -> dict[str, Any]:
    """Trains, saves, and trains on."""
    model, optimizer = _state(setup)
    _train(model, optimizer, sizes, setup, 0)
    saved = _content(model)
    state = {"model": model, "optimizer": optimizer}
    pending = None
    if is_async:  # its collectives run beside those of the training, so on a group of their own
        group = dist.new_group(backend="gloo")
        pending = dcp.async_save(state, checkpoint_id=path, process_group=group)
    else:
        dcp.save(state, checkpoint_id=path)
    outputs = _train(model, optimizer, sizes, setup, 1)
    if pending is not None:
        pending.result()
    return {"saved": saved, "outputs": outputs, "end": _content(model)}


def load(setup: Setup, sizes: list[list[int]], path: str, **options: Any) -> dict[str, Any]:
    """Loads into a model that has trained on something else, and trains on."""
    model, optimizer = _state(setup)
    _train(model, optimizer, [[2] * dist.get_world_size()], setup, 2)
    state = {"model": model, "optimizer": optimizer}
    planner = HashLoadPlanner(**options) if options else None
    dcp.load(state, checkpoint_id=path, planner=planner)
    loaded = _content(model)
    outputs = _train(model, optimizer, sizes, setup, 1)
    return {"loaded": loaded, "outputs": outputs, "end": _content(model)}


def _scheduled(setup: Setup, keeps_rates: bool) -> dict[str, Any]:
    """A model, its optimizers and a scheduler that multiplies the rates that there are."""
    model, optimizer = _state(setup)
    optimizer.init_state()
    optimizer.save_param_groups(keeps_rates)
    scheduler = StepLR(optimizer, step_size=3, gamma=0.7)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def _steps(state: dict[str, Any], batches: Any, zeroes_first: bool) -> list[Any]:
    """Trains, with gradients put to zero before the forward or after the step."""
    model, optimizer, scheduler = state.values()
    found = []
    for batch in batches:
        if zeroes_first:
            optimizer.zero_grad()
        loss, out = model(batch)
        loss.backward()
        rates = sorted({t.learning_rate for t in unwrapped(model).ebc.tables().values()})
        found.append((out.detach().numpy(), rates))
        optimizer.step()
        scheduler.step()
        if not zeroes_first:
            optimizer.zero_grad()
    return found


def stop_and_resume(
    setup: Setup,
    num_steps: int,
    path: str,
    how: str,
    zeroes_first: bool = True,
    keeps_rates: bool = True,
) -> dict[str, Any]:
    """What training without a stop gives, and with one in the middle."""
    middle = num_steps // 2
    batches = own_batches([[3] * dist.get_world_size()] * num_steps, weighted=False)
    through = _scheduled(setup, keeps_rates)
    expected = _steps(through, batches, zeroes_first)
    first = _scheduled(setup, keeps_rates)
    found = _steps(first, batches[:middle], zeroes_first)
    again = _scheduled(setup, keeps_rates)
    if how == "dcp":
        dcp.save(first, checkpoint_id=path)
        dcp.load(again, checkpoint_id=path)
    else:
        rest = {name: each.state_dict() for name, each in first.items() if name != "model"}
        rest["over"] = unwrapped(first["model"]).over.state_dict()
        Saver().save(first["model"], path)
        torch.save(rest, f"{path}_{dist.get_rank()}")
        Saver().load(again["model"], path)
        loaded = torch.load(f"{path}_{dist.get_rank()}")
        unwrapped(again["model"]).over.load_state_dict(loaded["over"])
        again["optimizer"].load_state_dict(loaded["optimizer"])
        again["scheduler"].load_state_dict(loaded["scheduler"])
    found += _steps(again, batches[middle:], zeroes_first)
    ends = [_content(each["model"]) for each in (through, again)]
    return {"outputs": (expected, found), "ends": ends}


def load_error(setup: Setup, path: str) -> str:
    """What loading says; the model must not have changed."""
    model, optimizer = _state(setup)
    _train(model, optimizer, [[2] * dist.get_world_size()], setup, 2)
    try:
        dcp.load({"model": model}, checkpoint_id=path)
    except Exception as error:
        return str(error)
    return ""


def load_all(setup: Setup, sizes: list[list[int]], path: str) -> dict[str, Any]:
    """As `load`, reading the shards of all ranks."""
    return load(setup, sizes, path, all_ranks=True)


def save_dicts_whole(setup: Setup, path: str) -> str:
    """What is said of saving a sharded model's state as one, of which torch keeps one rank's."""
    model, _ = _state(setup)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    try:
        dcp.save({"model": model}, checkpoint_id=path, planner=planner)
    except BaseException as error:  # torch's wraps what a rank raised, and is no Exception
        return str(error)
    return "it was saved"


def save_unsharded(setup: Setup, path: str, is_equal: bool) -> str:
    """Saves a model that is not sharded, trained alike or not; what is said of that."""
    model = new_model(setup, "cpu")
    model(make_batch(0 if is_equal else dist.get_rank(), 4))[0].backward()
    try:
        dcp.save({"model": model}, checkpoint_id=path)
    except BaseException as error:  # torch's wraps what a rank raised, and is no Exception
        return str(error)
    other = new_model(setup, "cpu")
    dcp.load({"model": other}, checkpoint_id=path)
    assert_identical(rows_of(other.ebc.tables()), rows_of(model.ebc.tables()))
    return ""
