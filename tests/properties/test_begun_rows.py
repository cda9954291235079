"""A table that was loaded or copied goes on as the model, whichever call comes first.

What is tried most are new rows that begin with shared ones.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quick_folders import quick_folder
from recsdk_core import CheckpointError, Default, Table, optim
from recsdk_core.testing import Operation, ReferenceTable, operations
from table_crossing import assert_same, contents

DIM = 3
DEFAULTS = [
    Default.shared_rows(4, begin_with="shared_row"),
    Default.shared_rows(1, begin_with="shared_row"),
    Default.shared_rows(4),
]


def make(default: Default) -> Table:
    return Table(DIM, name="begun", optimizer=optim.Adagrad(lr=0.1), default=default)


def used(default: Default) -> Table:
    table = make(default)
    table.find_or_insert(np.arange(-2, 3))
    return table


def _loaded(table: Table, target: Table, folder: str) -> Table:
    table.save(folder + "/full")
    target.load(folder + "/full")
    return target


def _load_delta(table: Table, folder: str) -> Table:
    """Of which the delta has no row."""
    table.save(folder + "/base")
    table.save_delta(folder + "/delta")
    target = make(table.default)
    target.load(folder + "/delta")
    return target


def _load_after_a_load_that_failed(table: Table, folder: str) -> Table:
    table.save(folder + "/broken")
    for file in Path(folder, "broken").rglob("*.rows"):
        file.write_bytes(file.read_bytes()[:-1])
    target = make(table.default)
    with pytest.raises(CheckpointError):
        target.load(folder + "/broken")
    return _loaded(table, target, folder)


WAYS: dict[str, Callable[[Table, str], Table]] = {
    "new": lambda table, folder: _loaded(table, make(table.default), folder),
    "used": lambda table, folder: _loaded(table, used(table.default), folder),
    "itself": lambda table, folder: _loaded(table, table, folder),
    "delta": _load_delta,
    "deepcopy": lambda table, _: copy.deepcopy(table),
    "pickle": lambda table, _: pickle.loads(pickle.dumps(table)),
    "after a failure": _load_after_a_load_that_failed,
}


def inserted(*keys: int) -> Operation:
    return Operation("find_or_insert", (np.array(keys),))


def written(*keys: int) -> Operation:
    return Operation("upsert", (np.array(keys), np.ones((len(keys), DIM), np.float32)))


@given(
    default=st.sampled_from(DEFAULTS),
    way=st.sampled_from(sorted(WAYS)),
    before=operations(DIM),
    after=operations(DIM),
    rewrites=st.sampled_from([True, True, False]),
)
@example(default=DEFAULTS[0], way="new", before=[], after=[written(2)], rewrites=False)
@example(default=DEFAULTS[0], way="deepcopy", before=[], after=[written(2)], rewrites=False)
@example(default=DEFAULTS[0], way="pickle", before=[], after=[written(2)], rewrites=False)
@example(
    default=DEFAULTS[0],
    way="used",
    before=[inserted(*range(200))],
    after=[written(*range(200))],
    rewrites=False,
)
def test_it_goes_on_as_the_model(
    default: Default, way: str, before: list[Operation], after: list[Operation], *, rewrites: bool
) -> None:
    model = ReferenceTable(DIM, name="begun", optimizer=optim.Adagrad(lr=0.1), default=default)
    table = make(default)
    go_on(table, model, [inserted(*range(3)), *before])
    with quick_folder() as folder:
        table = WAYS[way](table, folder)
    assert_alike(table, model)
    if rewrites and len(model):  # before any key is new
        [rows] = model.export()
        go_on(table, model, [Operation("upsert", (rows.keys, rows.weights + 1))])
    go_on(table, model, after)
    assert_alike(table, model)


def assert_alike(table: Table, model: ReferenceTable) -> None:
    assert len(table) == len(model)
    if not len(model):
        return
    found = contents(table)
    for name, expected in contents(model).items():
        assert_same(found[name], expected, name)


def go_on(table: Table, model: ReferenceTable, calls: list[Operation]) -> None:
    for operation in calls:
        assert_same(operation.run(table), operation.run(model), operation.method)
        table.check_invariants()
