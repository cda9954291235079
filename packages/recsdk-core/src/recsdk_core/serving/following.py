"""A frozen table that takes the deltas of a chain as they come, in a thread of its own.

Shape letters: N keys, W shards.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from recsdk_core import _ext
from recsdk_core.checkpoint.columns import WholeTable, shares_rows, whole_tables
from recsdk_core.checkpoint.comparing import as_floats
from recsdk_core.checkpoint.joining import Block, side_by_side
from recsdk_core.checkpoint.manifest import TableEntry
from recsdk_core.checkpoint.owners import Owner
from recsdk_core.checkpoint.reading import Checkpoint
from recsdk_core.checkpoint.restoring import read_shared
from recsdk_core.errors import CheckpointError
from recsdk_core.serving.chain_folder import ChainFolder, Place
from recsdk_core.virtual_shards import NUM_VIRTUAL_SHARDS, virtual_shards

__all__ = ["Follower", "Progress", "ServingStats"]

_MOST_WAIT_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class ServingStats:
    """What a `ServingTable` serves, and how far it is behind."""

    num_rows: int
    """Rows of the newest version."""
    num_deltas: int
    """Deltas taken since the table was opened: the number of its version."""
    delta_bytes: int
    """Memory that they take now, beside the files."""
    sequence: int | None
    """Deltas after the snapshot of the chain, with those before the freeze; None for tables frozen
    from memory, which are of no chain."""
    step: int | None
    """The caller's step of what is served."""
    is_following: bool
    """Whether a thread looks for deltas."""
    num_behind: int
    """Deltas that lie in the folder, complete, and are not served yet, as of the last look."""
    seconds_behind: float
    """How long ago the first of them was seen; 0 if there is none."""
    last_seconds: float | None
    """How long the last delta took, from when it was seen until it was served."""
    num_failures: int
    """Looks and deltas that failed."""
    problem: str | None
    """Why the last good version stays: a gap, a damaged delta, a folder that cannot be read; None
    if nothing is wrong. It goes when what is wrong does."""


@dataclass(frozen=True)
class Progress:
    """How far a table has come. It is replaced, never changed."""

    place: Place | None
    num_behind: int = 0
    seen_at: float | None = None
    last_seconds: float | None = None
    num_failures: int = 0
    problem: str | None = None


