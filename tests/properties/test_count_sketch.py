"""Admission by a sketch against ReferenceTable: steps of several calls, with batches in flight."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quick_folders import quick_folder
from recsdk_core import Admit, Table
from recsdk_core.testing import ReferenceTable
from recsdk_core.testing._room import key_of_hash

# Of two virtual shards, so that they share counters.
KEYS = np.array([key_of_hash(i << 16 | i % 2) for i in range(24)])
CALLS = st.lists(st.tuples(st.integers(0, 23), st.integers(1, 3)), min_size=1, max_size=8)
STEPS = st.lists(st.lists(CALLS, min_size=1, max_size=3), min_size=1, max_size=8)


@given(
    steps=STEPS,
    depth=st.integers(0, 3),
    width=st.integers(1, 4),
    n=st.integers(2, 12),
    max_rows=st.sampled_from([None, 4]),
    saves_at=st.integers(0, 7),
)
def test_each_decision_is_that_of_the_model(
    steps: list[list[list[tuple[int, int]]]],
    depth: int,
    width: int,
    n: int,
    max_rows: int | None,
    saves_at: int,
) -> None:
    rule = Admit.count_sketch(n, max_bytes=width * 2**19)
    config: dict[str, Any] = {"admission": rule, "max_rows": max_rows}
    table, model = Table(1, num_threads=1, **config), ReferenceTable(1, **config)
    flying: list[tuple[Any, Any]] = []
    for step, calls in enumerate(steps):
        for number, call in enumerate(calls):
            if number != 1:  # the first two calls have one lease
                flying.append((table.lease(step), model.lease(step)))
            keys = KEYS[[place for place, _ in call]]
            counts = np.array([count for _, count in call])
            _, found = table.map(keys, insert=True, lease=flying[-1][0], counts=counts)
            _, wanted = model.map(keys, insert=True, lease=flying[-1][1], counts=counts)
            assert found.tolist() == wanted.tolist()
            assert words_of(table) == words_of(model)
        while len(flying) > depth:
            for lease in flying.pop(0):
                lease.release()
            assert words_of(table) == words_of(model)
        if step == saves_at:
            with quick_folder() as folder:
                table.save(folder + "/saved")
                loaded = Table(1, **config)
                loaded.load(folder + "/saved")
            assert words_of(loaded) == words_of(model)
    table.check_invariants()


def words_of(table: Table | ReferenceTable) -> dict[int, int]:
    """The words of the sketch as readers see it, by the keys that stand for them."""
    if isinstance(table, ReferenceTable):
        return {key: record.count for key, record in table.visible_records().items()}
    cut = table._engine.cut(False, None)
    keys, words, *_ = (part.tolist() for part in cut.admission or ())
    cut.finish(False)
    return dict(zip(keys, words, strict=True))
