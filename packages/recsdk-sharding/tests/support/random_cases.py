"""Random cases of `random_models`, and the comparison of ranks with dictionaries of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import random_models
from comparing import assert_rows_close
from dictionary import train_dictionary
from hypothesis import strategies as st
from plans import Spec
from random_models import Case, TableSpec
from worlds import whole_rows

TABLES = (
    TableSpec(8, ("a", "b")),
    TableSpec(8, ("b",), is_mean=True),
    TableSpec(8, ("c",)),
)
TOLERANCE = {"rtol": 3e-5, "atol": 3e-5}


def assert_same(case: Case, results: list[dict[str, Any]]) -> None:
    """What the ranks found is what dictionaries of rows give.

    With a codec numbers may be off by what it loses of the largest; a step of SGD keeps that.
    """
    expected = train_dictionary(case)
    rows = whole_rows([result["rows"] for result in results], case.replicated())
    if case.codec is None:
        assert_rows_close(rows, expected["rows"])
    else:
        assert_rows_near(rows, expected["rows"], LOSSES[case.codec])
    assert_weight_grads(case, expected["weight_grads"], [r["weight_grads"] for r in results])
    for step, whole in enumerate(expected["outputs"]):
        of_ranks = [result["outputs"][step] for result in results]
        if case.is_sequence:
            assert_sequences(case, whole, of_ranks)
        else:
            assert all(part["keys"] == whole["keys"] for part in of_ranks)
            assert_near(case, [part["values"] for part in of_ranks], whole["values"])


LOSSES = {"FP16": 2e-3, "BF16": 2e-2, "INT8": 3e-2, "MX4": 0.8}
"""Of the largest number, at least of 1."""


def assert_near(case: Case, parts: list[np.ndarray], expected: np.ndarray) -> None:
    """The ranks' numbers one after another are the expected ones."""
    found = np.concatenate(parts)
    if case.codec is None:
        np.testing.assert_allclose(found, expected, **TOLERANCE)
    else:
        largest = max(1.0, float(np.abs(expected).max(initial=0)))
        np.testing.assert_allclose(found, expected, rtol=0, atol=LOSSES[case.codec] * largest)


def assert_rows_near(rows: Any, expected: Any, loss: float) -> None:
    for name, by_key in expected.items():
        assert set(rows[name]) == set(by_key)
        for key, (weight, _) in by_key.items():
            np.testing.assert_allclose(rows[name][key][0], weight, rtol=0, atol=loss)


def assert_weight_grads(
    case: Case, whole: list[dict[str, Any]], of_ranks: list[list[dict[str, Any]]]
) -> None:
    for step, by_feature in enumerate(whole):
        for name, grad in by_feature.items():
            assert_near(case, [steps[step][name] for steps in of_ranks], grad)


def assert_sequences(case: Case, whole: dict[str, Any], of_ranks: list[dict[str, Any]]) -> None:
    for name, jagged in whole.items():
        parts = [part[name] for part in of_ranks]
        assert np.array_equal(np.concatenate([p["ids"] for p in parts]), jagged["ids"])
        assert np.array_equal(np.concatenate([p["lengths"] for p in parts]), jagged["lengths"])
        assert_near(case, [p["values"] for p in parts], jagged["values"])


def cuts(draw: Any, dim: int, places: int) -> list[tuple[int, int]]:
    """Column ranges of a table, each at some place."""
    number = draw(st.integers(1, min(dim, 3)))
    ends = sorted(draw(st.permutations(range(1, dim)))[: number - 1])
    widths = np.diff([0, *ends, dim]).tolist()
    return [(width, draw(st.integers(0, places - 1))) for width in widths]


def specs(draw: Any, dim: int, world_size: int, local_size: int, kinds: list[str]) -> Spec:
    kind = draw(st.sampled_from(kinds))
    if kind in ("row_wise", "data_parallel"):
        return (kind,)
    if kind == "table_wise":
        return (kind, draw(st.integers(0, world_size - 1)))
    nodes = world_size // local_size
    if kind == "table_row_wise":
        return (kind, draw(st.integers(0, nodes - 1)))
    ranges = cuts(draw, dim, nodes if kind == "grid_shard" else world_size)
    if kind == "grid_shard":  # torchrec's class takes a column range of a node once
        ranges = list({place: (width, place) for width, place in ranges}.values())
        ranges[-1] = (ranges[-1][0] + dim - sum(width for width, _ in ranges), ranges[-1][1])
    return (kind, ranges)


SEQUENCE_KINDS = ["row_wise", "table_wise", "column_wise", "data_parallel"]
WORLDS = [(2, 2), (4, 2), (3, 3), (1, 1), (2, 1), (5, 5)]
"""Ranks, and ranks of a node."""
POOLED_KINDS = [*SEQUENCE_KINDS, "table_row_wise", "table_column_wise", "grid_shard"]


@st.composite
def cases(draw: Any, most_ranks: int = 5) -> Case:
    worlds = [world for world in WORLDS if world[0] <= most_ranks]
    world_size, local_size = draw(st.sampled_from(worlds))
    is_sequence = draw(st.sampled_from([False, False, True]))
    width = draw(st.integers(1, 6))
    tables = [
        TableSpec(
            dim=width if is_sequence else draw(st.integers(1, 9)),
            features=tuple(draw(st.permutations(["a", "b", "c"]))[: draw(st.integers(1, 2))]),
            is_mean=draw(st.booleans()),
            count=draw(st.sampled_from([1, 1, 2, 5])),
        )
        for _ in range(draw(st.integers(1, 4)))
    ]
    kinds = SEQUENCE_KINDS if is_sequence else POOLED_KINDS
    sizes = st.tuples(*[st.integers(0, 4)] * world_size)
    counts = any(table.count > 1 for table in tables)  # each occurrence
    weights = "none" if is_sequence else draw(st.sampled_from(["none", "given", "learned"]))
    codec = draw(st.sampled_from([None, None, *LOSSES]))
    return Case(
        tables=tuple(tables),
        specs=tuple(specs(draw, table.dim, world_size, local_size, kinds) for table in tables),
        sizes=tuple(draw(st.lists(sizes, min_size=1, max_size=3))),
        seed=draw(st.integers(0, 1000)),
        local_size=local_size,
        is_sequence=is_sequence,
        is_weighted=weights != "none",
        learns_weights=weights == "learned",
        drops_duplicates=draw(st.booleans()) and not counts,
        batches_vary=draw(st.booleans()),
        codec=codec,
        optimizer="sgd" if codec else draw(st.sampled_from(list(random_models.OPTIMIZERS))),
        rank_rule=draw(st.sampled_from(["virtual_shard", "modulo"])),
    )
