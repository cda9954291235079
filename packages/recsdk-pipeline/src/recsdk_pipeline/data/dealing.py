"""Which rows each rank and worker reads, and in which windows: pure functions of numbers.

A *group* is a row group of a Parquet file, or a block of a text file, which counts as one row. The
groups are dealt to ranks, and a rank's to its workers. A stream, what one worker of one rank reads,
is cut into windows, whose rows are shuffled together. Rows are named as they lie in the files,
before any filter.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from recsdk_core import Shuffle

_NEARLY_FULL = 4
"""One of so many parts of a window is left, or less."""

Position = tuple[int, int]
"""(window, offset): the next row of a stream is row `offset` of what `window` yields."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Size of a row group."""

    rows: int
    bytes: int
    """At most what the columns in use take in memory."""
    run: int | None = None
    """Neighbours of one run keep together in their order, and are best read from front to back."""


@dataclass(frozen=True)
class Piece:
    """The rows start..stop of a group."""

    group: int
    start: int
    stop: int


@dataclass(frozen=True)
class Window:
    """Pieces that are in memory together."""

    pieces: tuple[Piece, ...]
    skip: int = 0
    """How many of the rows that it yields were yielded before."""

    @property
    def rows(self) -> int:
        """Rows that are left, before any filter; at least 0."""
        return max(0, sum(piece.stop - piece.start for piece in self.pieces) - self.skip)


@dataclass(frozen=True)
class Layout:
    """How many streams there are: `num_workers` for each rank."""

    world_size: int
    num_workers: int

    @property
    def streams(self) -> int:
        """Their number; stream s is worker s % num_workers of rank s // num_workers."""
        return self.world_size * self.num_workers


@dataclass(frozen=True)
class Layer:
    """An earlier run: how it was laid out, and how far each stream came."""

    layout: Layout
    positions: tuple[Position, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the windows follow from."""

    groups: tuple[Group, ...]
    window_bytes: int
    seed: int
    epoch: int
    shuffle: bool

    def streams(self, layers: Iterable[Layer], layout: Layout) -> list[list[Window]]:
        """The windows of each stream of `layout`, without what the earlier `layers` read.

        What is left is dealt so that the rows of two ranks, and of two workers of one rank, differ
        by no more than the largest row group (or window, if an earlier run began one).
        """
        order = self._order()
        items = [Window((Piece(g, 0, self.groups[g].rows),)) for g in order if self.groups[g].rows]
        rank_of = {group: rank for rank, group in enumerate(order)}
        for layer in layers:
            left = _left(self._dealt(items, layer.layout), layer.positions)
            items = sorted(left, key=lambda item: rank_of[item.pieces[0].group])
        return self._dealt(items, layout)

    def shuffled(self, window: Window, num_rows: int) -> Shuffle:
        """The order of the rows of a window; windows of one epoch have their own each."""
        first = window.pieces[0]
        keys = [self.seed, self.epoch, first.group, first.start]
        (seed,) = np.random.SeedSequence(keys).generate_state(1, np.uint64)
        return Shuffle(num_rows, int(seed))

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(len(self.groups)))
        runs: list[list[int]] = []
        for index, group in enumerate(self.groups):
            if group.run is not None and runs and self.groups[runs[-1][-1]].run == group.run:
                runs[-1].append(index)
            else:
                runs.append([index])
        generator = np.random.default_rng([self.seed, self.epoch])
        return [group for run in generator.permutation(len(runs)) for group in runs[run]]

    def _dealt(self, items: Sequence[Window], layout: Layout) -> list[list[Window]]:
        ranks = _deal(items, layout.world_size)
        streams = chain.from_iterable(_deal(rank, layout.num_workers) for rank in ranks)
        return [self._cut(stream) for stream in streams]

    def _cut(self, items: Iterable[Window]) -> list[Window]:
        """Windows of at most `window_bytes`, or one row; windows that were begun stay whole.

        One that is nearly full ends with its row group, whose rows then lie in one piece.
        """
        items = list(items)
        windows = [item for item in items if item.skip]
        pieces: list[Piece] = []
        room = self.window_bytes
        for piece in chain.from_iterable(item.pieces for item in items if not item.skip):
            start, row = piece.start, self._row_bytes(piece.group)
            is_nearly_full = room < self.window_bytes // _NEARLY_FULL
            splits = is_nearly_full and room < (piece.stop - start) * row
            while start < piece.stop:
                if pieces and (room < row or splits):
                    windows.append(Window(tuple(pieces)))
                    pieces, room, splits = [], self.window_bytes, False
                stop = min(piece.stop, start + max(1, room // row))
                pieces.append(Piece(piece.group, start, stop))
                room -= (stop - start) * row
                start = stop
        return [*windows, Window(tuple(pieces))] if pieces else windows

    def _row_bytes(self, group: int) -> int:
        return max(1, -(-self.groups[group].bytes // self.groups[group].rows))


def _deal(items: Iterable[Window], num: int) -> list[list[Window]]:
    """Each item to whoever has the fewest rows, the first of these."""
    hands: list[list[Window]] = [[] for _ in range(num)]
    loads = [(0, hand) for hand in range(num)]
    for item in items:
        load, hand = loads[0]
        hands[hand].append(item)
        heapq.heapreplace(loads, (load + item.rows, hand))
    return hands


def _left(streams: list[list[Window]], positions: Sequence[Position]) -> list[Window]:
    """What was not read: windows that were begun, and whole stretches of groups."""
    begun: list[Window] = []
    pieces: list[Piece] = []
    for windows, (index, offset) in zip(streams, positions, strict=True):
        for number, window in enumerate(windows[index:]):
            skip = max(window.skip, offset if number == 0 else 0)
            if skip:
                begun.append(replace(window, skip=skip))
            else:
                pieces += window.pieces
    return [*begun, *(Window((piece,)) for piece in _joined(pieces))]


def _joined(pieces: list[Piece]) -> list[Piece]:
    """The same rows in as few pieces as may be."""
    joined: list[Piece] = []
    for piece in sorted(pieces, key=lambda each: (each.group, each.start)):
        last = joined[-1] if joined else None
        if last is not None and (last.group, last.stop) == (piece.group, piece.start):
            joined[-1] = replace(last, stop=piece.stop)
        else:
            joined.append(piece)
    return joined
