"""What keys without a row read, and shared rows on their way: saved, loaded, copied, replaced."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recsdk_core import (
    Admit,
    CheckpointError,
    Default,
    Evict,
    Index,
    Outcome,
    Table,
    init,
    map_tables,
    optim,
)
from recsdk_core.checkpoint import chain_of, compact, diff, open_checkpoint, reshard
from recsdk_core.checkpoint.model.saving import save_tables
from recsdk_core.checkpoint.model.shards import Shard
from recsdk_core.checkpoint.participants import OneRank
from recsdk_core.checkpoint.saving import SaveOptions
from recsdk_core.serving import freeze, freeze_tables
from recsdk_core.testing import ReferenceTable

KEYS = np.arange(40) * 0x9E3779B97F4A7C1
GRADS = np.linspace(-1.0, 1.0, 40 * 3, dtype=np.float32).reshape(40, 3)


def make(default: Default, **config: Any) -> Table:
    config = {"name": "user", "optimizer": optim.Adam(lr=0.1), "max_rows": 10, **config}
    return Table(3, default=default, initializer=init.Uniform(low=-1.0, high=1.0), **config)


def trained(default: Default = Default.shared_rows(4), **config: Any) -> Table:
    table = make(default, **config)
    for _ in range(3):
        table.find_or_insert(KEYS)
        table.apply_gradients(KEYS, GRADS)
    return table


def assert_equal(actual: Table, expected: Table) -> None:
    """Rows, shared rows, and what both make of further updates."""
    for again in (False, True):
        if again:
            actual.apply_gradients(KEYS, GRADS)
            expected.apply_gradients(KEYS, GRADS)
        np.testing.assert_array_equal(actual.lookup(KEYS), expected.lookup(KEYS))
        found, wanted = actual.shared_rows(), expected.shared_rows()
        np.testing.assert_array_equal(found.keys, wanted.keys)
        np.testing.assert_array_equal(found.weights, wanted.weights)
        assert found.state.keys() == wanted.state.keys()
        for name, values in wanted.state.items():
            np.testing.assert_array_equal(found.state[name], values)


@pytest.mark.parametrize("step", [None, 1])
def test_what_readers_cannot_make_is_not_counted(step: int | None) -> None:
    def fill(keys: Any, values: Any) -> None:
        if 99 in keys:
            raise LookupError("no row for 99")
        values[:] = 1.0

    table = Table(
        2,
        admission=Admit.count(3),
        default=Default.initial_row(),
        initializer=init.Custom(fn=fill),
    )
    other = Table(2)
    keys, ends = np.array([5, 6, 99]), np.array([0, 3])
    with table.lease(step) as lease:
        table.map(keys[:2], insert=True, lease=lease)
        calls: list[Any] = [
            lambda: table.map(keys, insert=True, lease=lease),
            lambda: table.find_or_insert(keys, lease=lease),
            lambda: table.pool(keys, ends, insert=True, lease=lease),
            lambda: map_tables([(other, keys), (table, keys)], insert=True, leases=[None, lease]),
        ]
        for call in calls:
            with pytest.raises(LookupError, match="no row for 99"):
                call()
    assert table.stats().outcomes[Outcome.NOT_ADMITTED] == 2
    assert table.stats().admission_records == 2
    assert table.explain(5).seen == 1
    table.check_invariants()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_many_keys_at_once_read_the_rows_that_they_would_get(num_threads: int) -> None:
    keys = np.random.default_rng(1).permutation(20_000) * 0x9E3779B97F4A7C1
    tables = [make(Default.initial_row(), max_rows=None, num_threads=num_threads) for _ in range(2)]
    for table, some in zip(tables, (keys[:6000], keys), strict=True):
        table.map(some, insert=True)
    some, every = (table.lookup(keys) for table in tables)
    np.testing.assert_array_equal(some, every)
    assert len(np.unique(every, axis=0)) == len(keys)


def test_shared_rows_learn_and_are_no_keys() -> None:
    table = trained()
    assert (len(table), table.stats().num_rows) == (10, 10)
    shared = table.shared_rows()
    assert all(key not in table for key in shared.keys.tolist())
    assert len({row.tobytes() for row in shared.weights}) == 4
    assert (shared.weights != make(Default.shared_rows(4)).shared_rows().weights).any(1).all()
    unseen, outcomes = table.lookup(shared.keys, return_outcomes=True)
    assert (outcomes == Outcome.MISSING).all()
    np.testing.assert_array_equal(unseen, shared.weights)
    table.clear()
    np.testing.assert_array_equal(table.shared_rows().weights, shared.weights)


def test_a_default_of_another_kind_shares_none() -> None:
    for default in (Default.zeros(), Default.constant(2.0), Default.initial_row()):
        assert len(trained(default).shared_rows().keys) == 0


def test_an_index_says_what_a_key_without_a_row_reads() -> None:
    index = Index(max_rows=0, default=Default.shared_rows(8))
    model = ReferenceTable(1, max_rows=0, default=Default.shared_rows(8))
    rows, _ = index.map(KEYS, insert=True)
    assert rows.tolist() == [model._which_shared(key) for key in KEYS.tolist()]
    rows, _ = Index(max_rows=0, default=Default.initial_row()).map(KEYS, insert=False)
    assert rows.tolist() == KEYS.tolist()


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_copies_have_the_shared_rows(copy_of: Any, dtype: Any) -> None:
    table = trained(dtype=dtype)
    assert_equal(copy_of(table), table)


def test_another_optimizer_or_name_keeps_their_weights() -> None:
    table, weights = trained(), trained().shared_rows().weights
    table.rename("other")
    np.testing.assert_array_equal(table.shared_rows().weights, weights)
    table.set_optimizer(optim.Adagrad(lr=0.1, initial_accumulator_value=0.5))
    np.testing.assert_array_equal(table.shared_rows().weights, weights)
    assert (table.shared_rows().state["sum"] == 0.5).all()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("optimizer", [optim.SGD(lr=0.1), optim.Adam(lr=0.1)])
def test_saved_and_loaded(tmp_path: Path, optimizer: Any, dtype: Any) -> None:
    table = trained(optimizer=optimizer, dtype=dtype)
    table.save(tmp_path / "full")
    for number in range(2):  # a delta has them all, too
        table.apply_gradients(KEYS, GRADS)
        table.save_delta(tmp_path / str(number))
    open_checkpoint(tmp_path / "1").verify()
    other = make(Default.shared_rows(4), optimizer=optimizer, dtype=dtype)
    other.load(tmp_path / "1")
    assert_equal(other, table)


def test_checkpoints_are_rewritten_with_them(tmp_path: Path) -> None:
    table = trained()
    table.save(tmp_path / "full")
    table.apply_gradients(KEYS, GRADS)
    table.save_delta(tmp_path / "delta")
    reshard(tmp_path / "delta", tmp_path / "three", world_size=3)
    compact(tmp_path / "three", tmp_path / "one")
    found = diff(chain_of(tmp_path / "three"), chain_of(tmp_path / "one"))
    assert all(each.is_equal for each in found)
    other = make(Default.shared_rows(4))
    other.load(tmp_path / "one")
    assert_equal(other, table)


@pytest.mark.parametrize(
    "default", [Default.shared_rows(1), Default.zeros(), Default.initial_row()]
)
def test_another_default_is_refused_unless_allowed(tmp_path: Path, default: Default) -> None:
    trained().save(tmp_path / "full")
    other = make(default)
    now = {"constant": r"Default.constant\(0.0\)", "shared_rows": r"Default.shared_rows\(1\)"}
    wanted = now.get(default.kind, r"Default.initial_row\(\)")
    with pytest.raises(
        CheckpointError,
        match=rf"was saved with Default.shared_rows\(4\), it now has {wanted}: .*allow 'default'",
    ):
        other.load(tmp_path / "full")
    assert len(other) == 0
    other.load(tmp_path / "full", allow=["default"])
    assert len(other) == 10
    np.testing.assert_array_equal(other.shared_rows().weights, make(default).shared_rows().weights)


def test_a_predicate_for_all_tables_leaves_shared_rows_as_they_are(tmp_path: Path) -> None:
    table = trained(eviction=Evict.lfu(), eviction_groups=1)
    table.save(tmp_path / "whole")
    compact(tmp_path / "whole", tmp_path / "none", keep="count > 1000")
    loaded = make(Default.shared_rows(4), eviction=Evict.lfu(), eviction_groups=1)
    loaded.load(tmp_path / "none")
    assert len(loaded) == 0 < len(table)
    np.testing.assert_array_equal(loaded.shared_rows().weights, table.shared_rows().weights)


def test_a_predicate_is_for_a_table_that_is_only_named_like_shared_rows(tmp_path: Path) -> None:
    shards = []
    for name in ("user", "user.shared"):
        table = Table(2, name=name, max_rows=8, eviction_groups=1, eviction=Evict.lfu())
        table.find_or_insert(np.array([1, 2, 2]))
        shards.append(Shard(table=table))
    save_tables(lambda: (shards, SaveOptions()), OneRank(), tmp_path / "whole")
    compact(tmp_path / "whole", tmp_path / "some", keep="count > 1")
    kept = open_checkpoint(tmp_path / "some").manifest.tables
    assert {entry.name: entry.num_rows for entry in kept} == {"user": 1, "user.shared": 1}


def test_another_optimizer_drops_their_state(tmp_path: Path) -> None:
    table = trained()
    table.save(tmp_path / "full")
    other = make(Default.shared_rows(4), optimizer=optim.Adagrad(lr=0.1))
    other.load(tmp_path / "full", allow=["optimizer"])
    np.testing.assert_array_equal(other.shared_rows().weights, table.shared_rows().weights)
    assert (other.shared_rows().state["sum"] == 0).all()


def test_frozen_tables_have_no_initial_rows(tmp_path: Path) -> None:
    table = trained(Default.initial_row())
    table.save(tmp_path / "full")
    with pytest.raises(ValueError, match="table 'user': keys without a row read .*default"):
        freeze(tmp_path / "full", tmp_path / "frozen")
    with pytest.raises(ValueError, match="table 'user': keys without a row read .*default"):
        freeze_tables([table], tmp_path / "frozen")
    assert not (tmp_path / "frozen").exists()


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"kind": "shared_rows"}, ValueError, "n is for kind='shared_rows', which needs it"),
        ({"n": 4}, ValueError, "n is for kind='shared_rows'"),
        ({"kind": "shared_rows", "n": 65_537}, ValueError, "n must be at most 65536"),
        ({"kind": "shared_rows", "n": 0}, ValueError, "n must be at least 1"),
        ({"kind": "shared_rows", "n": 2.0}, TypeError, "n must be"),
        ({"kind": "initial_row", "value": 1.0}, ValueError, "takes no value"),
        ({"begin_with": "shared_row"}, ValueError, "begin_with='shared_row' is for kind='shared_r"),
        (
            {"kind": "shared_rows", "n": 1, "begin_with": "zeros"},
            ValueError,
            "begin_with must be 'initial_row' or",
        ),
        ({"kind": "random"}, ValueError, "kind must be 'constant' or"),
        ({"value": float("nan")}, ValueError, "value must be finite"),
    ],
)
def test_what_contradicts_itself_is_refused(given: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Default(**given)


def test_a_new_row_begins_with_the_shared_one() -> None:
    table = trained(Default.shared_rows(4, begin_with="shared_row"), max_rows=None)
    fresh = KEYS + 1
    before = table.lookup(fresh)
    np.testing.assert_array_equal(table.find_or_insert(fresh), before)
    table.erase(KEYS)  # all of them have rows
    reads = table.lookup(KEYS)
    np.testing.assert_array_equal(table.find_or_insert(KEYS), reads)


def test_what_new_rows_begin_with_may_change(tmp_path: Path) -> None:
    table = trained()
    table.save(tmp_path / "full")
    other = make(Default.shared_rows(4, begin_with="shared_row"))
    other.load(tmp_path / "full")
    np.testing.assert_array_equal(other.shared_rows().weights, table.shared_rows().weights)
