"""The page that shows what passes in the matrix of torchrec's test models; it can be read back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import TypeAlias

from torchrec_cells import CELLS, CODECS, MODELS, POOLED_TYPES, WORLDS, Cell, Model

PAGE = Path(__file__).resolve().parents[5] / "docs" / "reference" / "torchrec_matrix.md"

Outcome: TypeAlias = tuple[str, str]
"""The errors of ours and of torchrec's modules, "" where there is none."""

_HEAD = """# torchrec's test models, ours and torchrec's modules

Written by `make torchrec-matrix`, not by hand; the tests compare it with what they find, a sample
of it in the normal profile and all of it in the full one.

torchrec's wheel ships the models, inputs, sharders and training step of its own tests
(`torchrec.distributed.test_utils`). Each cell below shards such a model twice: as it is, and with
our modules and sharders in place of torchrec's, over ids from all of int64. Both start from the
rows of torchrec's unsharded model, copied by key, and train two steps with SGD in backward. The
vectors before training, the predictions after each step, and the change of every row must then
equal those of torchrec's unsharded model on the joined batches of all ranks. The largest allowed
difference, relative to the largest number, with float32, FP16, BF16 and INT8 on the way: {vectors}
of vectors and predictions, {rows} of the changes of a table's rows.

- **Models**: `TestSparseNN` with and without a second, weighted collection, and
  `TestMixedEmbeddingSparseArch` of sequences only; four to eight tables of several widths, two
  features in two tables each. Weighted bags are summed in every row: torch's own `EmbeddingBag`
  has no weighted mean.
- **Batches**: equally large on every rank, or smaller from rank to rank (torchrec's model of
  sequences cannot have those), or with another number of bags for each feature (VBE).
- **Worlds**: {worlds}. Plans are the stock
  planner's, constrained to the type.

An entry says on how many ranks our modules pass, then, behind a slash, on how many torchrec's
pass. `e1: 2-5` says that 2 to 5 ranks raised error 1 of the list below. Numbers in errors are
written `n`. The comparison raises `WrongNumbers`: torchrec's sharded modules then do not compute
what its unsharded ones do (means under grid_shard are sums; sequences with batches per feature get
no gradients on a cpu).

{summary}
"""


def page_of(results: Mapping[Cell, Outcome], fractions: Mapping[str, Iterable[float]]) -> str:
    """The page. `fractions`: the largest differences of "vectors" and "rows" by codec."""
    errors = list(dict.fromkeys(error for pair in results.values() for error in pair if error))
    worlds = ", ".join(
        f"{size} rank{'s' * (size > 1)}" + (f" on nodes of {local}" if local < size else "")
        for size, local in WORLDS.items()
    )
    counts = [sum(not pair[side] for pair in results.values()) for side in (0, 1)]
    summary = (
        f"Of {len(results)} cells ours pass {counts[0]}, torchrec's {counts[1]}; where its own "
        "fail, ours are\nstill held to its unsharded model."
    )
    texts = {name: ", ".join(f"{x:g}" for x in values) for name, values in fractions.items()}
    lines = [
        _HEAD.format(worlds=worlds, summary=summary, **texts),
        row_text("model", "pooling", "batches", "on the way", *POOLED_TYPES),
        row_text(*["---"] * (4 + len(POOLED_TYPES))),
        *(_row_of(model, codec, results, errors) for model in MODELS for codec in CODECS),
        "",
        row_text("", "error"),
        row_text("---", "---"),
        *(row_text(f"e{number}", f"`{error}`") for number, error in enumerate(errors, 1)),
        "",
    ]
    return "\n".join(lines)


def results_of(page: str) -> dict[Cell, Outcome]:
    """What a page says of each cell."""
    rows = [
        [part.strip() for part in line.strip("|").split("|")]
        for line in page.splitlines()
        if line.startswith("|")
    ]
    errors = {row[0]: row[1].strip("`") for row in rows if re.fullmatch(r"e\d+", row[0])}
    found = {}
    for row in rows:
        if len(row) > 2 and row[0] in {model.kind for model in MODELS}:
            model = Model(row[0], row[1].strip("-"), row[2])
            codec = "" if row[3] == "float32" else row[3]
            for kind, text in zip(POOLED_TYPES, row[4:], strict=True):
                for world_size, outcome in read_entry(text, errors).items():
                    found[Cell(model, kind, codec, world_size)] = outcome
    return {cell: found[cell] for cell in CELLS if cell in found} | found


def kind_of(error: str) -> str:
    """What is the same in errors of one kind, on one line."""
    text = re.sub(r"^(\w+: )\[[^\]]*\] ?", r"\1", error)
    text = re.sub(r"\d+(\.\d+)?(e[-+]?\d+)?", "n", text.replace("|", "/").replace("`", "'"))
    text = re.sub(r"n(, n)+", "n", text)
    return text if len(text) <= 110 else f"{text[:107]}..."


def row_text(*entries: str) -> str:
    """A row of a table of a page."""
    return f"| {' | '.join(entries)} |"


def _row_of(model: Model, codec: str, results: Mapping[Cell, Outcome], errors: list[str]) -> str:
    entries = []
    for kind in POOLED_TYPES:
        by_world = {
            world_size: results[cell]
            for world_size in WORLDS
            if (cell := Cell(model, kind, codec, world_size)) in results
        }
        sides = (
            side_text({world_size: pair[side] for world_size, pair in by_world.items()}, errors)
            for side in (0, 1)
        )
        entries.append(" / ".join(sides) if by_world else "-")
    return row_text(model.kind, model.pooling or "-", model.batches, codec or "float32", *entries)


def side_text(errors_by_world: Mapping[int, str], errors: list[str]) -> str:
    """On how many ranks there was which error; `errors` numbers them."""
    parts = []
    for error in sorted(set(errors_by_world.values()), key=["", *errors].index):
        worlds = _ranges(w for w, found in errors_by_world.items() if found == error)
        parts.append(f"e{errors.index(error) + 1}: {worlds}" if error else worlds)
    return "; ".join(parts)


def _ranges(numbers: Iterable[int]) -> str:
    runs = groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    groups = ([number for _, number in run] for _, run in runs)
    return " ".join(f"{g[0]}-{g[-1]}" if len(g) > 1 else f"{g[0]}" for g in groups)


def read_entry(entry: str, errors: Mapping[str, str]) -> dict[int, Outcome]:
    """The outcomes of an entry, "ours / torchrec's", by number of ranks."""
    if entry == "-":
        return {}
    ours, theirs = (_read_side(side, errors) for side in entry.split(" / "))
    return {world_size: (error, theirs[world_size]) for world_size, error in ours.items()}


def _read_side(text: str, errors: Mapping[str, str]) -> dict[int, str]:
    found = {}
    for part in text.split("; "):
        name, _, worlds = part.rpartition(": ")
        for run in worlds.split():
            first, _, last = run.partition("-")
            for world_size in range(int(first), int(last or first) + 1):
                found[world_size] = errors[name] if name else ""
    return found
