"""What random calls of pipelines save, what it is loaded as, and what servers read of it.

Shape letters: B samples, D columns, N ids.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from policy_batches import Array, Bags, Shape, halves
from programs_on_ranks import Runner
from random_programs import Turn
from worlds import Rows

from recsdk_core import CheckpointError
from recsdk_core.checkpoint import compact, reshard
from recsdk_core.serving import freeze, open_tables
from recsdk_sharding import Saver

SAVED_AS = ["deltas", "one over another"]
LOADED_AS = ["saved", "compacted", "resharded"]
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
"""Of pooled vectors, which are added up in another order."""


class Broken(Exception):
    """What breaks a save off."""


def _interrupt(is_guilty: bool, *_: Any) -> None:
    if is_guilty:
        raise Broken


class Saves:
    """The checkpoints of a model, each what changed since the one before it."""

    def __init__(
        self, folder: str, codec: Any, chain: list[str], saved_as: str, loaded_as: str
    ) -> None:
        """`chain`: those that it begins from."""
        self._is_over = saved_as == "one over another"
        self._user_state: Any = None
        self._folder, self._codec = folder, codec
        self._loaded_as = loaded_as
        self.chain = list(chain)
        self._num_saved = 0
        self.is_replaced = False
        """Whether rows came from elsewhere since, so that no delta follows."""
        self._num_made = 0
        self.rows: Rows | None = None
        """What the last one has."""

    def save(self, model: Any, progress: Any = None) -> None:
        path = f"{self._folder}/{0 if self._is_over else self._num_saved}"
        is_delta = self._num_saved > 0 and not self._is_over and not self.is_replaced
        user_state = {"number": self._num_saved, "of rank 0": dist.get_rank() == 0}
        Saver().save(
            model,
            path,
            incremental=is_delta,
            overwrite=self._is_over,
            user_state=user_state,
            codec=self._codec,
            progress=progress,
        )
        self._user_state = user_state
        self.is_replaced = False
        self.chain = [*(self.chain if is_delta else []), path]
        self._num_saved += 1

    def breaks_off(self, model: Any, guilty: int) -> bool:
        """Begins a save that one rank breaks off; whether it did, as else it is saved."""
        number = self._num_saved
        try:
            self.save(model, partial(_interrupt, dist.get_rank() == guilty))
        except (CheckpointError, Broken):
            return True
        return self._num_saved == number

    def load(self, model: Any) -> None:
        """What is saved later is then what changed since what the chain was made into."""
        if self._loaded_as != "saved":
            path = f"{self._folder}/{self._loaded_as}_{self._num_made}"
            self._num_made += 1
            self._made(path)
            self.chain = [path]
        found = Saver().load(model, self.chain)
        self.is_replaced = False
        if self._num_saved:
            assert found.user_state() == {**self._user_state, "of rank 0": True}

    def _made(self, path: str) -> None:
        try:
            if dist.get_rank() == 0 and self._loaded_as == "compacted":
                compact(self.chain, path, codec=self._codec)
            elif dist.get_rank() == 0:
                reshard(self.chain, path, world_size=dist.get_world_size() + 1, codec=self._codec)
        finally:
            dist.barrier()

    def assert_served(self, runner: Runner, batch: int) -> None:
        """Frozen tables give what a model gives in evaluation that loaded the chain."""
        if any(table["default"].kind == "initial_row" for table in runner.program.tables):
            return  # which files do not have
        folder = f"{self._folder}/frozen"
        try:
            if dist.get_rank() == 0:
                freeze(self.chain, folder, num_shards=2)
        finally:
            dist.barrier()
        with torch.autocast("cpu", enabled=False):
            [seen] = runner.run((Turn("read", (batch,)),))
        tables = open_tables(folder)
        for shown, (name, number) in runner.program.shown.items():
            config = runner.program.tables[number]
            bags = runner.bags_of(batch)[name]
            rows_ND = tables[config["name"]].lookup(bags.keys_N)
            found = _vectors(runner, bags, rows_ND, config.get("is_mean", False))
            np.testing.assert_allclose(found, seen.vectors[shown], **TOLERANCE, err_msg=shown)


def _vectors(runner: Runner, bags: Bags, rows_ND: Array, is_mean: bool) -> Array:
    """Of the samples' bags, or of their sequences' ids."""
    row = runner.program.row
    if row["kind"] == "sequences":
        found: Array = rows_ND[bags.positions()]
        return found
    if row["weights"] == "processed":
        bags = replace(bags, weights_N=halves(bags.lengths_G))
    shape = Shape(is_mean=is_mean, is_weighted=row["weights"] != "none")
    return np.stack([bags.pooled(column_N, shape) for column_N in rows_ND.T], axis=1)
