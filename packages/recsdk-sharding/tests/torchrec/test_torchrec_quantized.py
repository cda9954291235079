"""torchrec's quantized test models pass with our modules wherever the page says so."""

from __future__ import annotations

import pytest
import torchrec_material
from torchrec_page import kind_of
from torchrec_quantized import CELLS, QuantizedCell, outcome
from torchrec_quantized_page import PAGE, page_of, results_of

from sampling import sampled

RESULTS = results_of(PAGE.read_text())


def name_of(cell: QuantizedCell) -> str:
    parts = (cell.model.kind, cell.model.pooling, cell.dtype, cell.sharding_type, cell.world_size)
    return "-".join(str(part) for part in parts if part).replace(" ", "_")


@pytest.mark.parametrize("cell", sampled(CELLS, 16), ids=name_of)
def test_quantized_models_of_torchrec_are_as_the_page_says(cell: QuantizedCell) -> None:
    for side, expected in zip(("ours", "torchrec"), RESULTS[cell], strict=True):
        assert kind_of(outcome(side, cell)) == expected


@pytest.mark.parametrize(
    "error",
    [
        "AssertionError: Torch not compiled with CUDA enabled",
        "RuntimeError: Found no NVIDIA driver on your system. Please check that you have one",
        "RuntimeError: No CUDA GPUs are available",
    ],
)
def test_the_page_is_the_same_for_all_builds_of_torch(
    error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchrec_material, "error_of", lambda *_: error)
    assert outcome("torchrec", CELLS[1]) in {expected for _, expected in RESULTS.values()}


def test_the_page_has_every_cell_and_ours_pass_in_all() -> None:
    assert list(RESULTS) == list(CELLS)
    assert {cell for cell, (ours, _) in RESULTS.items() if ours} == set()
    assert page_of(RESULTS) == PAGE.read_text()


def test_pages_are_read_as_they_were_written() -> None:
    errors = ["", "ValueError: n", "RuntimeError: n is not n"]
    some = {
        cell: (errors[index % 3], errors[index * 7 % 11 % 3]) for index, cell in enumerate(CELLS)
    }
    assert results_of(page_of(some)) == some
