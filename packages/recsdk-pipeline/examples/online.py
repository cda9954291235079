"""Online learning: a training saves deltas, and a server in another process follows them.

python online.py FOLDER

A table scores items by how often they are clicked. Every hour some items give way to new ones, with
ids that nobody has seen. The server answers all the time, and takes each delta once it is complete.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from recsdk_core import Table, init, optim
from recsdk_core.serving import ServingTable, freeze

HOURS, STEPS, BATCH, NUM_ITEMS, NUM_NEW = 8, 40, 500, 400, 100


def serve(folder: Path, requests: Connection) -> None:
    """Answer items with scores, and say how many deltas these have at least."""
    table = ServingTable(folder / "served")
    table.follow(folder / "chain")
    while (items := requests.recv()) is not None:
        num_deltas = table.stats().sequence
        requests.send((num_deltas, table.lookup(items)[:, 0]))


class Clicks:
    """Items, of which some are replaced every hour, and clicks on them."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.items, self.rates = np.zeros(NUM_ITEMS, np.int64), np.zeros(NUM_ITEMS)
        self.replace(NUM_ITEMS)

    def replace(self, count: int) -> None:
        places = self.random.permutation(NUM_ITEMS)[:count]
        self.items[places] = self.random.integers(-(2**62), 2**62, count)
        self.rates[places] = self.random.choice([0.05, 0.6], count)

    def batch(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Items (N,) that were shown, and which were clicked, 0 or 1 (N,)."""
        shown = self.random.integers(0, NUM_ITEMS, size)
        return self.items[shown], (self.random.random(size) < self.rates[shown]).astype(np.float32)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    zeros, adagrad = init.Constant(value=0.0), optim.Adagrad(lr=0.5)
    table, clicks = Table(1, name="item", optimizer=adagrad, initializer=zeros), Clicks()
    table.save(folder / "chain" / "hour_0")
    freeze(folder / "chain" / "hour_0", folder / "served")
    processes = multiprocessing.get_context("spawn")
    requests, theirs = processes.Pipe()
    processes.Process(target=serve, args=(folder, theirs), daemon=True).start()
    for hour in range(1, HOURS + 1):
        clicks.replace(NUM_NEW)
        for _ in range(STEPS):  # of logistic regression
            items, clicked = clicks.batch(BATCH)
            chances = 1 / (1 + np.exp(-table.find_or_insert(items)[:, 0]))
            table.apply_gradients(items, (chances - clicked)[:, None])
        table.save_delta(folder / "chain" / f"hour_{hour}")
        num_deltas, items, clicked = 0, *clicks.batch(10_000)
        while num_deltas < hour:
            requests.send(items)
            num_deltas, scores = requests.recv()
        loss = np.mean(np.log1p(np.exp(scores)) - clicked * scores)
        print(f"hour {hour}: loss {loss:.3f} with {num_deltas} deltas; knowing nothing 0.693")
    requests.send(None)


if __name__ == "__main__":
    main()
