"""Comparisons of what ranks gave with what was expected.

Tolerances: floats are added in another order, a few units of the last place a step. Compared are
values of size about 1 after some steps, so 2e-5 absolute and relative is ten times what was seen.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from plans import replicated
from worlds import Setup, whole_rows

TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}
STATE_TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}
"""Sums of squared gradients: a square doubles what earlier steps left, and they may grow."""


def assert_identical(found: Any, expected: Any) -> None:
    """Equal to the bit, but for what is no number, through dictionaries, lists and tuples."""
    if isinstance(expected, dict):
        assert set(found) == set(expected)
        for key, value in expected.items():
            assert_identical(found[key], value)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_identical(one, other)
    else:
        assert np.shape(found) == np.shape(expected)
        np.testing.assert_array_equal(found, expected)


def assert_rows_close(rows: dict[str, Any], expected: dict[str, Any]) -> None:
    assert {n: set(r) for n, r in rows.items()} == {n: set(r) for n, r in expected.items()}
    for name, by_key in rows.items():
        for key, (weight, state) in by_key.items():
            other, other_state = expected[name][key]
            assert set(state) == set(other_state)
            np.testing.assert_allclose(weight, other, **TOLERANCE)
            for field, value in state.items():
                np.testing.assert_allclose(value, other_state[field], **STATE_TOLERANCE)


def assert_outputs_close(results: list[dict[str, Any]], expected: list[list[Any]]) -> None:
    """Of each rank and step; `expected` has them by step, then by rank."""
    for rank, result in enumerate(results):
        for out, of_ranks in zip(result["outputs"], expected, strict=True):
            np.testing.assert_allclose(out, of_ranks[rank], **TOLERANCE)


def assert_dense_close(dense: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(dense) == set(expected)
    for name, value in dense.items():
        np.testing.assert_allclose(value, expected[name], **TOLERANCE)


def assert_trained_as(
    expected: dict[str, Any], results: list[dict[str, Any]], setup: Setup
) -> None:
    """The ranks have trained what the unsharded module has."""
    assert setup.plan is not None
    rows = whole_rows([result["rows"] for result in results], replicated(setup.plan))
    assert_rows_close(rows, expected["rows"])
    assert_outputs_close(results, expected["outputs"])
    for result in results:
        assert_dense_close(result["dense"], expected["dense"])
        assert result["has_grad"] == []
        assert set(result["counts"].values()) <= {len(expected["outputs"])}
