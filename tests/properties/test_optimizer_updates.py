"""The table of optimizer updates: complete, close to the definitions, and what the engine does."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, get_args

import numpy as np
import pytest

import optimizer_updates
import write_optimizer_updates
from definitions import ExactRow
from recsdk_core import Table, optim

CASES = {case.name: case for case in optimizer_updates.read_cases()}
KEYS = np.array([-7])


def test_the_table_is_what_its_script_writes() -> None:
    assert optimizer_updates.path().read_text() == write_optimizer_updates.text(), (
        "write it again: tests/support/write_optimizer_updates.py"
    )


@pytest.mark.parametrize("cls", get_args(optim.Optimizer))
def test_each_setting_of_each_optimizer_is_tried(cls: type[Any]) -> None:
    optimizers = [case.optimizer for case in CASES.values() if type(case.optimizer) is cls]
    for field in fields(cls):
        values = {getattr(optimizer, field.name) for optimizer in optimizers}
        assert values - {field.default}, f"{field.name} is its default in every case"


@pytest.mark.parametrize("name", CASES)
def test_updates_follow_the_definitions(name: str) -> None:
    case = CASES[name]
    start = getattr(case.optimizer, "initial_accumulator_value", 0.0)
    row = ExactRow(case.updates[0].before["weight"], start)
    rates = [float(np.float32(case.optimizer.lr * r)) for r in write_optimizer_updates.RATES]
    for update in case.updates:
        assert update.lr == rates[update.t - 1]
        row.update(case.optimizer, update.t, rates[: update.t], update.gradient)
        for field, expected in {"weight": row.weights, **row.state}.items():
            np.testing.assert_allclose(
                update.after[field], expected, rtol=2e-6, atol=1e-6, err_msg=field
            )


@pytest.mark.parametrize("name", CASES)
def test_the_engine_updates_rows_to_the_bit(name: str) -> None:
    case = CASES[name]
    assert "Table" in case.tables, "the engine has every optimizer"
    for update in case.updates:
        table = Table(len(update.gradient), optimizer=replace(case.optimizer, lr=update.lr))
        weights, *state = [values[np.newaxis] for values in update.before.values()]
        table.upsert(KEYS, weights, dict(zip(list(update.before)[1:], state, strict=True)))
        table.update_count, table.log_decay = update.t - 1, update.log_decay
        table.apply_gradients(KEYS, update.gradient[np.newaxis])
        [batch] = table.export()
        assert [field for field, _ in table.state_fields] == list(update.after)[1:]
        for field, values in {"weight": batch.weights, **batch.state}.items():
            np.testing.assert_array_equal(values[0], update.after[field], err_msg=field)
