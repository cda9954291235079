"""What leaves a table on a device, beside one of the engine, and what readers on threads see."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from device_type import DEVICE_TYPE

from recsdk_core import BusyError, CapacityError, Default, Evict, Table, init, optim
from recsdk_sharding import HashEmbeddingBagConfig
from recsdk_sharding.device.home import DeviceHome
from recsdk_sharding.device.table import DeviceTable
from recsdk_sharding.placement.layout import Shard

ADAGRAD = optim.Adagrad(lr=0.5, initial_accumulator_value=0.25)


def made(max_rows: int, default: Default) -> tuple[DeviceTable, Table]:
    """Two tables that evict the oldest keys."""
    rule = Evict.lru()
    config = HashEmbeddingBagConfig(
        name="user",
        embedding_dim=4,
        num_embeddings=max_rows,
        max_rows=max_rows,
        eviction_groups=1,
        eviction=rule,
        default=default,
        initializer=init.Normal(),
        feature_names=["user"],
    )
    home, shards = DeviceHome(torch.device(DEVICE_TYPE)), [Shard.whole(4)]
    [store] = home.make_stores([(config, shards)])
    [held] = home.make_shards(config, shards, store, ADAGRAD)
    return held.table, config.make_table(ADAGRAD, None, (0, 4))


def left_of_batches_that_nobody_read(default: Default) -> int:
    """Maps batches that are abandoned, or read at random; returns how many rows left.

    Rows that left equal the engine's to the bit, whoever had their place before or has it now.
    """
    random, num_left = np.random.default_rng(0), 0
    tables = made(6, default)
    readers = [table.leavers() for table in tables]
    indexes: tuple[Any, Any] = tables[0].index, tables[1]
    flying: list[Any] = []
    for step in range(80):
        keys = random.integers(0, 25, 4)
        leases = [index.lease(step) for index in indexes]
        for index, lease in zip(indexes, leases, strict=True):
            index.map(keys, insert=True, lease=lease)
        flying.append(leases)
        while len(flying) > random.integers(0, 4):
            for lease in flying.pop(0):
                lease.release()
        if random.random() < 0.2:
            found = [table.lookup(keys) for table in tables]
            np.testing.assert_array_equal(found[0], found[1])
        if random.random() < 0.3:
            num_left += _assert_same(readers)
    for lease in (lease for leases in flying for lease in leases):
        lease.release()
    for table in tables:
        table.erase(np.arange(25))
    return num_left + _assert_same(readers)


def _assert_same(readers: list[Any]) -> int:
    found, expected = (reader.read() for reader in readers)
    np.testing.assert_array_equal(found.keys, expected.keys)
    np.testing.assert_array_equal(found.causes, expected.causes)
    np.testing.assert_array_equal(found.weights, expected.weights)
    np.testing.assert_array_equal(found.state["sum"], expected.state["sum"])
    return len(found.keys)


def read_on_another_thread() -> tuple[list[int], int]:
    """The keys that a thread, and this one at the end, read of a table that waits for them."""
    table, _ = made(100, Default.zeros())
    table.find_or_insert(np.arange(100))
    leavers = table.leavers(max_rows=100, on_overflow="block")
    found: list[int] = []

    def read() -> None:
        while len((batch := leavers.read(7, wait_seconds=60.0)).keys):
            found.extend(batch.keys.tolist())

    reader = threading.Thread(target=read)
    reader.start()
    for begin in range(100, 2000, 50):
        table.find_or_insert(np.arange(begin, begin + 50))
    leavers.close()
    reader.join()
    return found + leavers.read().keys.tolist(), leavers.num_lost


def refusals() -> list[str]:
    """What is said when rows would be lost, and of a second reader; nothing has changed then."""
    table, _ = made(2, Default.zeros())
    table.find_or_insert(np.array([1, 2]))
    leavers = table.leavers(max_rows=1, on_overflow="raise")
    before = table.lookup(np.array([1, 2]))
    said = [
        _said(lambda: table.find_or_insert(np.array([3, 4]))),
        _said(lambda: table.upsert(np.array([3, 4]), np.ones((2, 4), np.float32))),
        _said(lambda: table.evict(max_rows=0)),
        _said(table.clear),
    ]
    np.testing.assert_array_equal(table.lookup(np.array([1, 2])), before)
    said.append(_said(table.leavers))
    assert len(leavers) == 0
    return said


def _said(call: Callable[[], object]) -> str:
    try:
        call()
    except (BusyError, CapacityError) as error:
        return str(error)
    return ""


def after_the_table() -> list[list[int]]:
    """What can be read once another optimizer has closed it, and once the table is gone."""
    table, _ = made(2, Default.zeros())
    table.find_or_insert(np.array([1]))
    table.find_or_insert(np.array([2]))
    closed = table.leavers()
    table.find_or_insert(np.array([3]))
    table.set_optimizer(optim.SGD())
    table.find_or_insert(np.array([4]))
    found = [closed.read().keys.tolist()]
    leavers = table.leavers()
    table.find_or_insert(np.array([5]))
    table.clear()
    del table
    gc.collect()
    batches = [leavers.read(1, wait_seconds=60.0) for _ in range(4)]
    return [*found, *(batch.keys.tolist() for batch in batches)]


def told_by_an_export_begun_before() -> str:
    """What an export says whose table gets another optimizer before its end."""
    table, _ = made(2, Default.zeros())
    table.find_or_insert(np.array([1, 2]))
    begun = table.export(1)
    assert next(begun).keys.tolist() == [1]
    table.set_optimizer(optim.SGD())
    assert [batch.state for batch in table.export()] == [{}]
    try:
        next(begun)
    except RuntimeError as error:
        return str(error)
    return ""


def row_of_a_reader_that_is_dropped() -> int:
    """What places a reader takes that nobody has any more."""
    table, _ = made(2, Default.zeros())
    table.find_or_insert(np.array([1, 2]))
    table.leavers(max_rows=1, on_overflow="raise")
    gc.collect()
    table.find_or_insert(np.array([3, 4]))
    return len(table.leavers())
