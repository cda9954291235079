"""torchrec's own test models pass with our modules wherever the page in docs/reference says so."""

from __future__ import annotations

from itertools import groupby

import pytest
from rank_pool import RankPool
from torchrec_cells import CELLS, Cell
from torchrec_matrix import fractions, run_cell
from torchrec_page import PAGE, kind_of, page_of, results_of

from sampling import IS_FULL, sampled

RESULTS = results_of(PAGE.read_text())


def group_of(cell: Cell) -> str:
    model = cell.model
    parts = (str(cell.world_size), model.kind, model.pooling, model.batches, cell.sharding_type)
    return "-".join(parts if not IS_FULL else parts[:-1]).replace(" ", "_")


GROUPS = {name: list(cells) for name, cells in groupby(sampled(CELLS, 10), group_of)}


@pytest.mark.parametrize("name", GROUPS)
def test_torchrec_models_train_as_unsharded(ranks: RankPool, name: str) -> None:
    for cell in GROUPS[name]:
        assert run_cell(ranks, "ours", cell) == "", cell


@pytest.mark.parametrize("name", GROUPS)
def test_torchrec_itself_is_as_the_page_says(ranks: RankPool, name: str) -> None:
    """Cells in which it fails only in the full profile: some leave ranks waiting for a minute."""
    for cell in GROUPS[name]:
        _, expected = RESULTS[cell]
        if IS_FULL or not expected:
            error = run_cell(ranks, "torchrec", cell)
            assert bool(error) == bool(expected), (cell, error, expected)


def test_the_page_has_every_cell_and_ours_pass_in_all() -> None:
    assert list(RESULTS) == list(CELLS)
    assert {cell for cell, (ours, _) in RESULTS.items() if ours} == set()
    assert page_of(RESULTS, fractions()) == PAGE.read_text()


def test_pages_are_read_as_they_were_written() -> None:
    errors = ["", "ValueError: n", "RuntimeError: n is not n"]
    some = {
        cell: (errors[index % 3], errors[index * 7 % 11 % 3]) for index, cell in enumerate(CELLS)
    }
    assert results_of(page_of(some, fractions())) == some


def test_errors_of_one_kind_are_one() -> None:
    first = "RuntimeError: [/a/b.cc:129] invalid size (expected (4, 152), got (3, 152))"
    second = "RuntimeError: [/b.cc:7] invalid size (expected (72), got (124))"
    assert kind_of(first) == kind_of(second) == "RuntimeError: invalid size (expected (n), got (n))"
    assert kind_of("") == ""
    assert kind_of("WrongNumbers: a | b `c` 1e-05") == "WrongNumbers: a / b 'c' n"
