"""What the tests of failures run on a device; each function returns plain values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from device_type import DEVICE_TYPE
from worlds import Setup, make_batch, new_model, rows_of, shard, unwrapped

from recsdk_core import BusyError, RecsdkError
from recsdk_sharding import HashEmbeddingBagCollection, HashEmbeddingBagConfig
from recsdk_sharding.device import kernels

ADAGRAD = (torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-4})


def train_with_nan(how: str) -> dict[str, Any]:
    """Rows, counts and errors of a step with a gradient that is not finite, by device."""
    found = {}
    for device in ("cpu", DEVICE_TYPE):
        options = {"num_rows": 400, "on_nonfinite": how}
        model = new_model(Setup(*ADAGRAD, options=options), device)
        batch = make_batch(0, 6).sparse
        model.ebc(batch).values().sum().backward()
        values = model.ebc(batch).values()
        grad = torch.ones_like(values)
        grad[2, 0] = torch.nan  # of table "user"
        try:
            values.backward(grad)
            error = ""
        except RecsdkError as raised:
            error = f"{type(raised).__name__}: {raised}"
        tables = model.ebc.tables()
        found[device] = {
            "error": error,
            "rows": rows_of({"user": tables["user"]}),
            "nonfinite": {name: table.stats().nonfinite for name, table in tables.items()},
            "update_count": tables["user"].update_count,
        }
    return found


def _refuses(row: torch.Tensor) -> None:
    raise ValueError("no rows today")


def map_half_of_a_batch() -> dict[str, Any]:
    """Rows by device after a batch of which only the first table could be mapped."""
    keys = torch.arange(5)
    batch = make_batch(0, 1).sparse
    rows = {}
    for device in ("cpu", DEVICE_TYPE):
        first = HashEmbeddingBagConfig(
            name="first", embedding_dim=4, num_embeddings=50, feature_names=["user"]
        )
        second = HashEmbeddingBagConfig(
            name="second",
            embedding_dim=4,
            num_embeddings=50,
            feature_names=["ad"],
            init_fn=_refuses,
        )
        ebc = HashEmbeddingBagCollection([first, second], device=device)
        torch.distributed.optim._apply_optimizer_in_backward(
            torch.optim.SGD, ebc.parameters(), {"lr": 0.1}
        )
        batch = type(batch)(["user", "ad"], torch.cat([keys, keys]), lengths=torch.tensor([5, 5]))
        with pytest.raises(ValueError, match="no rows today"):
            ebc(batch)
        later = type(batch)(["user", "ad"], keys[:3], lengths=torch.tensor([3, 0]))
        pooled = ebc(later).values().detach().cpu().numpy()
        rows[device] = {"rows": rows_of(ebc.tables()), "pooled": pooled}
    return rows


def erase_before_they_are_read() -> tuple[np.ndarray, np.ndarray]:
    """Rows that keys have in place of others, which nobody read, and those that they begin with."""
    config = HashEmbeddingBagConfig(
        name="user", embedding_dim=4, num_embeddings=100, feature_names=["user"]
    )
    ebc = HashEmbeddingBagCollection([config], device=DEVICE_TYPE)
    table: Any = ebc.tables()["user"]
    before, after = np.arange(50), np.arange(50, 100)
    for keys in (before, after):
        with table.index.lease(int(keys[0]) + 1) as lease:
            table.index.map(keys, insert=True, lease=lease)
        table.erase(before)
    return table.lookup(after), table.initial_rows(after)


def fail_an_update(accumulate_steps: int) -> dict[str, Any]:
    """Trains with a kernel that fails once; rows before and after, and of going on."""

    def failing(*args: Any) -> None:
        raise torch.OutOfMemoryError("no memory today")

    options = {"num_rows": 400, "accumulate_steps": accumulate_steps}
    models = [new_model(Setup(*ADAGRAD, options=options), DEVICE_TYPE) for _ in range(2)]
    batches = [make_batch(seed, 6).sparse for seed in range(accumulate_steps)]

    def train(model: Any) -> None:
        for batch in batches:
            model.ebc(batch).values().sum().backward()

    for model in models:
        train(model)
    before = rows_of(models[0].ebc.tables())
    counts = {name: table.update_count for name, table in models[0].ebc.tables().items()}
    kernels.register_kernel(DEVICE_TYPE, "update_rows", failing)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            train(models[0])
    finally:
        kernels.register_kernel(DEVICE_TYPE, "update_rows", None)
    table = models[0].ebc.tables()["user"]
    result = {
        "before": before,
        "after": rows_of(models[0].ebc.tables()),
        "counts": (counts, {n: t.update_count for n, t in models[0].ebc.tables().items()}),
    }
    for model in models:
        train(model)
    table.erase(np.array([0]))  # nothing is in flight
    models[1].ebc.tables()["user"].erase(np.array([0]))
    result["trained"] = [rows_of(model.ebc.tables()) for model in models]
    return result


def _train_one(model: Any, seed: int) -> None:
    model.ebc(make_batch(seed, 6).sparse).values().sum().backward()


def move_between_devices() -> dict[str, Any]:
    """Rows of a model that goes to a device and back, and of one that stays on the cpu."""
    models = [new_model(Setup(*ADAGRAD, options={"num_rows": 400}), "cpu") for _ in range(2)]
    moving, staying = models
    steps = []
    for seed, device in enumerate(("cpu", DEVICE_TYPE, DEVICE_TYPE, "cpu")):
        before = rows_of(moving.ebc.tables())
        moving.ebc.to(device)
        moved = rows_of(moving.ebc.tables())
        for model in models:
            model.ebc.tables()["user"].learning_rate = 0.05
            _train_one(model, seed)
        tables = moving.ebc.tables()
        steps.append(
            {
                "before": before,
                "moved": moved,
                "devices": {str(p.device) for p in (*moving.ebc.parameters(), moving.ebc)},
                "sizes": [len(p) for p in moving.ebc.parameters()],
                "counts": [table.update_count for table in tables.values()],
                "rate": tables["user"].learning_rate,
                "rows": rows_of(tables),
                "expected": rows_of(staying.ebc.tables()),
            }
        )
    return {"steps": steps}


def _attempt_to_move(ebc: Any, target: Any) -> str:
    try:
        ebc.to(target)
    except (BusyError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "moved"


def refuse_to_move() -> list[str]:
    """What refused moves say, and that the rows are as they were."""
    setup = Setup(*ADAGRAD, options={"num_rows": 400}, device=DEVICE_TYPE)
    unsharded = new_model(setup, DEVICE_TYPE).ebc
    sharded = unwrapped(shard(new_model(setup, "meta"), setup)).ebc
    values = unsharded(make_batch(0, 6).sparse).values()
    moves = [(unsharded, "cpu"), (unsharded, torch.float16), (sharded, "cpu")]
    said = [_attempt_to_move(*move) for move in moves]
    values.sum().backward()
    sharded.to(torch.device(DEVICE_TYPE))
    sharded(make_batch(0, 6).sparse.to(torch.device(DEVICE_TYPE))).values().sum().backward()
    assert {p.device.type for p in (*unsharded.parameters(), *sharded.parameters())} == {
        DEVICE_TYPE
    }
    return said


def erase_while_gradients_wait() -> list[str]:
    """What erasing keys of a batch says: in flight, accumulated, and after the update."""
    setup = Setup(*ADAGRAD, options={"num_rows": 400, "accumulate_steps": 2})
    model = new_model(setup, DEVICE_TYPE)
    table = model.ebc.tables()["user"]
    seen = []

    def attempt() -> None:
        try:
            table.erase(np.array([0, 1, -1]))
            seen.append("erased")
        except BusyError:
            seen.append("busy")

    for seed in range(2):
        values = model.ebc(make_batch(seed, 6).sparse).values()
        attempt()
        values.sum().backward()
        attempt()
    return seen


def change_while_exporting(device: str) -> dict[str, Any]:
    """A table that is changed in the midst of an export, and what the rest of that gives."""
    setup = Setup(*ADAGRAD, options={"num_rows": 30, "max_rows": 30})
    table = new_model(setup, device).ebc.tables()["user"]
    table.find_or_insert(np.arange(-3, 27))
    exported = table.export(10)
    next(exported)
    keys = np.array([2**64 - 3, 8], np.uint64)
    table.upsert(keys, np.full((2, table.dim), 7, np.float32))
    table.erase(np.arange(20, 27))
    table.find_or_insert(np.array([100]))
    rest = [batch.keys.tolist() for batch in exported]
    return {"rest": rest, "rows": rows_of({"user": table})}