class Follower:
    """Looks for deltas again and again, and has the engine take them."""

    def __init__(
        self,
        folder: ChainFolder,
        engine: _ext.ServingTable,
        name: str,
        shards: Sequence[int] | None,
        interval_seconds: float,
        progress: Progress,
    ) -> None:
        self._folder, self._engine, self._name = folder, engine, name
        self._shards = None if shards is None else np.asarray(shards)
        self._interval = interval_seconds
        self.progress = progress
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"recsdk-follow-{name}", daemon=True)
        self._process = os.getpid()

    def start(self) -> None:
        """Begins to look."""
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the thread looks, in this process: a forked one has no threads."""
        return self._process == os.getpid() and self._thread.is_alive()

    def ask_to_stop(self) -> None:
        """Has the thread end soon. In a forked process there is none, and its lock may be held."""
        if self._process == os.getpid():
            self._stop.set()

    def stop(self) -> None:
        """Ends the thread; a delta that it is about to take is taken first."""
        self.ask_to_stop()
        if self._process == os.getpid():
            self._thread.join()

    def _run(self) -> None:
        wait = self._interval
        while not self._stop.is_set():
            try:
                took = self._look()
                wait = self._interval
            except Exception as error:  # whatever is wrong, the last good version stays
                took = False
                self._fail(error)
                wait = min(2 * wait, max(_MOST_WAIT_SECONDS, self._interval))
            if not took:
                self._stop.wait(wait)

    def _fail(self, error: Exception) -> None:
        said = str(error) or type(error).__name__
        failures = self.progress.num_failures + 1
        self.progress = replace(self.progress, num_failures=failures, problem=said)

    def _look(self) -> bool:
        """Takes the next delta; False if there is none."""
        place = self.progress.place
        assert place is not None
        look = self._folder.look(place)
        seen_at = (self.progress.seen_at or time.monotonic()) if look.behind else None
        self.progress = replace(self.progress, num_behind=look.behind, seen_at=seen_at)
        if look.next is None:
            self.progress = replace(self.progress, problem=look.problem)
            return False
        began = time.monotonic()
        self._take(look.next)
        self._advance(look.next, began)
        return True

    def _advance(self, checkpoint: Checkpoint, began: float) -> None:
        chain = checkpoint.manifest.chain
        assert chain is not None
        place = Place(
            hash=checkpoint.hash,
            base=chain.base,
            sequence=chain.sequence,
            step=checkpoint.manifest.step,
        )
        now = time.monotonic()
        behind = self.progress.num_behind - 1
        self.progress = replace(
            self.progress,
            place=place,
            num_behind=behind,
            seen_at=now if behind else None,
            last_seconds=now - began,
            problem=None,
        )

    def _take(self, checkpoint: Checkpoint) -> None:
        """Reads a delta, verifies every byte of it, and only then has it served."""
        table = _whole_table(checkpoint, self._name)
        self._check(checkpoint, table)
        delta = _ext.ServingDelta(self._engine)
        if shares_rows(table.parts[0]):  # a delta has all rows that keys without one share
            delta.add_shared(*_shared_rows(checkpoint, table), table.dim)
        self._add_rows(delta, checkpoint, table)
        self._engine.take(delta)

    def _check(self, checkpoint: Checkpoint, table: WholeTable) -> None:
        info, first = self._engine.info(), table.parts[0]
        for what, here, there in (
            ("width", info["dim"], table.dim),
            ("number of shared rows", info["num_shared"], _num_shared(first)),
            ("default value", np.float32(info["default_value"]), np.float32(first.default_value)),
        ):
            if here != there:
                raise CheckpointError(
                    f"{checkpoint.location}: its table {self._name!r} has the {what} {there}, and "
                    f"what is served {here}; it is of another table"
                )

    def _add_rows(
        self, delta: _ext.ServingDelta, checkpoint: Checkpoint, table: WholeTable
    ) -> None:
        if len(table.parts) == 1:
            for keys, weights in _blocks(checkpoint, table.name):
                self._add(delta, keys, weights, table.dim)
        else:
            erased, rows = _joined(checkpoint, table)
            self._add(delta, erased, None, table.dim)
            self._add(delta, *rows, table.dim)

    def _add(
        self,
        delta: _ext.ServingDelta,
        keys: NDArray[np.int64],
        weights: NDArray[np.float32] | None,
        dim: int,
    ) -> None:
        """Adds rows, or without weights keys that left, those of the shards that are open."""
        if self._shards is not None:
            count = self._engine.info()["num_shards"]
            is_here = np.isin(virtual_shards(keys) * count // NUM_VIRTUAL_SHARDS, self._shards)
            keys = keys[is_here]
            weights = None if weights is None else weights[is_here]
        if weights is None:
            delta.erase(np.ascontiguousarray(keys))
        else:
            delta.add(np.ascontiguousarray(keys), np.ascontiguousarray(weights), dim)


def _whole_table(checkpoint: Checkpoint, name: str) -> WholeTable:
    for table in whole_tables(checkpoint.manifest.tables):
        if table.name == name:
            return table
    _, entry = checkpoint.table(name)  # raises, naming those that there are
    return WholeTable(name, (entry,))


def _blocks(
    checkpoint: Checkpoint, name: str
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32] | None]]:
    """Rows of a delta, verified; of keys that left no weights."""
    index, entry = checkpoint.table(name)
    for rank in range(len(entry.files)):
        for block in checkpoint.blocks(index, rank):
            if block.kind != "rows":
                yield block.keys, None
                continue
            weights = as_floats(block.fields["weight"], entry.fields[0].dtype)
            yield block.keys, np.ascontiguousarray(weights, dtype=np.float32)


def _joined(checkpoint: Checkpoint, table: WholeTable) -> tuple[NDArray[np.int64], Block]:
    """The keys that left, and the rows, of all column ranges of a table."""
    left, rows = zip(*(_of_range(checkpoint, part) for part in table.parts), strict=True)
    try:
        return side_by_side(table.name, left)[0], side_by_side(table.name, rows)
    except CheckpointError as error:
        raise CheckpointError(
            f"{checkpoint.location}: {error}; freeze the end of the chain and open that"
        ) from None


def _of_range(checkpoint: Checkpoint, part: TableEntry) -> tuple[Block, Block]:
    """The keys that left, with rows of no width, and the rows of a column range."""
    blocks = list(_blocks(checkpoint, part.name))
    none = np.empty(0, np.int64), np.empty((0, part.dim), np.float32)
    kept = [none, *((keys, weights) for keys, weights in blocks if weights is not None)]
    keys, weights = (np.concatenate(each) for each in zip(*kept, strict=True))
    left = np.concatenate([none[0], *(keys for keys, weights in blocks if weights is None)])
    return (left, np.empty((len(left), 0), np.float32)), (keys, weights)


def _shared_rows(checkpoint: Checkpoint, table: WholeTable) -> Block:
    ranges = [
        read_shared([checkpoint], part.name, Owner(), drop_state=True) for part in table.parts
    ]
    return side_by_side(table.name, [(found.keys, found.weights) for found in ranges])


def _num_shared(entry: TableEntry) -> int:
    return 0 if entry.default is None else int(entry.default.arguments.get("n") or 0)
