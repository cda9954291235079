"""Criteo's display advertising data: was the ad clicked?

Source: the column layout of the Kaggle Display Advertising Challenge (Criteo Labs, 2014). The
files are not part of recsdk.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from recsdk_core.files import file_to_read
from recsdk_pipeline.data.examples import Examples, IdBags
from recsdk_pipeline.data.held_out_split import HeldOutSplit
from recsdk_pipeline.data.keys import category_keys
from recsdk_pipeline.data.lines import (
    BadLines,
    Line,
    TextFormat,
    open_lines,
    parse_lines,
    read_lines,
)

NUMBERS = tuple(f"I{i}" for i in range(1, 14))
CATEGORIES = tuple(f"C{i}" for i in range(1, 27))
_COLUMNS = ("label", *NUMBERS, *CATEGORIES)
_HEXADECIMAL = frozenset(string.hexdigits)
_MOST_DIGITS = 16


@dataclass(frozen=True)
class _Click:
    label: float
    numbers: list[float]
    categories: list[str]
    """"" for a missing one."""


def read_criteo(
    path: Any, *, most: int | None = None, seed: int = 0, bad: BadLines | None = None
) -> HeldOutSplit:
    """Read the first `most` well-formed lines of a Criteo file; all by default.

    `path` (str, bytes or os.PathLike) is a local file, plain or packed by gzip. Its format is
    either Criteo's own (tab-separated, no header: label, 13 integers, 26 hexadecimal categories) or
    comma-separated with a header of the names label, I1..I13, C1..C26. A missing number reads as 0
    and a missing category as an empty bag. Numbers x become sign(x) * log(1 + |x|). Malformed lines
    go to `bad`; by default the first is raised as `BadLine`. Raises OSError for a file that cannot
    be read, TypeError or ValueError for what is no path of a file (a URL, a pipe) and for fewer
    than ten examples. Reading takes some tens of microseconds an example.
    """
    path = file_to_read(path)
    has_header = _has_header(path)
    text = TextFormat(columns=_COLUMNS, separator="," if has_header else "\t")
    bad = bad if bad is not None else BadLines()
    lines = read_lines(path, text, bad, skip=int(has_header))
    clicks = list(islice(parse_lines(lines, _parse, bad), most))
    return HeldOutSplit(CATEGORIES, _examples(clicks), seed=seed)


def _has_header(path: Path) -> bool:
    with open_lines(path) as file:
        first = file.readline().decode("utf-8", "replace").rstrip("\r\n").split(",")
    return tuple(first) == _COLUMNS


def _parse(line: Line) -> _Click:
    label = line.number_of("label")
    if label not in (0.0, 1.0):
        raise line.bad("label", f"{line.fields['label']!r} is neither 0 nor 1")
    numbers = [line.number_of(name) if line.fields[name] else 0.0 for name in NUMBERS]
    return _Click(label, numbers, [_category(line, name) for name in CATEGORIES])


def _category(line: Line, column: str) -> str:
    value = line.fields[column]
    if len(value) > _MOST_DIGITS or not _HEXADECIMAL.issuperset(value):
        raise line.bad(column, f"{value!r} is not a hexadecimal category")
    return value


def _examples(clicks: list[_Click]) -> Examples:
    numbers = np.array([click.numbers for click in clicks], dtype=np.float64)
    numbers = numbers.reshape(len(clicks), len(NUMBERS))
    return Examples(
        labels=np.array([click.label for click in clicks], dtype=np.float32),
        dense=(np.sign(numbers) * np.log1p(np.abs(numbers))).astype(np.float32),
        bags={
            name: _bags(name, [click.categories[c] for click in clicks])
            for c, name in enumerate(CATEGORIES)
        },
    )


def _bags(name: str, values: list[str]) -> IdBags:
    lengths = np.fromiter(map(bool, values), np.int64, len(values))
    return IdBags.of_lengths(category_keys(name, list(filter(None, values))), lengths)
