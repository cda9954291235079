"""Traces drawn from a description of data, where the data are not at hand.

Shapes: K ids of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from recsdk_core.simulation.descriptions import read_description
from recsdk_core.simulation.traces import Block, Int64s, Trace
from recsdk_core.virtual_shards import mix64

_MOST = 1 << 40
"""Drawing so many takes half a day: 37 ns an id (AMD EPYC)."""
_DRAWN = 1 << 16  # at a time, so that the stream does not depend on who asks


def open_description(
    path: str, choose: Callable[[list[str]], str], wanted: Mapping[str, str]
) -> Trace:
    """Ids drawn by what `recsdk data describe --json` wrote of a column: the same each time.

    `choose` is given the columns of ids. Raises FileNotFoundError, or ValueError for a file of
    another kind, a column without an exponent or of more than 2**40 ids, and columns that are
    `wanted` beside the ids, as none are drawn.
    """
    described = read_description(path)
    for what, name in wanted.items():
        raise ValueError(
            f"{path}: is a description, of which no {what} are drawn; leave out {name!r}"
        )
    columns = {each["name"]: each["ids"] for each in described["columns"] if each["ids"]}
    name = choose(list(columns))
    ids = columns[name]
    if ids["zipf"] is None:
        raise ValueError(
            f"{path}: column {name!r} has no exponent, as too few of its ids come often; simulate "
            "the files themselves"
        )
    if ids["num_ids"] > _MOST:
        raise ValueError(
            f"{path}: column {name!r} must have at most {_MOST:,} ids, got {ids['num_ids']:,}: "
            "drawing more takes days; describe fewer files, or make its num_ids and num_distinct "
            "smaller"
        )
    num, distinct, exponent = ids["num_ids"], ids["num_distinct"], ids["zipf"]["exponent"]
    remark = (
        f"drawn, not read: {distinct:,} ids by Zipf's law of exponent {exponent:.2f}, each place "
        "of the stream by itself; real ids also come in bursts and grow old"
    )
    return Trace(num, frozenset(), lambda size: _blocks(num, distinct, exponent, size), remark)


def _blocks(num: int, distinct: int, exponent: float, size: int) -> Iterator[Block]:
    ranks = _Ranks(exponent, distinct)
    for start in range(0, num, size):
        drawn = ranks.draw(min(size, num - start))
        yield mix64(drawn.view(np.uint64)).view(np.int64), {}


class _Ranks:
    """Draws ranks 1 to `most`, rank r as often as r ** -exponent, without a list of them.

    Source: Hoermann, Derflinger, "Rejection-inversion to generate variates from monotone discrete
    distributions", ACM Transactions on Modeling and Computer Simulation 6(3), 1996.
    """

    def __init__(self, exponent: float, most: int) -> None:
        self._exponent, self._most = exponent, most
        self._generator = np.random.default_rng(0)
        self._first = self._integral(1.5) - 1
        self._last = self._integral(most + 0.5)
        self._sure = 2 - self._inverse(self._integral(2.5) - 2.0**-exponent)
        self._held: Int64s = np.empty(0, np.int64)

    def draw(self, num: int) -> Int64s:
        """(num,); the stream is the same however it is cut."""
        while len(self._held) < num:
            self._held = np.concatenate([self._held, self._tried(_DRAWN)])
        drawn, self._held = self._held[:num], self._held[num:]
        return drawn

    def _tried(self, num: int) -> Int64s:
        heights = self._last + self._generator.random(num) * (self._first - self._last)
        places = self._inverse(heights)
        ranks = np.clip(np.rint(places), 1, self._most)
        is_under = heights >= self._integral(ranks + 0.5) - ranks**-self._exponent
        kept: Int64s = ranks[(ranks - places <= self._sure) | is_under].astype(np.int64)
        return kept

    def _integral(self, x: Any) -> Any:
        """Of x ** -exponent from 1."""
        power = 1 - self._exponent
        return np.log(x) if abs(power) < 1e-9 else np.expm1(power * np.log(x)) / power

    def _inverse(self, height: Any) -> Any:
        power = 1 - self._exponent
        return np.exp(height) if abs(power) < 1e-9 else np.exp(np.log1p(power * height) / power)
