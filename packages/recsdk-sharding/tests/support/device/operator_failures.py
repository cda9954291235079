"""Calls of which every operator fails in turn, on a device; each function returns plain values.

A call that raises must have changed nothing, one that returns must have done all of its work.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from device_type import DEVICE_TYPE
from failing import Failing
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from worlds import rows_of

from recsdk_core import RecsdkError
from recsdk_core.checkpoint.replacing import NewRows
from recsdk_sharding import HashEmbeddingBagCollection, HashEmbeddingBagConfig, RowOptimizer
from recsdk_sharding.device.home import DeviceHome, DeviceShard
from recsdk_sharding.placement.layout import Shard
from recsdk_sharding.placement.ranks import RankMap

DIM = 3


def collection(optimizer: Any) -> HashEmbeddingBagCollection:
    """A table on a device that leaves rows with infinite gradients alone."""
    config = HashEmbeddingBagConfig(
        name="a",
        embedding_dim=DIM,
        num_embeddings=2000,
        feature_names=["a"],
        on_nonfinite="skip",
    )
    ebc = HashEmbeddingBagCollection([config], device=DEVICE_TYPE)
    apply_optimizer_in_backward(RowOptimizer, ebc.parameters(), {"settings": optimizer})
    return ebc


def batch_of(first: int) -> KeyedJaggedTensor:
    """Ids from `first` on, one of them twice, and an empty bag."""
    ids = torch.tensor([first, first + 1, first, first + 2, first + 3])
    return KeyedJaggedTensor(["a"], ids, lengths=torch.tensor([2, 0, 2, 1]))


def train(ebc: HashEmbeddingBagCollection, *numbers: int) -> Failing:
    """One step on the first ids; operators `numbers` of its backward fail."""
    values = ebc(batch_of(0)).values()
    grad = torch.linspace(-1, 1, values.numel()).view_as(values)
    grad[3, 1] = torch.nan
    grad = grad.to(values.device)
    failing = Failing(numbers)
    with torch.autograd.set_multithreading_enabled(False), failing:  # in this thread
        values.backward(grad)
    return failing


def content(ebc: HashEmbeddingBagCollection) -> dict[str, Any]:
    """All that a table says of itself."""
    (table,) = ebc.tables().values()
    with table.cut(changes_only=True) as cut:
        changed = cut.keys
    return {
        "rows": rows_of(ebc.tables()),
        "counts": [table.update_count, table.log_decay, table.stats().nonfinite, len(table)],
        "changed": sorted(changed.tolist()),
    }


def is_same(one: Any, other: Any) -> bool:
    try:
        np.testing.assert_equal(one, other)
    except AssertionError:
        return False
    return True


def _trained(optimizer: Any) -> HashEmbeddingBagCollection:
    ebc = collection(optimizer)
    train(ebc)
    (table,) = ebc.tables().values()
    table.cut(changes_only=False).finish(True)
    table.track_updates()
    return ebc


def fail_updates(optimizers: dict[str, Any]) -> dict[str, dict[str, int]]:
    """For each optimizer how often a backward left all as it was, and did all of its work."""
    found = {}
    for name, optimizer in optimizers.items():
        ebc = _trained(optimizer)
        before = content(ebc)
        train(ebc)
        after = content(ebc)
        assert not is_same(before, after)
        found[name] = _count(_trained, optimizer, before, after)
    return found


def _count(make: Any, optimizer: Any, before: Any, after: Any) -> dict[str, int]:
    counts = {"before": 0, "after": 0, "fields": len(after["rows"]["a"][0][1])}
    ebc, number = make(optimizer), 0
    while True:
        try:
            failing = train(ebc, number)
        except torch.OutOfMemoryError:
            assert is_same(content(ebc), before), f"operator {number}"
            counts["before"] += 1
        else:
            assert is_same(content(ebc), after), f"operator {number} {failing.names[number:]}"
            if not failing.num_failed:
                return counts
            counts["after"] += 1
            ebc = make(optimizer)
        number += 1


def fail_twice(optimizer: Any) -> list[str]:
    """What steps say if an update cannot be completed, nor before the next one reads its rows."""
    ebc, twin = _trained(optimizer), _trained(optimizer)
    names = train(twin).names
    last = len(names) - 1 - names[::-1].index("index_copy_")
    train(ebc, last)
    said = []
    for numbers in ((0,), ()):
        with Failing(numbers) as failing:
            try:
                (table,) = ebc.tables().values()
                found = table.lookup(np.arange(4))
                said.append("read")
                np.testing.assert_array_equal(found, twin.tables()["a"].lookup(np.arange(4)))
            except torch.OutOfMemoryError:
                said.append(f"failed in {failing.names[0]}")
    assert is_same(content(ebc), content(twin))
    return said


def fail_forwards(optimizer: Any) -> int:
    """How many forwards with new ids failed; their rows must be initial rows ever after."""
    ebc, twin = collection(optimizer), collection(optimizer)
    num_failed = 0
    for number in range(1000):
        batch = batch_of(10 * number)
        twin(batch)
        with Failing([number]) as failing:
            try:
                ebc(batch)
            except torch.OutOfMemoryError:
                num_failed += 1
        if not failing.num_failed:
            break
        keys = ebc.tables()["a"].lookup(batch.values().numpy())
        is_there = np.isin(batch.values().numpy(), list(rows_of(ebc.tables())["a"]))
        expected = twin.tables()["a"].lookup(batch.values().numpy())
        np.testing.assert_array_equal(keys, expected * is_there[:, None])
    for each in (ebc, twin):  # all that find room, so that every row is used
        each(KeyedJaggedTensor(["a"], torch.arange(2000), lengths=torch.tensor([2000])))
    assert len(rows_of(twin.tables())["a"]) == 2000
    gc.collect()  # no forward is in flight
    assert is_same(rows_of(ebc.tables()), rows_of(twin.tables()))
    return num_failed


def fail_upserts(optimizer: Any) -> dict[str, int]:
    """How often an upsert of known and new keys left all as it was, and did all of its work."""
    keys, values = np.arange(2, 8), np.arange(6 * DIM, dtype=np.float32).reshape(6, DIM)
    before, after = content(_trained(optimizer)), None
    counts = {"before": 0, "after": 0}
    for number in range(1000):
        ebc = _trained(optimizer)
        (table,) = ebc.tables().values()
        state = {n: np.full((6, w), 0.5, np.float32) for n, w in table.state_fields}
        with Failing([] if after is None else [number - 1]) as failing:
            try:
                table.upsert(keys, values, state)
                name = "after"
            except torch.OutOfMemoryError:
                name = "before"
        after = after or content(ebc)
        assert is_same(content(ebc), {"before": before, "after": after}[name]), number
        if number and not failing.num_failed:
            break
        counts[name] += 1
    return counts


def refuse_upserts(optimizer: Any) -> list[str]:
    """What upserts that do not fit say; they change nothing."""
    ebc = _trained(optimizer)
    (table,) = ebc.tables().values()
    rows = np.zeros((2000, DIM), np.float32)
    known = np.arange(2)
    said = []
    for keys, values, state in (
        (np.arange(2, 2002), rows, None),
        (known, rows[:2, :1], None),
        (known, rows[:3], None),
        (known, rows[:2].astype(np.float64), None),
        (known, rows[:2], {"none": rows[:2]}),
    ):
        before = content(ebc)
        try:
            table.upsert(keys, values, state)
        except (ValueError, TypeError, RecsdkError) as error:
            said.append(f"{type(error).__name__}: {error}")
        assert is_same(content(ebc), before)
    return said


def _two_shards(optimizer: Any) -> tuple[DeviceHome, list[DeviceShard]]:
    """The two column shards of a table on a device, with rows that were trained."""
    config = HashEmbeddingBagConfig(
        name="a", embedding_dim=2 * DIM, num_embeddings=20, feature_names=["a"]
    )
    home, ranks = DeviceHome(torch.device(DEVICE_TYPE)), RankMap(1)
    shards = [Shard(ranks, 0, (0, DIM)), Shard(ranks, 0, (DIM, 2 * DIM))]
    [store] = home.make_stores([(config, shards)])
    made = home.make_shards(config, shards, store, optimizer)
    home.replace_rows([(each, _new_rows(each, 7 + n, 5)) for n, each in enumerate(made)])
    return home, made


def _new_rows(held: DeviceShard, first: int, count: int) -> NewRows:
    return NewRows(
        keys=np.arange(first, first + count),
        weights=np.full((count, DIM), first, np.float32),
        state={n: np.full((count, w), 0.5, np.float32) for n, w in held.table.state_fields},
        update_count=first,
    )


def _content_of(made: list[DeviceShard]) -> Any:
    rows = rows_of({str(n): each.table for n, each in enumerate(made)})
    return rows, [each.table.update_count for each in made]


def fail_replacements(optimizer: Any) -> dict[str, int]:
    """How often replacing the rows of two shards left both as they were, and replaced both."""
    counts = {"before": 0, "after": 0}
    for number in range(1000):
        home, made = _two_shards(optimizer)
        before = _content_of(made)
        with Failing([number]) as failing:
            try:
                home.replace_rows([(each, _new_rows(each, 9, 6)) for each in made])
                name = "after"
            except torch.OutOfMemoryError:
                name = "before"
        assert (_content_of(made)[1] == [9, 9]) == (name == "after"), number
        assert name == "after" or is_same(_content_of(made), before), number
        counts[name] += 1
        if not failing.num_failed:
            return counts
    raise AssertionError("it never ended")


def refuse_replacements(optimizer: Any) -> str:
    """What is said of a key that the second shard has twice; neither shard changes."""
    home, made = _two_shards(optimizer)
    before = _content_of(made)
    twice = replace(_new_rows(made[1], 9, 2), keys=np.array([9, 9]))
    try:
        home.replace_rows([(made[0], _new_rows(made[0], 9, 6)), (made[1], twice)])
    except ValueError as error:
        assert is_same(_content_of(made), before)
        return str(error)
    return ""
