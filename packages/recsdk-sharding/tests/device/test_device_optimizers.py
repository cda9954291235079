"""Every optimizer on tensors against the engine's: weights, state, failures.

Shape letters: U distinct rows, D row width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from failing import Failing

import optimizer_updates
from optimizer_cases import PLAIN, with_every_option
from recsdk_core import Table, init, optim
from recsdk_sharding.device.optimizers import Step, check_optimizer, initial_state, update_rows

CASES = with_every_option()
UPDATES = {case.name: case for case in optimizer_updates.read_cases()}
ROUNDINGS = 4
"""Of the largest number that a field has before or after: torch rounds in an order of its own."""
NUM_ROWS, NUM_STEPS, DIM = 6, 6, 5
KEYS = np.arange(NUM_ROWS) - 3
TOLERANCE = {"rtol": 5e-5, "atol": 5e-6}


class Pair:
    """A table of the engine's, and tensors with the same rows."""

    def __init__(self, optimizer: Any, on_nonfinite: Any = "apply") -> None:
        self.optimizer = optimizer
        self.table = Table(
            DIM,
            optimizer=optimizer,
            initializer=init.Normal(),
            on_nonfinite=on_nonfinite,
        )
        weights = torch.from_numpy(self.table.find_or_insert(KEYS).copy())
        self.store = torch.cat([weights, torch.zeros(1, DIM)])
        self.state = {
            name: torch.full((NUM_ROWS + 1, width), initial_state(optimizer, name))
            for name, width in self.table.state_fields
        }
        self.log_decay = 0.0
        self.count = 0

    def step(self) -> Step:
        return Step(self.optimizer, self.count + 1, self.log_decay)

    def set_rate(self, rate: float) -> None:
        self.optimizer = replace(self.optimizer, lr=rate)
        self.table.learning_rate = rate

    def update(self, rows: Any, grads: Any, skipped: int | None = None) -> None:
        """One update of distinct rows (U,) with their gradients (U, D), of both.

        The store's spare row takes what `skipped`, a row, would have got.
        """
        self.table.apply_gradients(KEYS[rows], grads)
        step = self.step()
        rows_U, grad_UD = torch.from_numpy(rows), torch.from_numpy(grads)
        if skipped is not None:
            rows_U = rows_U.masked_fill(rows_U == skipped, NUM_ROWS)
        for write in update_rows(step, self.store, self.state, rows_U, grad_UD):
            write()
        self.store[-1].zero_()
        self.count, self.log_decay = step.count, step.next_log_decay()

    def check(self) -> None:
        [expected] = list(self.table.export())
        order = np.argsort(expected.keys)
        np.testing.assert_allclose(self.store[:-1], expected.weights[order], **TOLERANCE)
        assert set(self.state) == set(expected.state)
        for name, field in self.state.items():
            np.testing.assert_allclose(
                field[:-1], expected.state[name][order], **TOLERANCE, err_msg=name
            )
        np.testing.assert_allclose(self.log_decay, self.table.log_decay, rtol=1e-12)
        assert not self.store[-1].any()


def test_every_optimizer_of_the_engine_is_tried() -> None:
    assert {type(optimizer) for optimizer in PLAIN.values()} == set(get_args(optim.Optimizer))
    assert len(CASES) > 200


@pytest.mark.parametrize("name", CASES)
def test_updates_are_the_engines(name: str) -> None:
    pair, rng = Pair(CASES[name]), np.random.default_rng(len(name))
    rate = pair.optimizer.lr
    for number in range(NUM_STEPS):
        rows = rng.permutation(NUM_ROWS)[: number % NUM_ROWS]
        grads = rng.normal(size=(len(rows), DIM)).astype(np.float32)
        grads[:1] = 0
        pair.set_rate(rate * (1.0, 1.0, 0.5, 3.0, 0.0)[number % 5])
        pair.update(rows, grads)
        pair.check()


@pytest.mark.parametrize("name", UPDATES)
def test_updates_are_those_of_the_table_up_to_rounding(name: str) -> None:
    case = UPDATES[name]
    if "torch" not in case.tables:
        with pytest.raises(ValueError, match="is not supported for rows in device memory"):
            check_optimizer(case.optimizer, "users")
        return
    for update in case.updates:
        optimizer = check_optimizer(replace(case.optimizer, lr=update.lr), "users")
        fields = {f: torch.from_numpy(v.copy())[None] for f, v in update.before.items()}
        step = Step(optimizer, update.t, update.log_decay)
        grad_UD = torch.from_numpy(update.gradient)[None]
        state = {f: value for f, value in fields.items() if f != "weight"}
        for write in update_rows(step, fields["weight"], state, torch.arange(1), grad_UD):
            write()
        for field, expected in update.after.items():
            largest = np.maximum(np.abs(update.before[field]), np.abs(expected))
            error = np.abs(fields[field][0].numpy() - expected)
            assert (error <= ROUNDINGS * np.finfo(np.float32).eps * largest).all(), (field, error)


def test_huge_gradients_are_scaled_down_and_no_number_stays_none() -> None:
    pair = Pair(optim.SGD(lr=1.0, clip_norm=5.0))
    grads = np.zeros((NUM_ROWS, DIM), np.float32)
    grads[:5, :2] = [[3e30, 4e30], [3e-30, 4e-30], [0, 0], [np.nan, 1], [np.inf, 1]]
    pair.update(np.arange(NUM_ROWS), grads)
    pair.check()
    assert torch.isnan(pair.store).sum(1).tolist() == [0, 0, 0, DIM, 1, 0, 0]


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_gradients_that_are_not_finite_do_what_they_do_in_the_engine(
    name: str, value: float
) -> None:
    applying, skipping = Pair(PLAIN[name]), Pair(PLAIN[name], on_nonfinite="skip")
    rng = np.random.default_rng(0)
    for _ in range(2):
        grads = rng.normal(size=(NUM_ROWS, DIM)).astype(np.float32)
        grads[2, 1] = value
        applying.update(np.arange(NUM_ROWS), grads)
        skipping.update(np.arange(NUM_ROWS), grads, skipped=2)
    applying.check()
    skipping.check()
    assert bool(skipping.store[:-1].isfinite().all())


@pytest.mark.parametrize("name", PLAIN)
def test_an_update_is_computed_before_it_is_written_which_takes_no_memory(name: str) -> None:
    pair = Pair(replace(PLAIN[name], clip_value=0.75, clip_norm=1.5))
    before = pair.store.clone(), {n: field.clone() for n, field in pair.state.items()}
    grad_UD = torch.ones(3, DIM)
    writes = update_rows(pair.step(), pair.store, pair.state, torch.arange(3), grad_UD)
    assert torch.equal(pair.store, before[0])
    assert all(torch.equal(field, before[1][n]) for n, field in pair.state.items())
    with Failing() as counted:
        for write in writes:
            write()
    assert counted.names == ["index_copy_"] * (1 + len(pair.state))
    assert not torch.equal(pair.store, before[0])
