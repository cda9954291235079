"""The page that shows what passes of torchrec's quantized test models; it can be read back."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torchrec_cells import Model
from torchrec_page import PAGE as PAGE_OF_TRAINING
from torchrec_page import Outcome, read_entry, row_text, side_text
from torchrec_quantized import (
    CELLS,
    DTYPES,
    LARGEST_OFF,
    MODELS,
    TYPES,
    WORLDS,
    QuantizedCell,
)

PAGE = PAGE_OF_TRAINING.with_name("torchrec_quantized.md")

_HEAD = """# torchrec's test models, quantized for inference

Written by `make torchrec-matrix`, not by hand; the tests compare it with what they find.

The models are those of [the matrix of training](torchrec_matrix.md), from torchrec's wheel. Each
cell below quantizes such a model twice by `quantize_inference_model`, as it is and with our modules
in place of torchrec's, whose rows it has under ids from all of int64; and, but for `unsharded`,
shards it by `shard_quant_model` on the cpu, with the stock planner constrained to the type. Vectors
and predictions must be those of torchrec's unsharded quantized model. The largest allowed
difference, relative to the largest number, is {fractions}:
torchrec keeps scale and bias of an int8 row in 16 bits, we in 32 as FBGEMM's own conversion does,
so a value may be the next one of 256.

An entry says with how many ranks, all in one process, our modules pass, then, behind a slash, with
how many torchrec's do. `e1: 2-3` says that 2 and 3 ranks raised error 1 of the list below.
torchrec's quantized tables are sharded over CUDA devices.

Of {total} cells ours pass {ours}, torchrec's {theirs}.
"""


def page_of(results: Mapping[QuantizedCell, Outcome]) -> str:
    """The page."""
    errors = list(dict.fromkeys(error for pair in results.values() for error in pair if error))
    counts = [sum(not pair[side] for pair in results.values()) for side in (0, 1)]
    fractions = ", ".join(f"{off:g} with {dtype}" for dtype, off in LARGEST_OFF.items())
    lines = [
        _HEAD.format(fractions=fractions, total=len(results), ours=counts[0], theirs=counts[1]),
        row_text("model", "pooling", "rows", *TYPES),
        row_text(*["---"] * (3 + len(TYPES))),
        *(_row_of(model, dtype, results, errors) for model in MODELS for dtype in DTYPES),
        "",
    ]
    if errors:
        of_errors = (row_text(f"e{i}", f"`{error}`") for i, error in enumerate(errors, 1))
        lines += [row_text("", "error"), row_text("---", "---"), *of_errors, ""]
    return "\n".join(lines)


def _row_of(
    model: Model, dtype: str, results: Mapping[QuantizedCell, Outcome], errors: list[str]
) -> str:
    entries = []
    for kind in TYPES:
        cells = {w: QuantizedCell(model, dtype, kind, w) for w in WORLDS}
        by_world = {w: results[cell] for w, cell in cells.items() if cell in results}
        sides = ({w: pair[side] for w, pair in by_world.items()} for side in (0, 1))
        entries.append(" / ".join(side_text(each, errors) for each in sides))
    return row_text(model.kind, model.pooling or "-", dtype, *entries)


def results_of(page: str) -> dict[QuantizedCell, Outcome]:
    """What a page says of each cell."""
    lines = [line for line in page.splitlines() if line.startswith("|")]
    rows = [[part.strip() for part in line.strip("|").split("|")] for line in lines]
    errors = {row[0]: row[1].strip("`") for row in rows if re.fullmatch(r"e\d+", row[0])}
    models = {(model.kind, model.pooling): model for model in MODELS}
    found = {}
    for row in rows:
        model = models.get((row[0], row[1].strip("-")))
        if model is None:
            continue
        for kind, text in zip(TYPES, row[3:], strict=True):
            for world_size, outcome in read_entry(text, errors).items():
                found[QuantizedCell(model, row[2], kind, world_size)] = outcome
    return {cell: found[cell] for cell in CELLS if cell in found}
