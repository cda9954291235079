"""A table beside its column ranges, which are tables of a checkpoint of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from recsdk_core import Table, init, optim
from recsdk_core.checkpoint.model.saving import save_tables
from recsdk_core.checkpoint.model.shards import Shard
from recsdk_core.checkpoint.participants import OneRank
from recsdk_core.checkpoint.saving import SaveOptions

DIM = 7
ALL = np.arange(-10, 200)


class Pair:
    """A table, and its column ranges as tables of their own, which are trained alike."""

    def __init__(self, folder: Path, ends: tuple[int, ...] = (2, 3, DIM), **config: Any) -> None:
        self.folder, self.rng = folder, np.random.default_rng(3)
        self.columns = [slice(a, b) for a, b in zip((0, *ends[:-1]), ends, strict=True)]
        settings: dict[str, Any] = {
            "name": "items",
            "optimizer": optim.Adagrad(lr=0.3),
            "initializer": init.Constant(value=0.25),
        }
        settings |= config
        self.whole = Table(DIM, **settings)
        self.ranges = [Table(c.stop - c.start, **settings) for c in self.columns]

    def train(self, keys: Any, erased: Any = ()) -> None:
        """The ranges get their rows in other orders."""
        keys_N, erased_N = np.array(keys, np.int64), np.array(erased, np.int64)
        grads_ND = self.rng.normal(size=(len(keys_N), DIM)).astype(np.float32)
        for table, columns in [(self.whole, slice(None)), *self._parts()]:
            order = self.rng.permutation(len(keys_N))
            table.find_or_insert(keys_N[order])
            grads_nD = grads_ND[order][:, columns].copy()
            if table.dtype == "float32":
                table.apply_gradients(keys_N[order], grads_nD)
            else:  # whose updates round by the column of the table, which a range does not know
                table.upsert(keys_N[order], grads_nD)
            table.erase(erased_N)

    def _parts(self) -> Iterator[tuple[Table, slice]]:
        yield from zip(self.ranges, self.columns, strict=True)

    def save(self, name: str, *, is_delta: bool = False) -> None:
        options = SaveOptions(is_delta=is_delta)
        cut = [
            Shard(table=table, columns=(columns.start, columns.stop))
            for table, columns in self._parts()
        ]
        for kind, shards in (("whole", [Shard(table=self.whole)]), ("cut", cut)):
            given = shards
            save_tables(lambda given=given: (given, options), OneRank(), self.folder / kind / name)
