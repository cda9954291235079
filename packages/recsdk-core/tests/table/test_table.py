"""Table, call by call."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import numpy as np
import pytest

from recsdk_core import (
    BusyError,
    Default,
    NonFiniteError,
    Outcome,
    RecsdkError,
    Table,
    init,
    optim,
)
from recsdk_core.testing import EDGE_KEYS

KEYS = np.array([10, -10, 10])
FOUND, INSERTED, REFUSED, MISSING = (
    Outcome.FOUND,
    Outcome.INSERTED,
    Outcome.REFUSED,
    Outcome.MISSING,
)


def make(dim: int = 1, **config: Any) -> Table:
    defaults: dict[str, Any] = {
        "initializer": init.Constant(value=0.0),
        "optimizer": optim.SGD(lr=1.0),
    }
    return Table(dim, **{**defaults, **config})


def ones(n: int, dim: int = 1) -> np.ndarray[Any, Any]:
    return np.ones((n, dim), np.float32)


def test_properties() -> None:
    table = Table(
        4,
        name="user",
        seed=7,
        max_rows=9,
        default=Default.constant(0.5),
        optimizer=optim.Adam(lr=0.25),
    )
    assert (table.dim, table.name, table.seed, table.max_rows) == (4, "user", 7, 9)
    assert table.default == Default.constant(0.5)
    assert table.optimizer == optim.Adam(lr=0.25)
    assert table.initializer == init.Uniform(low=-0.01, high=0.01)
    assert table.learning_rate == 0.25
    assert "name='user', dim=4, rows=0, max_rows=9" in repr(table)
    for name in ("dim", "name", "seed", "max_rows", "optimizer", "initializer", "default"):
        with pytest.raises(AttributeError):
            setattr(table, name, 1)


@pytest.mark.parametrize(
    ("optimizer", "fields"),
    [
        (optim.SGD(), ()),
        (optim.Adagrad(), (("sum", 3),)),
        (optim.RowwiseAdagrad(), (("sum", 1),)),
        (optim.Adam(), (("exp_avg", 3), ("exp_avg_sq", 3))),
        (optim.Adam(bias_correction="row"), (("exp_avg", 3), ("exp_avg_sq", 3), ("step", 1))),
    ],
)
def test_state_fields(optimizer: optim.Optimizer, fields: tuple[tuple[str, int], ...]) -> None:
    assert Table(3, optimizer=optimizer).state_fields == fields


BAD_CONFIGS = [
    ({"dim": 0}, ValueError, "dim must be at least 1, got 0"),
    ({"dim": 2.0}, TypeError, "dim must be an int, got 2.0"),
    ({"dim": True}, TypeError, "dim must be an int"),
    ({"name": ""}, ValueError, "name"),
    ({"name": 3}, ValueError, "name"),
    ({"seed": -1}, ValueError, "seed must be at least 0"),
    ({"seed": 2**64}, ValueError, "seed"),
    ({"hash_seed": 2**64}, ValueError, "hash_seed"),
    ({"max_rows": -1}, ValueError, "max_rows must be at least 0, got -1"),
    ({"num_threads": 0}, ValueError, "num_threads must be at least 1"),
    ({"default": 0.5}, TypeError, "default must be a Default, as Default.constant"),
    ({"on_nonfinite": "ignore"}, ValueError, "'apply', 'raise' or 'skip', got 'ignore'"),
    ({"optimizer": "sgd"}, TypeError, "optimizer must be one of"),
    ({"initializer": 0.0}, TypeError, "initializer must be one of"),
]


@pytest.mark.parametrize(("config", "error", "message"), BAD_CONFIGS)
def test_bad_configurations(config: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Table(**{"dim": 2, **config})


def test_every_edge_key_is_legal() -> None:
    table, keys = make(), np.array(EDGE_KEYS)
    _, outcomes = table.find_or_insert(keys, return_outcomes=True)
    assert (outcomes == INSERTED).all()
    assert all(key in table for key in EDGE_KEYS)
    values = np.arange(len(keys), dtype=np.float32)[:, None]
    table.upsert(keys, values)
    np.testing.assert_array_equal(table.lookup(keys), values)
    assert (table.erase(keys, return_outcomes=True) == FOUND).all()
    assert len(table) == 0


def test_outcomes_of_duplicates() -> None:
    table = make()
    assert table.find_or_insert(KEYS, return_outcomes=True)[1].tolist() == [
        INSERTED,
        INSERTED,
        FOUND,
    ]
    assert table.erase(KEYS, return_outcomes=True).tolist() == [FOUND, FOUND, MISSING]
    assert table.lookup(KEYS, return_outcomes=True)[1].tolist() == [MISSING] * 3
    upserted = table.upsert(KEYS, np.array([[1], [2], [3]], np.float32), return_outcomes=True)
    assert upserted.tolist() == [INSERTED, INSERTED, FOUND]
    assert table.lookup(KEYS).tolist() == [[3.0], [2.0], [3.0]]


def test_gradients_of_duplicates_are_summed_into_one_update() -> None:
    table = make(optimizer=optim.Adagrad(lr=1.0))
    table.find_or_insert(KEYS)
    outcomes = table.apply_gradients(np.append(KEYS, 99), ones(4), return_outcomes=True)
    assert outcomes.tolist() == [FOUND, FOUND, FOUND, MISSING]
    [batch] = table.export()
    assert batch.state["sum"].tolist() == [[4.0], [1.0]]
    assert 99 not in table


def test_growth_over_many_splits() -> None:
    table = make(2, initializer=init.Normal())
    keys = (np.arange(60_000) * 7919 - 2**50).astype(np.int64)
    for part in np.array_split(keys, 7):
        table.find_or_insert(part)
        table.check_invariants()
    assert table.stats().index_splits > 10
    assert len(table) == len(keys)
    rows = table.lookup(keys)
    fresh = make(2, initializer=init.Normal()).find_or_insert(keys[::-1].copy())
    np.testing.assert_array_equal(rows, fresh[::-1])


def test_max_rows_refuses_whatever_the_order() -> None:
    table = make(max_rows=2, default=Default.constant(7.0))
    # Key 3 is lower than 1 and 2 by the fixed hash, and lower than 4.
    values, outcomes = table.find_or_insert(np.array([3, 1, 2, 1, 3]), return_outcomes=True)
    assert outcomes.tolist() == [REFUSED, INSERTED, INSERTED, FOUND, REFUSED]
    assert values[:, 0].tolist() == [7.0, 0.0, 0.0, 0.0, 7.0]
    table.erase(np.array([1]))
    _, outcomes = table.find_or_insert(np.array([3, 4]), return_outcomes=True)
    assert outcomes.tolist() == [REFUSED, INSERTED]
    assert table.upsert(np.array([5]), ones(1), return_outcomes=True).tolist() == [REFUSED]
    assert len(table) == 2


@pytest.mark.parametrize("max_rows", [0, None])
def test_empty_input_everywhere(max_rows: int | None) -> None:
    table = make(3, max_rows=max_rows)
    none, no_rows = np.empty(0, np.int64), np.empty((0, 3), np.float32)
    assert table.find_or_insert(none).shape == (0, 3)
    assert table.lookup(none).shape == (0, 3)
    assert [part.shape for part in table.map(none, insert=True)] == [(0,), (0,)]
    table.upsert(none, no_rows)
    table.erase(none)
    table.apply_gradients(none, no_rows)
    assert table.pool(none, np.array([0])).shape == (0, 3)
    assert table.pool(none, np.array([0, 0])).tolist() == [[0.0] * 3]
    table.pool_backward(none, np.array([0]), no_rows)
    assert list(table.export()) == []
    assert table.update_count == 2
    assert len(table) == 0


def test_an_empty_update_advances_adam() -> None:
    tables = [make(optimizer=optim.Adam(lr=0.1)) for _ in range(2)]
    tables[0].apply_gradients(np.empty(0, np.int64), np.empty((0, 1), np.float32))
    for table in tables:
        table.find_or_insert(KEYS)
        table.apply_gradients(KEYS, ones(3))
    assert tables[0].update_count == 2
    assert tables[0].lookup(KEYS)[0] != tables[1].lookup(KEYS)[0]


def test_pool_and_backward() -> None:
    table = make(2, initializer=init.Constant(value=1.0), default=Default.constant(10.0))
    table.find_or_insert(np.array([1, 2]))
    keys, offsets = np.array([1, 2, 3, 1]), np.array([0, 3, 3, 4])
    pooled, outcomes = table.pool(keys, offsets, return_outcomes=True)
    assert pooled.tolist() == [[12.0, 12.0], [0.0, 0.0], [1.0, 1.0]]
    assert outcomes.tolist() == [FOUND, FOUND, MISSING, FOUND]
    assert table.pool(keys, offsets, None, "mean")[0].tolist() == [4.0, 4.0]
    weights = np.array([1, 2, 3, 4], np.float32)
    assert table.pool(keys, offsets, weights)[0].tolist() == [33.0, 33.0]
    weights_grad = table.pool_backward(keys, offsets, ones(3, 2), weights, return_weights_grad=True)
    assert weights_grad.tolist() == [2.0, 2.0, 20.0, 2.0]
    assert table.lookup(keys)[:, 0].tolist() == [-4.0, -1.0, 10.0, -4.0]
    assert 3 not in table


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_a_bag_whose_weights_sum_to_zero_pools_to_zeros_under_mean(pooling: str) -> None:
    table = make(initializer=init.Constant(value=2.0))
    weights = np.array([1, -1], np.float32)
    pooled = table.pool(np.array([1, 2]), np.array([0, 2]), weights, pooling, insert=True)
    assert pooled.tolist() == [[0.0]]


class TestNonFinite:
    GRADS = np.array([[1], [np.nan], [1], [np.inf]], np.float32)
    KEYS = np.array([1, 2, 1, 3])

    def test_apply(self) -> None:
        table = make()
        table.find_or_insert(self.KEYS)
        table.apply_gradients(self.KEYS, self.GRADS)
        assert np.isnan(table.lookup(self.KEYS)[1, 0])
        assert table.stats().nonfinite == 2

    def test_skip(self) -> None:
        table = make(on_nonfinite="skip")
        table.find_or_insert(self.KEYS)
        table.apply_gradients(self.KEYS, self.GRADS)
        assert table.lookup(self.KEYS)[:, 0].tolist() == [-2.0, 0.0, -2.0, 0.0]
        assert table.stats().nonfinite == 2

    def test_raise_changes_nothing(self) -> None:
        table = make(on_nonfinite="raise", name="user")
        table.find_or_insert(self.KEYS)
        with pytest.raises(NonFiniteError, match="table 'user'"):
            table.apply_gradients(self.KEYS, self.GRADS)
        assert table.lookup(self.KEYS)[:, 0].tolist() == [0.0] * 4
        assert table.update_count == 0

    @pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_raise_looks_at_many_rows_of_any_type(self, dtype: Any, rounding: Any) -> None:
        keys, grads = np.arange(33), ones(33, 4)
        options: dict[str, Any] = {"dtype": dtype, "rounding": rounding}
        table, applying = Table(4, on_nonfinite="raise", **options), Table(4, **options)
        for trained in (table, applying):
            trained.find_or_insert(keys)
            trained.apply_gradients(keys, grads)
        rows = applying.lookup(keys)
        np.testing.assert_array_equal(table.lookup(keys), rows)
        grads[32] = np.nan
        with pytest.raises(NonFiniteError):
            table.apply_gradients(keys, grads)
        np.testing.assert_array_equal(table.lookup(keys), rows)


def test_learning_rate_and_update_count() -> None:
    table = make()
    table.find_or_insert(KEYS)
    table.learning_rate = 0.5
    assert table.optimizer == optim.SGD(lr=0.5)
    table.apply_gradients(KEYS[1:2], ones(1))
    assert table.lookup(KEYS[1:2]).tolist() == [[-0.5]]
    table.update_count = 41
    table.apply_gradients(KEYS, ones(3))
    assert table.update_count == 42
    for bad in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="lr must|learning_rate must"):
            table.learning_rate = bad
    with pytest.raises(ValueError, match="update_count"):
        table.update_count = -1
    assert table.learning_rate == 0.5


class TestLeases:
    def test_keys_of_a_step_are_seen_by_later_batches_only(self) -> None:
        table = make()
        first, second = table.lease(step=1), table.lease(step=2)
        table.find_or_insert(np.array([1]), lease=first)
        assert len(table) == 0
        assert 1 not in table
        assert table.stats().num_rows_in_flight == 1
        assert table.map(np.array([1]), insert=True, lease=second)[1].tolist() == [FOUND]
        table.map(np.array([2]), insert=True, lease=second)
        second.release()
        assert len(table) == 0
        first.release()
        assert len(table) == 2
        assert table.stats().num_rows_in_flight == 0

    def test_writers_wait_for_the_batches(self) -> None:
        table = make(name="user")
        lease = table.lease(step=3)
        for write in (
            lambda: table.find_or_insert(KEYS),
            lambda: table.upsert(KEYS, ones(3)),
            lambda: table.erase(KEYS),
            table.clear,
        ):
            with pytest.raises(BusyError, match="table 'user'.*steps 3 to 3"):
                write()
        lease.release()
        table.find_or_insert(KEYS)

    def test_a_row_in_use_is_not_given_to_another_key(self) -> None:
        table = make()
        with table.lease():
            [row], _ = table.map(np.array([1]), insert=True)
            table.erase(np.array([1]))
            [other], _ = table.map(np.array([2]), insert=True)
            assert other != row
        [reused], _ = table.map(np.array([3]), insert=True)
        assert reused == row

    def test_released_by_the_garbage_collector(self) -> None:
        table = make()
        lease = table.lease(step=1)
        table.map(KEYS, insert=True, lease=lease)
        del lease
        gc.collect()
        assert len(table) == 2

    def test_attributes(self) -> None:
        table = make()
        assert table.lease().step is None
        with table.lease(step=5) as lease:
            assert lease.step == 5
            assert not lease.is_released
        assert lease.is_released
        lease.release()

    def test_steps_ascend(self) -> None:
        table = make()
        table.lease(step=5)
        table.lease(step=5)
        with pytest.raises(ValueError, match="step 4 comes after one for step 5"):
            table.lease(step=4)

    @pytest.mark.parametrize("step", [2**63, -(2**63) - 1])
    def test_a_step_is_an_int64(self, step: int) -> None:
        with pytest.raises(ValueError, match=r"Table.lease: step must be at (least|most)"):
            make().lease(step=step)

    @pytest.mark.parametrize("step", ["5", 5.0, True, [5]])
    def test_a_step_is_an_int(self, step: Any) -> None:
        with pytest.raises(TypeError, match=r"Table.lease: step must be an int, got "):
            make().lease(step=step)

    def test_a_lease_outlives_its_table(self) -> None:
        lease = make().lease(step=1)
        gc.collect()
        lease.release()


class TestExport:
    def filled(self) -> Table:
        table = make(2, optimizer=optim.Adam())
        table.find_or_insert(np.arange(10))
        table.apply_gradients(np.arange(5), ones(5, 2))
        return table

    @pytest.mark.parametrize("batch_size", [1, 3, 5, 10, 65536])
    def test_batches(self, batch_size: int) -> None:
        batches = list(self.filled().export(batch_size))
        assert all(1 <= len(batch.keys) <= batch_size for batch in batches)
        assert np.concatenate([batch.keys for batch in batches]).tolist() == list(range(10))
        for batch in batches:
            assert batch.weights.shape == (len(batch.keys), 2)
            shapes = {name: part.shape for name, part in batch.state.items()}
            assert shapes == dict.fromkeys(("exp_avg", "exp_avg_sq"), batch.weights.shape)

    def test_without_state(self) -> None:
        assert all(batch.state == {} for batch in self.filled().export(state=False))

    def test_ascending_row_numbers_after_erasing(self) -> None:
        table = self.filled()
        table.erase(np.array([3, 0]))
        table.find_or_insert(np.array([100]))
        [batch] = table.export()
        rows, _ = table.map(batch.keys, insert=False)
        assert rows.tolist() == sorted(rows)
        assert set(batch.keys) == {1, 2, 4, 5, 6, 7, 8, 9, 100}

    def test_upserting_what_was_exported_restores_it(self) -> None:
        table, copied = self.filled(), make(2, optimizer=optim.Adam())
        for batch in table.export(4):
            copied.upsert(batch.keys, batch.weights, batch.state)
        for mine, other in zip(table.export(), copied.export(), strict=True):
            np.testing.assert_array_equal(mine.weights, other.weights)
            for name in mine.state:
                np.testing.assert_array_equal(mine.state[name], other.state[name])

    def test_state_of_wrong_fields_or_shapes(self) -> None:
        table = self.filled()
        with pytest.raises(ValueError, match=r"fields \['exp_avg', 'exp_avg_sq'\], got \['sum'\]"):
            table.upsert(KEYS, ones(3, 2), {"sum": ones(3, 2)})
        with pytest.raises(ValueError, match=r"'exp_avg' must have shape \(N, 2\)"):
            table.upsert(KEYS, ones(3, 2), {"exp_avg": ones(3, 1), "exp_avg_sq": ones(3, 2)})

    @pytest.mark.parametrize("optimizer", [optim.Adagrad(), optim.Adam()])
    def test_state_that_is_missing(self, optimizer: optim.Optimizer) -> None:
        table = make(2, optimizer=optimizer)
        state: Any = {name: None for name, _ in table.state_fields}
        with pytest.raises(TypeError, match="must be float32, got"):
            table.upsert(KEYS, ones(3, 2), state)
        assert len(table) == 0

    @pytest.mark.parametrize("optimizer", [optim.Adagrad(), optim.Adam()])
    def test_state_of_another_dtype(self, optimizer: optim.Optimizer) -> None:
        table = make(2, optimizer=optimizer)
        state = {name: np.ones((3, width)) for name, width in table.state_fields}
        with pytest.raises(TypeError, match="must be float32"):
            table.upsert(KEYS, ones(3, 2), state)
        assert len(table) == 0

    def test_wide_rows_take_batches_of_few_rows(self) -> None:
        """2**16 of these rows would be 32 GiB."""
        table = make(2**16, optimizer=optim.Adam())
        for copied in (copy.deepcopy(table), pickle.loads(pickle.dumps(table))):
            assert len(copied) == 0
        table.find_or_insert(np.arange(25))
        batches = list(table.export())
        assert [len(batch.keys) for batch in batches] == [21, 4]
        assert [len(batch.keys) for batch in table.export(2**16)] == [25]
        assert np.concatenate([batch.keys for batch in batches]).tolist() == list(range(25))
        assert len(copy.deepcopy(table)) == 25

    def test_the_widest_rows_take_batches_of_one(self) -> None:
        table = make(2**20, optimizer=optim.Adam())
        table.find_or_insert(np.arange(2))
        assert [len(batch.keys) for batch in table.export()] == [1, 1]

    @pytest.mark.parametrize("has_state", [False, True])
    @pytest.mark.parametrize("change", [
        lambda table: table.set_optimizer(optim.Adagrad()),
        lambda table: table.set_optimizer(optim.Adam()),
        lambda table: table.rename("other"),
    ])  # fmt: skip
    def test_it_ends_where_the_table_becomes_another(self, change: Any, has_state: bool) -> None:
        table = self.filled()
        begun, whole = table.export(3, state=has_state), table.export(10, state=has_state)
        assert len(next(begun).keys) == 3
        assert len(next(whole).keys) == 10
        change(table)
        for each in (begun, whole):
            with pytest.raises(RuntimeError, match="another optimizer or name .*begin it anew"):
                next(each)
        assert sum(len(batch.keys) for batch in table.export(3)) == 10

    def test_bad_batch_size_raises_at_the_call(self) -> None:
        with pytest.raises(ValueError, match="batch_size must be at least 1"):
            self.filled().export(0)


@pytest.mark.parametrize("copied_by", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))])
@pytest.mark.parametrize("optimizer", [optim.SGD(), optim.Adam(bias_correction="row")])
def test_copies(copied_by: Any, optimizer: optim.Optimizer) -> None:
    table = Table(
        3, name="user", optimizer=optimizer, seed=5, max_rows=50, default=Default.constant(2.0)
    )
    table.find_or_insert(np.arange(20))
    table.erase(np.arange(0, 20, 3))
    table.learning_rate = 0.125
    table.apply_gradients(np.arange(20), ones(20, 3))
    other = copied_by(table)
    assert (other.name, other.seed, other.max_rows, other.default) == (
        "user",
        5,
        50,
        Default.constant(2.0),
    )
    assert other.optimizer == table.optimizer
    assert other.update_count == 1
    for grown in (table, other):
        grown.find_or_insert(np.arange(-5, 10))
        grown.apply_gradients(np.arange(-5, 20), ones(25, 3))
    keys = np.arange(-6, 21)
    np.testing.assert_array_equal(table.lookup(keys), other.lookup(keys))
    assert len(table) == len(other)


@pytest.mark.parametrize("name", ["dim", "max_rows", "num_threads"])
def test_numbers_that_are_too_large(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"Table: {name} must be at most [0-9]+, got 1180591620717411303424"
    ):
        Table(**{"dim": 2, name: 2**70})


def test_contains_numbers_of_64_bits_only() -> None:
    table = make()
    table.find_or_insert(np.array([0, -1, -(2**63)]))
    assert all(key in table for key in (0, -1, 2**64 - 1, -(2**63), 2**63))
    assert not any(key in table for key in (2**64, -(2**64), -(2**63) - 1, 2**65 - 1))


def test_an_initializer_that_resizes_its_values() -> None:
    def resize(keys: Any, values: Any) -> None:
        values.resize((len(keys) * 2**12, 1), refcheck=False)

    table = make(initializer=init.Custom(fn=resize))
    with pytest.raises(ValueError, match="the custom initializer resized values"):
        table.find_or_insert(KEYS)
    assert len(table) == 0
    table.check_invariants()


def test_contains_takes_ints_only() -> None:
    with pytest.raises(TypeError):
        "a" in make()  # noqa: B015


def test_stats_count_every_key() -> None:
    table = make(max_rows=2)
    table.find_or_insert(np.array([1, 2, 3]))
    table.lookup(np.array([1, 4]))
    table.erase(np.array([1, 1]))
    stats = table.stats()
    assert stats.outcomes == {
        FOUND: 2,
        INSERTED: 2,
        REFUSED: 1,
        MISSING: 2,
        Outcome.OVERFLOWED: 0,
        Outcome.NOT_ADMITTED: 0,
    }
    assert (stats.num_rows, stats.erased) == (1, 1)
    assert stats.index_bytes + stats.row_bytes + stats.metadata_bytes == table.memory_bytes()


def test_reserve_then_insert_takes_no_more_memory_for_rows() -> None:
    table = make(64)
    table.reserve(5000)
    before = table.stats().row_bytes
    table.find_or_insert(np.arange(5000))
    assert table.stats().row_bytes == before
    with pytest.raises(ValueError, match="num_rows must be at least 0"):
        table.reserve(-1)


class TestCustomInitializer:
    def test_sees_each_new_key_once_and_fills_its_row(self) -> None:
        seen: list[list[int]] = []

        def fill(keys: Any, values: Any) -> None:
            assert values.shape == (len(keys), 3)
            assert values.dtype == np.float32
            seen.append(keys.tolist())
            values[:] = keys[:, None]

        table = Table(3, initializer=init.Custom(fn=fill))
        assert table.find_or_insert(np.array([5, 6, 5])).tolist() == [
            [5.0] * 3,
            [6.0] * 3,
            [5.0] * 3,
        ]
        assert seen == [[5, 6]]
        table.find_or_insert(np.array([5, 6]))
        table.upsert(np.array([7]), ones(1, 3))
        assert seen == [[5, 6]]

    def test_an_exception_in_it_is_raised_and_nothing_has_changed(self) -> None:
        def fail(keys: Any, values: Any) -> None:
            raise LookupError(f"no rows for {keys.tolist()}")

        table = Table(2, initializer=init.Custom(fn=fail))
        with pytest.raises(LookupError, match=r"no rows for \[1\]") as error:
            table.find_or_insert(np.array([1]))
        assert error.traceback[-1].name == "fail"
        assert len(table) == 0
        assert table.stats().outcomes[INSERTED] == 0
        table.check_invariants()

    def test_its_arguments_may_be_kept(self) -> None:
        kept: list[Any] = []
        table = Table(2, initializer=init.Custom(fn=lambda *args: kept.extend(args)))
        table.find_or_insert(np.array([1]))
        table.find_or_insert(np.arange(1000))
        assert kept[0].tolist() == [1]
        assert kept[1].tolist() == [[0.0, 0.0]]

    def test_a_cycle_through_it_is_collected(self) -> None:
        class Owner:
            def __init__(self) -> None:
                self.table = Table(1, initializer=init.Custom(fn=self.fill))

            def fill(self, keys: Any, values: Any) -> None:
                pass

        owner = weakref.ref(Owner())
        gc.collect()
        assert owner() is None


def test_invariant_checker_is_silent() -> None:
    table = make()
    table.find_or_insert(np.arange(5000))
    table.erase(np.arange(0, 5000, 2))
    table.check_invariants()
    assert issubclass(BusyError, RecsdkError)
