"""Every optimizer with every option against its definition in float64, and the reference's bits.

Shape letters: N keys, D row width.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from definitions import ExactRow
from recsdk_core import Bags, Table, init, optim, update_tables
from recsdk_core.testing import ReferenceTable, vectors

TOLERANCE = {"rtol": 5e-5, "atol": 5e-6}
NUM_ROWS = 5
KEYS = (np.arange(NUM_ROWS) + 1) * np.int64(-(2**60) + 7)
DIMS = (1, 5, 8, 16, 33)

PLAIN: list[Any] = [
    optim.SGD(lr=0.1),
    optim.SGD(lr=0.1, momentum=0.7),
    optim.SGD(lr=0.1, momentum=0.7, dampening=0.4),
    optim.SGD(lr=0.1, momentum=0.7, nesterov=True),
    optim.Adagrad(lr=0.1),
    optim.Adagrad(lr=0.1, lr_decay=0.3, initial_accumulator_value=0.2, eps=1e-3),
    optim.RowwiseAdagrad(lr=0.1),
    optim.RowwiseAdagrad(lr=0.1, initial_accumulator_value=0.2, eps=1e-3),
    optim.Adam(lr=0.02),
    optim.Adam(lr=0.02, betas=(0.3, 0.8), eps=1e-3, bias_correction="row"),
    optim.AdamW(lr=0.02),
    optim.AdamW(lr=0.02, bias_correction="row"),
    optim.PartialRowwiseAdam(lr=0.02),
    optim.PartialRowwiseAdam(lr=0.02, betas=(0.3, 0.8), eps=1e-3, bias_correction="row"),
    optim.LAMB(lr=0.02),
    optim.LAMB(lr=0.02, weight_decay=0.3, bias_correction="row"),
    optim.FTRL(lr=0.2),
    optim.FTRL(
        lr=0.2,
        l1_regularization_strength=0.3,
        l2_regularization_strength=0.2,
        beta=0.5,
        initial_accumulator_value=0.3,
    ),
    optim.RMSprop(lr=0.02),
    optim.RMSprop(lr=0.02, alpha=0.8, momentum=0.6, eps=1e-3),
    optim.RMSprop(lr=0.02, alpha=0.8, centered=True),
    optim.RMSprop(lr=0.02, alpha=0.8, centered=True, momentum=0.6),
]
DECAYS = [
    {"weight_decay": 0.4, "weight_decay_mode": "l2"},
    {"weight_decay": 0.4, "weight_decay_mode": "decoupled"},
    {"weight_decay": 0.4, "weight_decay_mode": "l2", "catch_up": True},
    {"weight_decay": 0.4, "weight_decay_mode": "decoupled", "catch_up": True},
]
CLIPS = [{"clip_value": 0.75}, {"clip_norm": 1.5}, {"clip_value": 2.5, "clip_norm": 3.0}]


def with_options(optimizer: Any) -> list[Any]:
    """The optimizer with each legal way to decay and to clip."""
    names = {field.name for field in fields(optimizer)}
    decays = [decay for decay in [{}, *DECAYS] if names >= set(decay)]
    return [
        replace(optimizer, **decay, **clip)
        for decay in decays
        for clip in [{}, *CLIPS]
        if not decay.get("catch_up") or decay["weight_decay_mode"] in catching_up(optimizer, names)
    ]


def catching_up(optimizer: Any, names: set[str]) -> set[str]:
    """The modes of decay with a closed form."""
    if "catch_up" not in names:
        return set()
    is_plain_sgd = isinstance(optimizer, optim.SGD) and not optimizer.momentum
    return {"decoupled", "l2"} if is_plain_sgd else {"decoupled"}


@st.composite
def updates(draw: st.DrawFn) -> list[tuple[float, list[Any], list[Any]]]:
    """[(factor of the learning rate, rows touched (N,), gradients (N, D) per width), ...].

    Gradients are multiples of 1/256, so that their sums are exact in any order: a sum that nearly
    cancels would leave a rounding error that Adam scales up.
    """
    made = []
    for _ in range(draw(st.integers(1, 6))):
        factor = draw(st.sampled_from([1.0, 1.0, 0.5, 3.0, 0.0]))
        rows = [
            np.array(draw(st.lists(st.integers(0, NUM_ROWS - 1), max_size=6)), np.int64)
            for _ in DIMS
        ]
        grads = [
            np.round(draw(vectors(len(r), d)) * 256).astype(np.float32) / 256
            for r, d in zip(rows, DIMS, strict=True)
        ]
        made.append((factor, rows, grads))
    return made


class Trio:
    """A table, the reference and the definition, trained alike."""

    def __init__(self, optimizer: Any, dim: int) -> None:
        config: dict[str, Any] = {"optimizer": optimizer, "initializer": init.Normal(), "seed": dim}
        self.table, self.reference = Table(dim, **config), ReferenceTable(dim, **config)
        start = getattr(optimizer, "initial_accumulator_value", 0.0)
        self.rows = [ExactRow(row, start) for row in self.table.find_or_insert(KEYS)]
        self.reference.find_or_insert(KEYS)
        self.rates: list[float] = []

    def update(self, rate: float, rows: Any, grads: Any) -> None:
        """Trains the reference and the definition; sets the table's learning rate only."""
        self.table.learning_rate = self.reference.learning_rate = rate
        self.rates.append(rate)
        self.reference.apply_gradients(KEYS[rows], grads)
        for row in set(rows.tolist()):
            total = grads[rows == row].sum(axis=0)
            self.rows[row].update(self.table.optimizer, len(self.rates), self.rates, total)

    def check(self) -> None:
        """The table has the reference's bits and is close to the definition, state included."""
        [actual], [expected] = list(self.table.export()), list(self.reference.export())
        np.testing.assert_array_equal(actual.keys, expected.keys)
        np.testing.assert_array_equal(actual.weights, expected.weights)
        assert actual.state.keys() == expected.state.keys()
        for name, values in actual.state.items():
            np.testing.assert_array_equal(values, expected.state[name], err_msg=name)
        assert self.table.log_decay == self.reference.log_decay
        for i, row in enumerate(self.rows):
            np.testing.assert_allclose(actual.weights[i], row.weights, **TOLERANCE)
            for name, values in row.state.items():
                np.testing.assert_allclose(actual.state[name][i], values, **TOLERANCE, err_msg=name)


