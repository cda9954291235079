"""Saves to one place at the same time: one wins, and what is there loads at every instant."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle, pairwise, product
from pathlib import Path

import pytest
from checkpoint_support import content_of, save
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st
from stepping import Stepped, stepping

from recsdk_core import CheckpointError
from recsdk_core.checkpoint import open_checkpoint

URL = "memory://two_saves/one"
Turns = list[tuple[int, int]]
"""Whose turn it is, and for how many operations."""


@contextmanager
def fresh(kind: str) -> Iterator[str]:
    """A place without a checkpoint, in a folder of its own."""
    folder = tempfile.mkdtemp()
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    try:
        yield URL if kind == "memory" else f"{folder}/one"
    finally:
        shutil.rmtree(folder)


def found_at(path: str) -> bytes | None:
    """The rows of what is there, None if nothing; whatever is broken would raise."""
    try:
        open_checkpoint(path)
    except CheckpointError as error:
        if "there is no checkpoint" not in str(error):
            raise
        return None
    return content_of(path)


class Race:
    """Some saves of their own content to one place."""

    def __init__(self, path: str, count: int, has_old: bool) -> None:
        self.path, self.old = path, b"old" if has_old else None
        if has_old:
            save(path, b"old")
        self.saves = [
            Stepped(partial(save, path, self._content(i), overwrite=True)) for i in range(count)
        ]
        self.killed: set[int] = set()

    @staticmethod
    def _content(index: int) -> bytes:
        return b"content %d" % index

    def step(self, index: int) -> None:
        """One operation of a save, after which the place must load."""
        if not self.saves[index].is_done:
            self.saves[index].step()
            if self.saves[index].has_changed:
                allowed = {self.old, *map(self._content, range(len(self.saves)))}
                assert found_at(self.path) in allowed

    def play(self, turns: Turns) -> None:
        """Goes through the turns, and then lets each save end."""
        for index, count in turns:
            for _ in range(count):
                self.step(index)
        for index, each in enumerate(self.saves):
            while not each.is_done:
                self.step(index)

    def kill(self, index: int) -> None:
        if not self.saves[index].is_done:
            self.saves[index].kill()
            self.killed.add(index)

    def check(self) -> None:
        """One has won, or several after each other; the others failed by name."""
        winners = sorted(
            (index for index, each in enumerate(self.saves) if each.error is None),
            key=lambda index: self._interval(index)[0],
        )
        assert winners or self.killed
        for before, after in pairwise(winners):
            assert self._interval(before)[1] < self._interval(after)[0]
        for index, each in enumerate(self.saves):
            if index not in self.killed and each.error is not None:
                assert "another save to this path" in each.error
        found = found_at(self.path)
        if winners and found != self._content(winners[-1]):
            # On a store without locks a late put may stand: of a save that failed.
            assert self.path == URL
            last = next(i for i in range(len(self.saves)) if found == self._content(i))
            assert self.saves[last].error is not None
            assert self._interval(last)[1] > self._interval(winners[-1])[1]

    def _interval(self, index: int) -> tuple[int, int]:
        """From when a save had the place, to when its manifest was there."""
        each = self.saves[index]
        if self.path == URL:
            puts = each.time_of_last("pipe_file", "/manifest.json")
            return each.time_of_last("pipe_file", "/owner"), puts
        renamed = each.time_of_last("rename")
        return each.time_of_last("flock", before=renamed), renamed  # it may have tried before

    def check_next(self, most_left: int = 0) -> None:
        """The next save goes well, and removes what the others have left."""
        save(self.path, b"next", overwrite=True)
        assert found_at(self.path) == b"next"
        if self.path == URL:
            found = {name.split("/")[3] for name in MemoryFileSystem().find("/two_saves/one")}
        else:
            beside = [p.name for p in Path(self.path).parent.iterdir()]
            assert beside == ["one"]
            found = {p.name for p in Path(self.path).iterdir()}
        assert len(found) <= 2 + most_left, found


def operations(kind: str, has_old: bool) -> int:
    """How many a save has."""
    with fresh(kind) as path, stepping():
        race = Race(path, 1, has_old)
        race.play([])
        return len(race.saves[0].calls)


KINDS = ("local", "memory")
IS_FULL = os.environ.get("RECSDK_TEST_PROFILE", "ci") == "full"


@pytest.mark.parametrize("has_old", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_save_stops_anywhere_in_another(kind: str, has_old: bool) -> None:
    count = operations(kind, has_old) + 1
    assert count > 20
    seconds = (count // 2, count)
    turns = product(range(count), seconds) if IS_FULL else zip(range(count), cycle(seconds))
    for first, second in turns:
        with fresh(kind) as path, stepping():
            race = Race(path, 2, has_old)
            race.play([(0, first), (1, second)])
            race.check()
            race.check_next()


@given(
    kind=st.sampled_from(KINDS),
    has_old=st.booleans(),
    turns=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 30)), max_size=24),
)
def test_three_saves_in_any_order(kind: str, has_old: bool, turns: Turns) -> None:
    with fresh(kind) as path, stepping():
        race = Race(path, 3, has_old)
        race.play(turns)
        race.check()
        race.check_next()


@pytest.mark.parametrize("has_old", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_save_is_killed_anywhere(kind: str, has_old: bool) -> None:
    for number in range(operations(kind, has_old) + 1):
        with fresh(kind) as path, stepping():
            race = Race(path, 1, has_old)
            for _ in range(number):
                race.step(0)
            race.kill(0)
            race.check()
            # Between its last look and its manifest it looks as if it went on.
            in_gap = any(end.endswith("/committing") for _, _, end in race.saves[0].calls)
            race.check_next(most_left=1 if in_gap and found_at(path) == race.old else 0)


@given(
    kind=st.sampled_from(KINDS),
    has_old=st.booleans(),
    before=st.lists(st.tuples(st.integers(0, 1), st.integers(1, 30)), max_size=12),
    after=st.lists(st.tuples(st.integers(0, 1), st.integers(1, 30)), max_size=6),
)
def test_one_of_two_saves_is_killed(kind: str, has_old: bool, before: Turns, after: Turns) -> None:
    with fresh(kind) as path, stepping():
        race = Race(path, 2, has_old)
        for index, count in before:
            for _ in range(count):
                race.step(index)
        race.kill(0)
        race.play(after)
        race.check_next(most_left=1 if kind == "memory" else 0)
