"""The lookup of one sharding group: pools mapped rows, and trains them in backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.embedding_types import BaseEmbeddingLookup
from torchrec.optim.fused import FusedOptimizer, FusedOptimizerModule

from recsdk_core.batch_leases import BatchLeases
from recsdk_sharding._rows.home import MappedBatch
from recsdk_sharding._rows.in_use import TablesInUse
from recsdk_sharding._rows.rows import TableRows
from recsdk_sharding.exchange.failures import failing_together

__all__ = ["HashLookup"]


class HashLookup(BaseEmbeddingLookup[Any, Any], FusedOptimizerModule):  # type: ignore[misc]
    """Pools the bags of all shards of a group as one autograd node.

    Its backward gives each shard one optimizer update, even for an empty batch, and then ends the
    batch's leases.
    """

    def __init__(self, rows: Sequence[TableRows], group: dist.ProcessGroup) -> None:
        """`group`: of the ranks that have the tables."""
        super().__init__()
        self._rows = list(rows)
        self._group = group
        self._in_use = TablesInUse(self._rows)
        self._optimizer = HashFusedOptimizer(self._rows)

    @property
    def fused_optimizer(self) -> FusedOptimizer:
        """The tables' optimizers, with a parameter group for each."""
        return self._optimizer

    def forward(self, sparse_features: MappedBatch) -> torch.Tensor:
        """The vectors that this rank pools for all ranks: float32 (num_values,).

        The results themselves, (B, C), if they can be made at once.
        """
        self._optimizer.step()  # a scheduler may have changed the learning rate since the last step
        guard = partial(self._in_backward, sparse_features.in_flight)
        return sparse_features.pool(self._in_use.anchor, guard)

    @contextmanager
    def _in_backward(self, in_flight: BatchLeases) -> Iterator[None]:
        """What a batch's backward runs in."""
        with failing_together(self._group):
            in_flight.begin_backward()
            yield

    def prefetch(self, sparse_features: MappedBatch, forward_stream: Any = None) -> None:
        """Does nothing: rows are in memory."""

    def flush(self) -> None:
        """Does nothing: rows have one place."""

    def purge(self) -> None:
        """Does nothing: nothing is cached."""


class HashFusedOptimizer(FusedOptimizer):  # type: ignore[misc]
    """torchrec's view of optimizers that run in backward: one parameter group per table.

    `step` and `zero_grad` only hand changed learning rates to the tables. Optimizer state belongs
    to the rows and is in the module's `state_dict`, so `state_dict()["state"]` is empty here.
    """

    def __init__(self, rows: Sequence[TableRows]) -> None:
        self._rows = [each for each in rows if each.optimizer is not None]
        params = {f"{each.config.name}.weight": each.weight for each in self._rows}
        groups = [{"params": [p.weight], "lr": p.learning_rate} for p in self._rows]
        super().__init__(params, {}, groups)

    def step(self, closure: Any = None) -> None:
        """Hands the learning rates of `param_groups` to the tables."""
        for each, group in zip(self._rows, self.param_groups, strict=True):
            each.set_learning_rate(float(group["lr"]))

    def zero_grad(self, set_to_none: bool = False) -> None:
        """As `step`: gradients are never kept."""
        self.step()
