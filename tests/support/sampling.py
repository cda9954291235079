"""Combinatorial cases: all of them in the full profile, a seeded sample of them otherwise."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar

Case = TypeVar("Case")

IS_FULL = os.environ.get("RECSDK_TEST_PROFILE", "ci") == "full"
SEED = int(os.environ.get("RECSDK_TEST_SEED", "0"))


@dataclass
class Tally:
    """How many combinations were taken of how many, over a whole run."""

    taken: int = 0
    existing: int = 0


tally = Tally()


def sampled(cases: Iterable[Case], size: int) -> list[Case]:
    """The cases to run: all in the full profile, else `size` of them drawn with a fixed seed.

    The order of the cases is kept, and the same cases give the same sample in every run with the
    same RECSDK_TEST_SEED (default 0). For `pytest.mark.parametrize`. Fewer than `size`: all.
    """
    every = list(cases)
    if IS_FULL or len(every) <= size:
        chosen = every
    else:
        numbers = sorted(random.Random(SEED).sample(range(len(every)), size))
        chosen = [every[number] for number in numbers]
    tally.taken += len(chosen)
    tally.existing += len(every)
    return chosen


def crossed(*settings: Iterable[Any], size: int) -> list[tuple[Any, ...]]:
    """Tuples with a value of each setting: all of them in the full profile, else `size` at most.

    Of those each value is in about equally many, in one at least if there are as many tuples as
    values of that setting. Drawn by RECSDK_TEST_SEED, as `sampled` does. For
    `pytest.mark.parametrize`.
    """
    values = [list(each) for each in settings]
    every = list(product(*(range(len(each)) for each in values)))
    chosen = every if IS_FULL or len(every) <= size else _spread(values, size)
    tally.taken += len(chosen)
    tally.existing += len(every)
    return [tuple(each[i] for each, i in zip(values, row, strict=True)) for row in chosen]


def _spread(values: Sequence[Sequence[Any]], size: int) -> list[tuple[int, ...]]:
    source = random.Random(SEED)
    columns = [[number % len(each) for number in range(size)] for each in values]
    for column in columns:
        source.shuffle(column)
    return sorted(set(zip(*columns, strict=True)))
