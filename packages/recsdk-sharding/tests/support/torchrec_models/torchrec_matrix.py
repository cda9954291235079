"""Runs the matrices of torchrec's test models and writes the pages that show what passes.

    make torchrec-matrix [ARGS="--check --quantized"]

Takes a quarter of an hour on 2 cores, with --quantized, which leaves training out, a minute.
--check only says whether the pages are up to date.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path

import torchrec_material
import torchrec_quantized
import torchrec_quantized_page
from rank_pool import RankPool
from torchrec_cells import CELLS, CODECS, Cell
from torchrec_page import PAGE, Outcome, kind_of, page_of

_OF_WAITING = re.compile("timed? ?out|closed by peer|reset by peer|closing|closure", re.IGNORECASE)


def run_cell(ranks: RankPool, side: str, cell: Cell) -> str:
    """The error of one cell, "" if there is none; `side` is "ours" or "torchrec".

    After an error the ranks get new process groups, or are started anew if one of them had waited
    for another in vain.
    """
    found = ranks.run(cell.world_size, torchrec_material.outcome, side, cell)
    errors = [error for error in found if error]
    if not errors:
        return ""
    first_hand = [error for error in errors if not _OF_WAITING.search(error)]
    if first_hand == errors:
        ranks.renew()
    else:
        ranks.close()
    return first_hand[0] if first_hand else "TimeoutError: ranks waited for each other"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--quantized", action="store_true", help="only the quantized models")
    args = parser.parse_args()
    is_stale = settle(torchrec_quantized_page.PAGE, quantized_page(), args.check)
    if not args.quantized:
        is_stale |= settle(PAGE, training_page(), args.check)
    return int(args.check and is_stale)


def settle(page: Path, text: str, only_checks: bool) -> bool:
    """Writes a page, or with `only_checks` does not; True if it was another."""
    is_same = page.exists() and page.read_text() == text
    if not only_checks:
        page.write_text(text)
    print(f"{Path(page.parent.name) / page.name} {'was' if is_same else 'was not'} up to date")
    return not is_same


def quantized_page() -> str:
    """The page of quantized models."""
    results = {}
    for cell in torchrec_quantized.CELLS:
        ours, theirs = (torchrec_quantized.outcome(side, cell) for side in ("ours", "torchrec"))
        if ours:
            print(f"ours: {cell}: {ours}", flush=True)
        results[cell] = (kind_of(ours), kind_of(theirs))
    return torchrec_quantized_page.page_of(results)


def training_page() -> str:
    """The page of models that are trained."""
    results: dict[Cell, Outcome] = {}
    start = time.monotonic()
    ranks = RankPool(max(cell.world_size for cell in CELLS))
    for number, cell in enumerate(CELLS, 1):
        ours, theirs = (run_cell(ranks, side, cell) for side in ("ours", "torchrec"))
        if ours:
            print(f"ours: {cell}: {ours}", flush=True)
        results[cell] = (kind_of(ours), kind_of(theirs))
        if number % 100 == 0:
            print(f"{number} of {len(CELLS)}, {time.monotonic() - start:.0f} s", flush=True)
    ranks.close()
    return page_of(results, fractions())


def fractions() -> dict[str, list[float]]:
    """The largest differences, as the page gives them."""
    return {
        "vectors": [torchrec_material.VECTORS_OFF[codec] for codec in CODECS],
        "rows": [torchrec_material.ROWS_OFF[codec] for codec in CODECS],
    }


if __name__ == "__main__":
    sys.exit(main())
