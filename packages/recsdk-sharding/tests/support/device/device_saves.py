"""What the tests of saving rows in device memory run on every rank; they return plain values."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.distributed as dist
from device_type import DEVICE_TYPE
from on_ranks import own_batches
from worlds import Setup, new_model, rows_of, shard, unwrapped

from recsdk_core import CheckpointError
from recsdk_sharding import Saver
from recsdk_sharding.device.table import DeviceTable

NUM_LINKS = 4


def device_tables(model: Any) -> dict[str, DeviceTable]:
    return dict(unwrapped(model).ebc.tables())


def keys_of(tables: dict[str, DeviceTable]) -> dict[str, set[int]]:
    return {
        name: {int(key) for batch in table.export(state=False) for key in batch.keys}
        for name, table in tables.items()
    }


def train(model: Any, setup: Setup, seed: int, size: int) -> None:
    world_size = dist.get_world_size()
    for batch in own_batches([[size] * world_size], setup.weighted, seed=seed, device=DEVICE_TYPE):
        model(batch)[0].backward()


def erase_some(tables: dict[str, DeviceTable]) -> None:
    for name, keys in keys_of(tables).items():
        tables[name].erase(np.array(sorted(keys)[:2], np.int64))


def save_a_chain(setup: Setup, folder: str) -> list[Any]:
    """Trains, erases and saves in turns; the rows after each save."""
    model = shard(new_model(setup, "meta"), setup)
    held = []
    for number in range(NUM_LINKS):
        train(model, setup, 7 * number, 9 if number == 0 else 2)
        if number:
            erase_some(device_tables(model))
        if number == 2:
            train(model, setup, 0, 1)  # ids that were there before
        Saver().save(model, f"{folder}/{number}", incremental=number > 0)
        held.append(rows_of(device_tables(model)))
    return held


def bytes_told(setup: Setup, folder: str) -> int:
    """How many bytes a save tells of on this rank."""
    model, told = shard(new_model(setup, "meta"), setup), list[int]()
    train(model, setup, 0, 9)
    Saver().save(model, folder, progress=told.append)
    return sum(told)


def load_a_chain(setup: Setup, folder: str, incremental: bool) -> list[Any]:
    """The rows after each link, loaded one after the other into one model."""
    model = shard(new_model(setup, "meta"), setup)
    train(model, setup, 1000, 3)
    found = []
    for number in range(NUM_LINKS):
        Saver().load(model, f"{folder}/{number}", incremental=incremental and number > 0)
        found.append(rows_of(device_tables(model)))
    return found


def go_on_from_a_load(setup: Setup, folder: str, follow: str) -> list[Any]:
    """Loads the last link, trains on, saves what changed; the rows, and as another model has them.

    Among the changes are those of a batch that was in flight during a save, and of one whose save
    failed.
    """
    model = shard(new_model(setup, "meta"), setup)
    Saver().load(model, f"{folder}/{NUM_LINKS - 1}")
    ebc = unwrapped(model).ebc
    [batch] = own_batches(
        [[5] * dist.get_world_size()], setup.weighted, seed=500, device=DEVICE_TYPE
    )
    context = ebc.create_context()
    dist_input = ebc.input_dist(context, batch.sparse).wait().wait()
    train(model, setup, 600, 2)
    Saver().save(model, f"{follow}/0", incremental=True)
    ebc.compute_and_output_dist(context, dist_input).wait()  # not trained: its rows stay as made
    context = dist_input = None
    train(model, setup, 700, 2)
    try:
        Saver().save(model, f"{follow}/0", incremental=True)
        raise AssertionError("a save took the place of another")
    except CheckpointError:
        pass
    train(model, setup, 800, 1)
    Saver().save(model, f"{follow}/1", incremental=True)
    chain = [*(f"{folder}/{n}" for n in range(NUM_LINKS)), f"{follow}/0", f"{follow}/1"]
    other = shard(new_model(setup, "meta"), setup)
    Saver().load(other, chain)
    return [rows_of(device_tables(model)), rows_of(device_tables(other))]


def refuse(setup: Setup, folder: str) -> list[str]:
    """What is said of deltas without a save before them, and after rows came from elsewhere."""
    model = shard(new_model(setup, "meta"), setup)
    train(model, setup, 0, 2)
    texts = []
    for _ in range(2):
        try:
            Saver().save(model, f"{folder}/delta", incremental=True)
        except CheckpointError as error:
            texts.append(str(error))
        Saver().save(model, f"{folder}/{len(texts)}")
        ebc = unwrapped(model).ebc
        ebc.load_state_dict(ebc.state_dict())
    return texts


def save_after_much_came_and_went(setup: Setup, folder: str) -> list[Any]:
    """A chain whose delta has more keys that left than the tables take; the rows, and as loaded."""
    model = shard(new_model(setup, "meta"), setup)
    train(model, setup, 0, 3)
    Saver().save(model, f"{folder}/0")
    tables = device_tables(model)
    for table in tables.values():
        for first in range(0, 4 * table.max_rows, 50):
            keys = np.arange(first, first + 50) + np.iinfo(np.int64).min  # before all others
            table.find_or_insert(keys)
            table.erase(keys)
    for name, held in keys_of(tables).items():
        tables[name].erase(np.array(sorted(held)[1:], np.int64))
    train(model, setup, 7, 2)
    Saver().save(model, f"{folder}/1", incremental=True)
    other = shard(new_model(setup, "meta"), setup)
    Saver().load(other, f"{folder}/1")
    return [rows_of(device_tables(model)), rows_of(device_tables(other))]


def catch_up_after_a_delta(setup: Setup, folder: str) -> list[Any]:
    """What a model has that saved a delta and trained on, and one that loaded it and did, too."""
    models = [shard(new_model(setup, "meta"), setup) for _ in range(2)]
    train(models[0], setup, 0, 6)
    Saver().save(models[0], f"{folder}/0")
    for seed in (7, 14):
        train(models[0], setup, seed, 2)
    Saver().save(models[0], f"{folder}/1", incremental=True)
    Saver().load(models[1], f"{folder}/1")
    for model in models:
        train(model, setup, 0, 4)  # ids that updates left out
    tables = [device_tables(model) for model in models]
    counts = [
        {name: (table.log_decay, table.update_count) for name, table in each.items()}
        for each in tables
    ]
    return [(rows_of(each), count) for each, count in zip(tables, counts, strict=True)]