@pytest.mark.parametrize("optimizer", PLAIN, ids=lambda optimizer: type(optimizer).__name__)
@settings(max_examples=settings().max_examples // 2)
@given(data=st.data(), steps=updates())
def test_equals_its_definition_in_a_collection_of_mixed_widths(
    optimizer: Any, data: st.DataObject, steps: list[Any]
) -> None:
    chosen = data.draw(st.sampled_from(with_options(optimizer)))
    trios = [Trio(chosen, dim) for dim in DIMS]
    for factor, rows, grads in steps:
        calls = []
        for trio, r, g in zip(trios, rows, grads, strict=True):
            trio.update(chosen.lr * factor, r, g)
            bags = Bags(*trio.table.map(KEYS[r], insert=False), np.arange(len(r) + 1))
            calls.append((trio.table, [(bags, g, 0)]))
        update_tables(calls)
    for trio in trios:
        trio.check()


def test_every_optimizer_has_options_and_each_is_tried() -> None:
    assert {type(optimizer) for optimizer in PLAIN} == set(optim.Optimizer.__args__)  # type: ignore[attr-defined]
    counts = {type(o).__name__: len(with_options(o)) for o in PLAIN}
    assert counts["FTRL"] == counts["LAMB"] == 4
    assert counts["Adagrad"] == 16
    assert len(with_options(optim.SGD(lr=0.1))) == 20


CATCHING_UP = [
    optim.SGD(lr=0.1, weight_decay=0.5, catch_up=True),
    optim.AdamW(lr=0.1, weight_decay=0.5, catch_up=True),
]


@pytest.mark.parametrize("optimizer", CATCHING_UP, ids=lambda o: type(o).__name__)
def test_rows_that_every_update_touches_have_nothing_to_catch_up(optimizer: Any) -> None:
    tables = [Table(7, optimizer=o) for o in (optimizer, replace(optimizer, catch_up=False))]
    grads = np.random.default_rng(0).normal(size=(30, NUM_ROWS, 7)).astype(np.float32)
    for table in tables:
        table.find_or_insert(KEYS)
        for grad in grads:
            table.apply_gradients(KEYS, grad)
    np.testing.assert_array_equal(tables[0].lookup(KEYS), tables[1].lookup(KEYS))


@pytest.mark.parametrize("optimizer", CATCHING_UP, ids=lambda o: type(o).__name__)
@given(rates=st.lists(st.sampled_from([0.0, 0.01, 0.5, 1.5]), max_size=8))
def test_what_is_caught_up_is_the_product_over_the_updates_missed(
    optimizer: Any, rates: list[float]
) -> None:
    """One key is touched at the start and the end; readers see it as stored in between."""
    table = Table(3, optimizer=replace(optimizer, lr=0.0), initializer=init.Constant(value=2.0))
    key, other, nothing = KEYS[:1], KEYS[1:2], np.zeros((1, 3), np.float32)
    table.find_or_insert(KEYS)
    table.apply_gradients(key, nothing)
    for rate in rates:
        table.learning_rate = rate
        table.apply_gradients(other, nothing)
        np.testing.assert_array_equal(table.lookup(key), 2.0)
    table.learning_rate = 0.0
    table.apply_gradients(key, nothing)
    kept = np.prod([1 - np.float64(np.float32(rate)) * 0.5 for rate in rates])
    np.testing.assert_allclose(table.lookup(key), 2.0 * kept, rtol=1e-6)
    if rates:  # a row begins to decay with its first update
        np.testing.assert_array_equal(table.lookup(KEYS[2:]), 2.0)


def test_a_restored_table_catches_up_what_the_first_missed() -> None:
    optimizer = optim.AdamW(lr=0.1, weight_decay=0.5, catch_up=True)
    table = Table(3, optimizer=optimizer, initializer=init.Constant(value=2.0))
    table.find_or_insert(KEYS)
    table.apply_gradients(KEYS, np.ones((NUM_ROWS, 3), np.float32))
    for _ in range(5):
        table.apply_gradients(KEYS[:0], np.zeros((0, 3), np.float32))
    copy = Table(3, optimizer=optimizer)
    for batch in table.export():
        copy.upsert(batch.keys, batch.weights, batch.state)
    copy.update_count, copy.log_decay = table.update_count, table.log_decay
    for trained in (table, copy):
        trained.apply_gradients(KEYS, np.ones((NUM_ROWS, 3), np.float32))
    np.testing.assert_array_equal(table.lookup(KEYS), copy.lookup(KEYS))
    with pytest.raises(ValueError, match="log_decay must be .*, got 1"):
        table.log_decay = 1.0
    with pytest.raises(ValueError, match="log_decay must be .*; pass what log_decay"):
        Table(3).log_decay = -1.0


def test_a_checkpoint_has_what_is_to_be_caught_up(tmp_path: Path) -> None:
    optimizer = optim.AdamW(lr=0.1, weight_decay=0.5, catch_up=True)
    table, restored = (Table(3, optimizer=optimizer) for _ in "12")
    table.find_or_insert(KEYS)
    table.apply_gradients(KEYS, np.ones((NUM_ROWS, 3), np.float32))
    table.apply_gradients(KEYS[:1], np.ones((1, 3), np.float32))
    table.save(tmp_path / "saved")
    restored.load(tmp_path / "saved")
    assert restored.log_decay == table.log_decay < 0
    for trained in (table, restored):
        trained.apply_gradients(KEYS, np.ones((NUM_ROWS, 3), np.float32))
    np.testing.assert_array_equal(table.lookup(KEYS), restored.lookup(KEYS))


def test_a_skipped_update_is_caught_up_too() -> None:
    optimizer = optim.SGD(lr=0.5, weight_decay=0.5, catch_up=True)
    table = Table(1, optimizer=optimizer, initializer=init.Constant(value=1.0), on_nonfinite="skip")
    table.find_or_insert(KEYS[:1])
    for grad in (0.0, np.nan, 0.0):
        table.apply_gradients(KEYS[:1], np.full((1, 1), grad, np.float32))
    np.testing.assert_allclose(table.lookup(KEYS[:1]), 0.75**3, rtol=1e-6)


def test_huge_gradients_are_scaled_down_and_no_number_stays_none() -> None:
    optimizer = optim.SGD(lr=1.0, clip_norm=5.0)
    table = Table(2, optimizer=optimizer, initializer=init.Constant(value=0.0))
    table.find_or_insert(KEYS)
    grads = np.array([[3e30, 4e30], [3e-30, 4e-30], [0, 0], [np.nan, 1], [np.inf, 1]], np.float32)
    table.apply_gradients(KEYS, grads)
    actual = table.lookup(KEYS)
    np.testing.assert_allclose(actual[0], [-3, -4], rtol=1e-6)
    np.testing.assert_array_equal(actual[1:3], -grads[1:3])
    assert np.isnan(actual[3]).all()
    assert np.isnan(actual[4, 0])
    assert table.stats().nonfinite == 2


def test_lamb_moves_weights_of_zero() -> None:
    table = Table(2, optimizer=optim.LAMB(lr=0.5), initializer=init.Constant(value=0.0))
    table.find_or_insert(KEYS[:2])
    table.apply_gradients(KEYS[:2], np.array([[1, -1], [0, 0]], np.float32))
    np.testing.assert_allclose(table.lookup(KEYS[:2]), [[-0.5, 0.5], [0, 0]], rtol=1e-6)
