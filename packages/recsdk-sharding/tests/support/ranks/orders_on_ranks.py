"""Calls on an unsharded model in any order, then training: run on every rank by test_orders.py."""

from __future__ import annotations

import copy
import pickle
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils.checkpoint import checkpoint
from worlds import (
    Model,
    Setup,
    make_batch,
    new_model,
    optimizer_of,
    rows_of,
    shard,
    tables,
    unwrapped,
)

from recsdk_sharding import Saver, import_rows

IMPORTED = torch.tensor([0, -1, 2**62, 12345])


def after_calls(setup: Setup, calls: list[str], is_sharded: bool) -> dict[str, Any]:
    """Rows, state and counts after the calls, one of which is "apply", and two steps."""
    model: Any = Model(tables(**setup.options), torch.device(setup.device))
    model.over.to(setup.device)
    num_imports = 0
    handles, kept, loaded = [], [], _trained_state(setup)
    for call in calls:
        if call == "apply":
            arguments = dict(setup.arguments)
            _apply_optimizer_in_backward(setup.optimizer, model.ebc.parameters(), arguments)
        elif call == "state_dict":
            kept.append(model.state_dict())
        elif call == "tables":
            handles += [model.ebc.tables()]
        elif call == "import_rows":
            num_imports += 1
            _import(model, num_imports)
        elif call == "load_state_dict":
            model.load_state_dict(loaded)
        elif call == "evaluate":
            kept.append(_evaluated(model, setup))
        elif call == "train_frozen":
            model.ebc.requires_grad_(False)
            model(make_batch(7, 3).to(torch.device(setup.device)))
            model.ebc.requires_grad_(True)
        elif call == "save":
            with tempfile.TemporaryDirectory() as folder:
                Saver().save(model, Path(folder) / "saved")
        else:
            copied = copy.deepcopy(model) if call == "deepcopy" else _pickled(model)
            model, handles = copied, []
    steps = [make_batch(seed, 4) for seed in (20, 21)]
    if is_sharded:
        model = shard(model, setup)
        optimizer = optimizer_of(model, 0.1)
    for batch in steps:
        model(batch.to(torch.device(setup.device)))[0].backward()
        if is_sharded:
            optimizer.step()
    ebc = unwrapped(model).ebc if is_sharded else model.ebc
    if not is_sharded:
        for handle in handles:
            assert all(table is handle[name] for name, table in ebc.tables().items())
    found = rows_of(ebc.tables())
    counts = {name: (t.update_count, t.log_decay) for name, t in ebc.tables().items()}
    return {"rows": found, "counts": counts}


def changed_while_in_use(setup: Setup) -> dict[str, Any]:
    """What becomes of steps after the parameters of tables that train were changed."""
    model = shard(new_model(setup, setup.device), setup)
    ebc = unwrapped(model).ebc
    weights = list(ebc.parameters())
    user = ebc.tables()["user"]

    def error_of_step(seed: int) -> str | None:
        try:
            model(make_batch(seed, 4))[0].backward()
        except ValueError as error:
            return str(error)
        return None

    errors = [error_of_step(seed) for seed in (1, 2)]
    weights[0].requires_grad_(False)
    found: dict[str, Any] = {"one frozen": error_of_step(3)}
    for weight in weights:
        weight.requires_grad_(False)
    errors.append(error_of_step(4))
    found["all frozen"] = user.update_count
    for weight in weights:
        weight.requires_grad_(True)
    errors.append(error_of_step(5))
    found["trained again"] = user.update_count
    assert errors == [None] * len(errors), errors
    _apply_optimizer_in_backward(torch.optim.SGD, weights[:1], {"lr": 0.1})
    found["second optimizer"] = error_of_step(6)
    return found


def inside_of_a_checkpoint(setup: Setup, use_reentrant: bool) -> tuple[str, int]:
    """What the backward of a sharded model in a checkpoint says; updates after the next step."""
    model = shard(new_model(setup, setup.device), setup)

    def squares(by: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = (model(make_batch(1, 4))[1] * by).square().sum()
        return total

    said, factor = "", torch.ones(1, requires_grad=True)
    loss = checkpoint(squares, factor, use_reentrant=use_reentrant)
    try:
        loss.backward()
    except RuntimeError as error:
        said = str(error)
    model(make_batch(2, 4))[0].backward()
    return said, unwrapped(model).ebc.tables()["user"].update_count


def _trained_state(setup: Setup) -> dict[str, Any]:
    model = new_model(setup, setup.device)
    model.over.to(setup.device)
    for seed in (1, 2):
        model(make_batch(seed, 5).to(torch.device(setup.device)))[0].backward()
    state: dict[str, Any] = model.state_dict()
    return state


def _import(model: nn.Module, number: int) -> None:
    generator = torch.Generator().manual_seed(number % 2)
    names = {"user": 8, "genre": 3, "other": 5}
    weights = {f"{n}.weight": torch.randn(4, d, generator=generator) for n, d in names.items()}
    import_rows(model, weights, dict.fromkeys(names, IMPORTED))


def _evaluated(model: nn.Module, setup: Setup) -> Any:
    model.eval()
    with torch.no_grad():
        out = model(make_batch(3, 4).to(torch.device(setup.device)))
    model.train()
    return out


def _pickled(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))
