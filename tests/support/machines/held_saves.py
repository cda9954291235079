"""Saves in the background that are held up, so that a table can change before they go on."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import numpy as np

from recsdk_core import Table
from recsdk_core.checkpoint import open_checkpoint
from recsdk_core.checkpoint.model.saving import Cuts

__all__ = ["HELD", "Content", "Held", "HeldSave"]

Held = Literal["before the rows", "before the end", "no"]
HELD: tuple[Held, ...] = ("before the rows", "before the end", "no")
"""Where a save waits: nothing is read yet, or a file is written but not the manifest."""
_SECONDS = 400


@dataclass(frozen=True)
class Content:
    """What readers see of a table, whatever the numbers of its rows."""

    rows: dict[int, tuple[bytes, ...]]
    shared: list[tuple[bytes, ...]]
    update_count: int
    learning_rate: float

    @staticmethod
    def of(table: Any) -> Content:
        """`table`: a Table, or a ReferenceTable."""
        rows = {}
        for batch in table.export():
            rows |= dict(zip(batch.keys.tolist(), _lines_of(batch), strict=True))
        shared = _lines_of(table.shared_rows())
        return Content(rows, shared, table.update_count, np.float32(table.learning_rate))


def _lines_of(batch: Any) -> list[tuple[bytes, ...]]:
    arrays = [batch.weights, *(batch.state[name] for name in sorted(batch.state))]
    arrays = [np.where(np.isnan(each), np.float32(np.nan), each) for each in arrays]  # of any sign
    return [tuple(each[i].tobytes() for each in arrays) for i in range(len(batch.keys))]


class HeldSave:
    """A save under way, and what the table held when it was asked for."""

    def __init__(
        self,
        table: Table,
        model: Any,
        path: str,
        held: Held,
        *,
        delta: bool,
        overwrite: bool = False,
    ) -> None:
        """`model`: the ReferenceTable that holds the same."""
        self.path = path
        self._gate, self._has_come = threading.Event(), threading.Event()
        if held == "no":
            self._gate.set()
        self._expected = Content.of(model)
        self._copy = copy.deepcopy(table)
        self._state = {"num_rows": len(model), "by": ["a", "b"]}
        waiting = nullcontext() if held != "before the rows" else self._waiting()
        with warnings.catch_warnings(), waiting:
            warnings.simplefilter("ignore")  # of rows of steps that are over and still hidden
            self._handle = table.save_async(
                path,
                delta=delta,
                overwrite=overwrite,
                user_state=self._state,
                progress=self._wait if held == "before the end" else None,
            )
        self._state["by"].append("c")  # type: ignore[union-attr]

    @property
    def is_held(self) -> bool:
        """Whether it waits; else it may have ended, or does so soon."""
        while not (self._has_come.wait(0.001) or self._handle.is_done):
            if self._gate.is_set():
                return False
        return not self._gate.is_set() and not self._handle.is_done

    def beside(self) -> str:
        """A save of the same that is not held up."""
        path = f"{self.path}.beside"
        self._copy.save(path, overwrite=True)
        return path

    def _wait(self, *_: Any) -> None:
        self._has_come.set()
        assert self._gate.wait(_SECONDS)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Inside, a save that begins in the background waits before it reads rows."""
        save = Cuts.save

        def held(cuts: Cuts, *args: Any) -> Any:
            self._wait()
            return save(cuts, *args)

        with mock.patch.object(Cuts, "save", held):
            yield
            assert self._has_come.wait(_SECONDS)

    def end(self) -> None:
        """Lets it go on to its end; it has saved what the table held at its call."""
        self._gate.set()
        self._handle.wait(_SECONDS)
        checkpoint = open_checkpoint(self.path)
        assert checkpoint.user_state() == {"num_rows": self._state["num_rows"], "by": ["a", "b"]}
        loaded = self._copy.empty_copy()
        loaded.load(self.path)
        assert Content.of(loaded) == self._expected
        assert _kept_of(loaded) == _kept_of(self._copy)


def _kept_of(table: Table) -> list[Any]:
    """What rules keep: counts of keys without a row, the clock, and who would leave first."""
    image = table._image()
    counts = sorted(zip(*(part.tolist() for part in image.records or ()), strict=True))
    step, _, is_begun, time, _ = image.eviction
    kept: list[Any] = [counts, step, is_begun, time]
    if table.eviction is None:
        return kept
    for share in (2, 4):
        kept.append(table.evict(max_rows=len(table) // share))
        kept.append(sorted(key for batch in table.export() for key in batch.keys.tolist()))
    return kept
