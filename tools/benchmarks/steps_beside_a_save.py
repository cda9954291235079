"""How much longer a training step takes while `save_async` writes the table."""

from __future__ import annotations

import gc
import shutil
import time
from pathlib import Path

import numpy as np

from benchmarks.records import Record, record_of
from recsdk_core import Table

LEAST_STEPS = 40
BATCHES = (20_000, 100_000)  # keys of a step, few of them equal


def measure(
    table: Table, all_keys: np.ndarray, folder: Path, workload: str, repetitions: int
) -> list[Record]:
    """Milliseconds of the longest step with a save and without, and by how much they differ.

    Steps update rows drawn evenly over the table, one after the other without a pause: nearly all
    of the rows have to be copied, the worst that training can do to a save. Taking the cut counts
    as part of the first step. As many steps are run without a save, before or after, so that both
    meet as much of what else the machine does. The first save of the table is shown by itself: what
    it needs of memory was readied by the steps before it.
    """
    path = folder / "beside"
    first = _Steps(table, all_keys, max(BATCHES))
    first.run(None, LEAST_STEPS)
    saving = first.run(path, LEAST_STEPS)
    longest = {"saving": max(saving), "not saving": max(first.run(None, len(saving)))}
    shutil.rmtree(path)
    op = f"longest update of {max(BATCHES)} keys, first save"
    records = [_one(workload, op, longest["saving"])]
    records += [_one(workload, f"{op}, more", longest["saving"] - longest["not saving"])]
    for batch in BATCHES:
        steps = _Steps(table, all_keys, batch)
        num_steps = len(steps.run(None, LEAST_STEPS))
        samples: dict[str, list[float]] = {"saving": [], "not saving": []}
        more: list[float] = []
        for repetition in range(repetitions):
            turns = {"saving": path, "not saving": None}
            for name in list(turns) if repetition % 2 == 0 else reversed(turns):
                times = steps.run(turns[name], LEAST_STEPS if turns[name] else num_steps)
                num_steps = len(times)
                samples[name].append(max(times))
            more.append(samples["saving"][-1] - samples["not saving"][-1])
            shutil.rmtree(path)
        op = f"longest update of {batch} keys"
        records += [
            record_of(workload, op, "ms", "saving", samples),
            record_of(workload, f"{op}, more", "ms", "saving", {"saving": more}),
            _one(workload, f"{op}, more, at worst", max(more)),
        ]
    return records


def _one(workload: str, op: str, milliseconds: float) -> Record:
    return record_of(workload, op, "ms", "saving", {"saving": [milliseconds]})


class _Steps:
    """Updates of one table."""

    def __init__(self, table: Table, keys: np.ndarray, batch: int) -> None:
        self._table, self._keys, self._batch = table, keys, batch
        self._random = np.random.default_rng(2)
        self._gradients = np.ones((batch, table.dim), np.float32)

    def _draw(self) -> np.ndarray:
        drawn: np.ndarray = self._keys[self._random.integers(0, len(self._keys), self._batch)]
        return drawn

    def run(self, path: Path | None, least: int) -> list[float]:
        """Milliseconds of each step, `least` of them and all while a save to `path` goes on."""
        gc.collect()
        times: list[float] = []
        handle = None
        while len(times) < least or (handle is not None and not handle.is_done):
            keys = self._draw()
            start = time.perf_counter()
            if path is not None and handle is None:
                handle = self._table.save_async(path)
            self._table.apply_gradients(keys, self._gradients)
            times.append((time.perf_counter() - start) * 1e3)
        if handle is not None:
            handle.wait()
        return times
