"""Writes the table of optimizer updates from the reference in numpy.

.venv/bin/python tests/support/write_optimizer_updates.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import optimizer_updates
from optimizer_cases import CLIPS, DECAYS, PLAIN, with_every_option
from optimizer_updates import Case, Floats, Update
from recsdk_core import optim
from recsdk_core.testing import ReferenceTable

HEAD = """\
# What optimizers do to a row, for tests of every kind of table; optimizer_updates.py says how to
# read it. Written by tests/support/write_optimizer_updates.py; do not edit.
"""
KEY = np.array([7])
FIRST_WEIGHTS = np.array([[0.5, -1.25, 0.0]], np.float32)
RATES = (1.0, 0.5, 2.0, 1.5)
"""Of updates 1 to 4, times the optimizer's."""
GRADIENTS = {1: [4.0, -0.25, 0.75], 4: [-2.75, 3.0, 0.0]}
"""By the number of the update; the others leave the row out."""


def text() -> str:
    """The whole file."""
    return HEAD + "\n".join("\n".join([*optimizer_updates.text_of(case), ""]) for case in cases())


def cases() -> Iterator[Case]:
    """Each optimizer in each of its forms, with each way to decay, and with gradients clipped."""
    optimizers = with_every_option()
    [clip] = [name for name, limits in CLIPS.items() if len(limits) == 2]
    for name in PLAIN:
        for options in (*DECAYS, clip):
            if name + options in optimizers:
                optimizer = optimizers[name + options]
                updates = tuple(updates_of(optimizer))
                yield Case(name + options, optimizer, tuple(tables_with(optimizer)), updates)


def tables_with(optimizer: Any) -> Iterator[str]:
    """The kinds of table that have the optimizer."""
    yield "Table"
    if is_on_backends(optimizer):
        yield "DeviceTable"
    yield "torch"


def is_on_backends(optimizer: Any) -> bool:
    """Whether every backend of the engine has the optimizer."""
    is_known = isinstance(optimizer, optim.SGD | optim.Adagrad | optim.RowwiseAdagrad | optim.Adam)
    counts_rows = getattr(optimizer, "bias_correction", "table") == "row"
    extras = ("dampening", "catch_up", "clip_value", "clip_norm")
    return is_known and not counts_rows and not any(getattr(optimizer, e, None) for e in extras)


def updates_of(optimizer: Any) -> Iterator[Update]:
    """The updates of a new row."""
    table = ReferenceTable(FIRST_WEIGHTS.shape[1], optimizer=optimizer)
    table.upsert(KEY, FIRST_WEIGHTS)
    for t, rate in enumerate(RATES, 1):
        table.learning_rate = lr = float(np.float32(optimizer.lr * rate))
        log_decay, before = table.log_decay, fields_of(table)
        gradient = np.array(GRADIENTS.get(t, []), np.float32)
        table.apply_gradients(KEY[: len(gradient)], gradient.reshape(-1, table.dim))
        if t in GRADIENTS:
            yield Update(t, lr, log_decay, gradient, before, fields_of(table))


def fields_of(table: ReferenceTable) -> dict[str, Floats]:
    """The row's weight and state."""
    [batch] = table.export()
    fields = {"weight": batch.weights, **batch.state}
    return {name: values[0].copy() for name, values in fields.items()}


if __name__ == "__main__":
    optimizer_updates.path().write_text(text())
