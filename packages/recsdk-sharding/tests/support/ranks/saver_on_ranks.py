"""What the tests of Saver run on every rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import random_models
import torch
import torch.distributed as dist
from loops import plain
from on_ranks import _compute, own_batches
from worlds import Setup, new_model, optimizer_of, rows_of, shard, unwrapped

from recsdk_core import CheckpointError, RecsdkError
from recsdk_core.nn import HashEmbedding
from recsdk_sharding import Saver


def _made(setup: Setup) -> tuple[Any, Any]:
    model = shard(new_model(setup, "meta"), setup)
    return model, optimizer_of(model, setup.dense_lr)


def _content(model: Any) -> dict[str, Any]:
    tables = unwrapped(model).ebc.tables()
    counts = {name: table.update_count for name, table in tables.items()}
    return {"rows": rows_of(tables), "counts": counts}


def save_chain(setup: Setup, sizes: list[list[int]], folder: str) -> list[dict[str, Any]]:
    """Saves in full and then, after each further step, the changes; what was held each time."""
    model, optimizer = _made(setup)
    saver, held = Saver(dist.get_rank()), []
    for number, _ in enumerate(plain(model, optimizer, own_batches(sizes, setup.weighted))):
        if number:
            tables = unwrapped(model).ebc.tables()
            for table in tables.values():
                table.erase(next(iter(table.export())).keys[:2].copy() if len(table) else [])
        saver.save(model, f"{folder}/{number}", incremental=number > 0, step=number)
        held.append(_content(model))
    return held


def load_chain(setup: Setup, folder: str, length: int) -> list[dict[str, Any]]:
    """Loads one after the other; what was held each time."""
    model, optimizer = _made(setup)
    list(plain(model, optimizer, own_batches([[3] * dist.get_world_size()], False, seed=7)))
    held = []
    for number in range(length):
        found = Saver().load(model, f"{folder}/{number}", incremental=number > 0)
        assert found.manifest.step == number
        held.append(_content(model))
    return held


def save_with_batches_ahead(setup: Setup, num_steps: int, depth: int, at: int, folder: str) -> Any:
    """Saves between two steps while the host work of later batches is done or under way."""
    model, optimizer = _made(setup)
    ebc = unwrapped(model).ebc
    batches = own_batches([[3, 2, 4, 1][: dist.get_world_size()]] * num_steps, setup.weighted)
    started: list[Any] = []
    held: dict[str, Any] = {}
    for step, batch in enumerate(batches):
        for ahead in batches[step + len(started) : step + depth + 1]:
            context = ebc.create_context()
            started.append((context, ebc.input_dist(context, ahead.sparse)))
        context, request = started.pop(0)
        ebc.forward = lambda features, c=context, r=request: _compute(ebc, c, r, features)
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()
        del ebc.forward, context, request, loss
        if step == at:
            Saver().save(model, f"{folder}/midway")
            held = _content(model)
    return {"midway": held, "end": _content(model)}


def load(setup: Setup, path: str) -> dict[str, Any]:
    model, _ = _made(setup)
    Saver().load(model, path)
    return _content(model)


def fail_to_save(folder: str, bad_rank: int) -> list[str]:
    """What each rank says if one of them cannot save, and whether the next save goes well."""
    model, optimizer = _made(Setup())
    list(plain(model, optimizer, own_batches([[3] * dist.get_world_size()], False)))

    def progress(num_bytes: int) -> None:
        if dist.get_rank() == bad_rank:
            raise OSError("no space left on this rank")

    def save(told: Any) -> str:
        try:
            Saver().save(model, f"{folder}/one", progress=told)
        except (RecsdkError, OSError) as error:
            return str(error)
        return ""

    return [save(progress), save(None)]


def fail_to_load(path: str) -> dict[str, Any]:
    """What each rank says of a checkpoint of which one rank's file is damaged."""
    model, optimizer = _made(Setup())
    list(plain(model, optimizer, own_batches([[3] * dist.get_world_size()], False, seed=5)))
    before = _content(model)
    try:
        Saver().load(model, path)
        text = ""
    except RecsdkError as error:
        text = str(error)
    return {"text": text, "before": before, "after": _content(model)}


def save_copies(setup: Setup, folder: str) -> dict[str, Any]:
    """Saves tables that are whole on every rank: equal, then different on some, then equal again.

    What each rank says of those that differ, and the rows of those that were saved at last.
    """
    model, optimizer = _made(setup)
    alone = HashEmbedding(3, name="alone", optimizer=torch.optim.Adagrad)
    module = torch.nn.ModuleList([model, alone])
    replicated = unwrapped(model).ebc.tables()["user"]
    alone(torch.arange(9)).sum().backward()
    list(plain(model, optimizer, own_batches([[3] * dist.get_world_size()], False)))
    Saver().save(module, f"{folder}/0")
    texts = {}
    for table in (replicated, alone.table):
        for incremental in (False, True):
            for codec in ("none", "zstd"):
                _put_row(table, dist.get_rank() // 2)
                texts[table.name, incremental, codec] = _refusal(module, folder, incremental, codec)
                _put_row(table, 7)
    alone.table.update_count += dist.get_rank() // 2
    texts["alone", "update_count"] = _refusal(module, folder, False, "none")
    alone.table.update_count = 1
    Saver().save(module, f"{folder}/1", incremental=True)
    tables = {"user": replicated, "alone": alone.table}
    return {"texts": texts, "rows": rows_of(tables)}


def _put_row(table: Any, value: int) -> None:
    table.upsert(np.array([5]), np.full((1, table.dim), value, np.float32))


def _refusal(module: Any, folder: str, incremental: bool, codec: Any) -> str:
    try:
        Saver().save(module, f"{folder}/refused", incremental, codec=codec)
    except CheckpointError as error:
        return str(error)
    return "it was saved"


def load_copies(setup: Setup, folder: str) -> Any:
    model, _ = _made(setup)
    alone = HashEmbedding(3, name="alone", optimizer=torch.optim.Adagrad)
    Saver().load(torch.nn.ModuleList([model, alone]), f"{folder}/1")
    return rows_of({"user": unwrapped(model).ebc.tables()["user"], "alone": alone.table})


def save_case(case: random_models.Case, folder: str) -> list[Any]:
    """Saves a collection of any plan after each step, the first time in full; what it held."""
    module = random_models.shard(random_models.new_module(case, "meta"), case)
    held = []
    for step in range(len(case.sizes)):
        batch = random_models.bags_of(case, step, dist.get_rank())
        result = module(random_models.kjt_of(case, batch)).wait()
        random_models.loss_of(result, case.is_sequence).backward()
        Saver().save(module, f"{folder}/{step}", incremental=step > 0)
        held.append(rows_of(module.tables()))
    return held


def load_case(case: random_models.Case, folder: str, incremental: bool) -> list[Any]:
    """Loads one after the other, each as the last of a chain or as what follows the one before.

    What it held each time; last an error, if there was one.
    """
    module = random_models.shard(random_models.new_module(case, "meta"), case)
    held = []
    for step in range(len(case.sizes)):
        try:
            Saver().load(module, f"{folder}/{step}", incremental=incremental and step > 0)
        except RecsdkError as error:
            return [*held, str(error)]
        held.append(rows_of(module.tables()))
    return held
