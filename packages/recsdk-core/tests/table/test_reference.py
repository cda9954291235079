"""The shipped strategies, and the shipped reference, which Table has to equal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import find, given
from hypothesis import strategies as st

from recsdk_core import Table, init, optim
from recsdk_core.testing import (
    EDGE_KEYS,
    Operation,
    ReferenceTable,
    bags,
    key_arrays,
    keys,
    operations,
    register_profiles,
    vectors,
)


@given(sequence=operations(3), max_rows=st.sampled_from([None, 4]))
def test_operations_run_on_both_tables_with_the_same_results(
    sequence: list[Operation], max_rows: int | None
) -> None:
    config: dict[str, Any] = {"optimizer": optim.Adagrad(lr=0.1), "max_rows": max_rows}
    table, model = Table(3, **config), ReferenceTable(3, **config)
    for operation in sequence:
        actual, expected = operation.run(table), operation.run(model)
        np.testing.assert_equal(actual, expected)
    assert len(table) == len(model)
    assert table.memory_bytes() >= model.memory_bytes()


def test_edge_keys_and_duplicates_are_drawn() -> None:
    assert find(keys(), lambda key: key == -(2**63)) in EDGE_KEYS
    drawn = find(key_arrays(), lambda ids: len(ids) > len(set(ids.tolist())) > 1)
    assert drawn.dtype == np.int64
    assert find(key_arrays(unsigned=True), lambda ids: len(ids) > 0).dtype == np.uint64


def test_empty_bags_and_batches_are_drawn() -> None:
    _, offsets, weights = find(bags(weighted=True), lambda batch: 0 in np.diff(batch[1]))
    assert offsets[0] == 0
    assert weights is not None
    find(bags(), lambda batch: len(batch[1]) == 1)
    assert find(bags(weighted=False), lambda _: True)[2] is None


@given(rows=vectors(4, 3))
def test_vectors(rows: Any) -> None:
    assert rows.shape == (4, 3)
    assert rows.dtype == np.float32
    assert (np.abs(rows) <= 4).all()


def test_the_reference_says_what_it_cannot_model() -> None:
    model = ReferenceTable(2, initializer=init.TruncatedNormal())
    with pytest.raises(ValueError, match="TruncatedNormal"):
        model.find_or_insert(np.array([1]))


def test_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECSDK_TEST_PROFILE", "often")
    with pytest.raises(ValueError, match="'ci' or 'full', got 'often'"):
        register_profiles()
