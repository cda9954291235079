"""Combinatorial cases: all of them in the full profile, a seeded sample of them otherwise."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

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
