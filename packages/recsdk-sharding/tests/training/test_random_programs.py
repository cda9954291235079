"""A random program on ranks gives what it gives on the unsharded collection.

Unlike the programs of test_crossed_policies.py these need no model, so tables, rules, optimizers,
widths and turns are any.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plans import replicated
from programs_on_ranks import Seen, run_part, run_unsharded
from random_programs import APART, SETTINGS, Program, is_legal, program_of
from rank_pool import RankPool
from worlds import Rows, whole_rows

from covering import covering
from sampling import SEED, sampled

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
"""Of outputs, where partial sums are added in another order, and of rows on devices."""
ROWS = covering(SETTINGS, is_legal, APART)
PROGRAMS = [
    program_of(ROWS[number % len(ROWS)], 1_000 * SEED + number)
    for number in sampled(range(3 * len(ROWS)), 24)
]
"""The rows have every two values together; they are gone through with others beside them."""
FULL = {name: values[0] for name, values in SETTINGS.items()} | {
    "limit": "few",
    "full": "raise",
    "errors": "raised",
}
"""A table cut by rows, some ranks of which are full before others."""
PROGRAMS += [
    program_of(FULL | {"ranks": ranks, "type": sharding_type}, seed)
    for seed, ranks, sharding_type in ((1, "2", "row_wise"), (2, "4", "table_row_wise"))
]


def place_of(program: Program) -> tuple[Any, ...]:
    """Programs on as many ranks follow one another, which so keep their groups."""
    return program.row["device"], [part.world_size for part in program.parts]


@pytest.mark.parametrize(
    "program", sorted(PROGRAMS, key=place_of), ids=lambda program: str(program.seed)
)
def test_ranks_do_as_the_unsharded_collection(
    ranks: RankPool, npus: RankPool, tmp_path: Path, program: Program
) -> None:
    expected, expected_rows = run_unsharded(program)
    is_exact = all(part.device == "cpu" for part in program.parts)
    found: list[list[Seen]] = []
    for number, part in enumerate(program.parts):
        pool = npus if part.device == "npu" else ranks
        of_ranks = pool.run(part.world_size, run_part, program, number, str(tmp_path))
        seen, rows = zip(*of_ranks, strict=True)
        found += [list(each) for each in zip(*seen, strict=True)]
    for of_ranks, of_all in zip(found, expected, strict=True):
        assert_seen(program, of_ranks, of_all)
    assert_rows(program, list(rows), expected_rows, is_exact)


def assert_seen(program: Program, of_ranks: list[Seen], of_all: Seen) -> None:
    errors = {seen.error for seen in of_ranks}
    assert of_all.error in errors, (of_all, errors)
    assert errors <= ({None} if of_all.error is None else {of_all.error, "PeerError"})
    for name, expected in of_all.vectors.items():
        vectors = np.concatenate([seen.vectors[name] for seen in of_ranks])
        note = f"{name} of batch {of_all.batch}"
        np.testing.assert_allclose(vectors, expected, **TOLERANCE, err_msg=note)
        if of_ranks[0].outcomes:
            outcomes = np.concatenate([seen.outcomes[name] for seen in of_ranks])
            np.testing.assert_array_equal(outcomes, of_all.outcomes[name], err_msg=note)

    for name, expected in of_all.of_weights.items():
        grads = np.concatenate([seen.of_weights[name] for seen in of_ranks])
        # Of infinite gradients the order of sums makes infinities or none.
        finite, note = np.isfinite(expected), f"weights of {name}"
        np.testing.assert_array_equal(np.isfinite(grads), finite, err_msg=note)
        np.testing.assert_allclose(grads[finite], expected[finite], **TOLERANCE, err_msg=note)


def assert_rows(program: Program, parts: list[Rows], expected: Rows, is_exact: bool) -> None:
    """Of tables that are cut by columns only weights: each part has state of whole rows, too."""
    for part in parts:
        for name, rows in part.items():
            if ".columns_" in name:
                part[name] = {key: (weights, {}) for key, (weights, _) in rows.items()}
    specs = program.parts[-1].specs
    rows = whole_rows(parts, replicated(specs))
    for name, by_key in expected.items():
        found = rows.get(name, {})
        assert set(found) == set(by_key), name
        for key, (weights, state) in by_key.items():
            own, own_state = found[key]
            assert_same(own, weights, is_exact, f"{name}, {key}")
            for field in own_state:
                assert_same(own_state[field], state[field], is_exact, f"{name}, {key}, {field}")


def assert_same(found: Any, expected: Any, is_exact: bool, note: str) -> None:
    if is_exact:
        np.testing.assert_array_equal(found, expected, err_msg=note)
    else:
        np.testing.assert_allclose(found, expected, **TOLERANCE, err_msg=note)
