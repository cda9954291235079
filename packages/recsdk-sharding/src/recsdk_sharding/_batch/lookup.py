"""The lookup of one sharding group: pools mapped rows, and trains them in backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torchrec.distributed.embedding_types import BaseEmbeddingLookup
from torchrec.optim.fused import FusedOptimizer, FusedOptimizerModule

from recsdk_sharding._rows.home import MappedBatch
from recsdk_sharding._rows.optimizers import HashFusedOptimizer
from recsdk_sharding._rows.rows import TableRows, anchor_of
from recsdk_sharding.exchange.failures import failing_together

__all__ = ["HashLookup"]


class HashLookup(BaseEmbeddingLookup[Any, Any], FusedOptimizerModule):  # type: ignore[misc]
    """Pools the bags of all shards of a group as one autograd node.

    Its backward gives each shard one optimizer update, even for an empty batch, and then ends the
    batch's leases.
    """

    def __init__(self, rows: Sequence[TableRows]) -> None:
        super().__init__()
        self._rows = list(rows)
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
        return sparse_features.pool(anchor_of(self._rows), failing_together)

    def prefetch(self, sparse_features: MappedBatch, forward_stream: Any = None) -> None:
        """Does nothing: rows are in memory."""

    def flush(self) -> None:
        """Does nothing: rows have one place."""

    def purge(self) -> None:
        """Does nothing: nothing is cached."""
