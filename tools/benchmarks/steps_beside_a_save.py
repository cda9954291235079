"""How much longer a training step takes while `save_async` writes the table."""

from __future__ import annotations

import gc
import shutil
import time
from pathlib import Path

import numpy as np

from benchmarks.records import Record, record_of
from recsdk_core import Table

NUM_STEPS = 40
BATCHES = (20_000, 100_000)  # distinct keys of a step


def measure(
    table: Table, all_keys: np.ndarray, folder: Path, workload: str, repetitions: int
) -> list[Record]:
    """Milliseconds of the longest step with a save and without, and by how much they differ.

    Steps update distinct rows drawn evenly over the table: nearly all of them have to be copied,
    the worst that training can do to a save. Taking the cut counts as part of the first step.
    """
    records = []
    for batch in BATCHES:
        steps = _Steps(table, all_keys, batch)
        steps.run(None, 3)
        samples: dict[str, list[float]] = {"saving": [], "not saving": []}
        more: dict[str, list[float]] = {"saving": []}
        for repetition in range(repetitions):
            path = folder / "beside"
            turns = {"not saving": None, "saving": path}
            for name in list(turns) if repetition % 2 == 0 else reversed(turns):
                times = steps.run(turns[name], NUM_STEPS)
                samples[name].append(max(times))
            more["saving"].append(samples["saving"][-1] - samples["not saving"][-1])
            shutil.rmtree(path)
        op = f"longest update of {batch} keys"
        records += [
            record_of(workload, op, "ms", "saving", samples),
            record_of(workload, f"{op}, more than without a save", "ms", "saving", more),
            record_of(
                workload, f"{op}, more, at worst", "ms", "saving", {"saving": [max(more["saving"])]}
            ),
        ]
    return records


class _Steps:
    """Updates of one table."""

    def __init__(self, table: Table, keys: np.ndarray, batch: int) -> None:
        self._table, self._keys, self._batch = table, keys, batch
        self._random = np.random.default_rng(2)
        self._gradients = np.ones((batch, table.dim), np.float32)

    def run(self, path: Path | None, least: int) -> list[float]:
        """Milliseconds of each step, `least` of them and all while a save to `path` goes on."""
        gc.collect()
        times: list[float] = []
        handle = None
        while len(times) < least or (handle is not None and not handle.is_done):
            chosen = self._random.choice(len(self._keys), self._batch, replace=False)
            keys = self._keys[chosen]
            start = time.perf_counter()
            if path is not None and handle is None:
                handle = self._table.save_async(path)
            self._table.apply_gradients(keys, self._gradients)
            times.append((time.perf_counter() - start) * 1e3)
        if handle is not None:
            handle.wait()
        return times
