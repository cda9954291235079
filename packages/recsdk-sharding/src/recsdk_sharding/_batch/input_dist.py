"""What stands where torchrec has an input dist: it sends ids to the ranks that have them, mapped.

The work runs in the background as one job of the host exchange, so that any torchrec pipeline
overlaps it with training.
"""

from __future__ import annotations

import zlib
from concurrent.futures import Future
from typing import Any

from torchrec.distributed.embedding_sharding import BaseSparseFeaturesDist
from torchrec.distributed.types import Awaitable

from recsdk_sharding._batch.context import HashShardingContext
from recsdk_sharding._batch.features import features_on_host
from recsdk_sharding._batch.host_job import HostDistConfig, HostJob, Result
from recsdk_sharding._batch.in_place import Places
from recsdk_sharding._rows.home import MappedBatch
from recsdk_sharding.placement.devices import mark_of

__all__ = ["HostDist"]


class HostDist(BaseSparseFeaturesDist[Any]):  # type: ignore[misc]
    """Sends ids to the ranks that have them and maps them, in the background.

    It has no attribute `_dist`, so torchrec's pipelines leave its collectives alone.
    """

    def __init__(self, config: HostDistConfig) -> None:
        super().__init__()
        self.config = config
        self.num_steps = 0  # training batches exchanged; the same on all ranks
        self.bytes_sent = 0  # to other ranks: ids, lengths and weights
        self.sends_weights_late = False
        """Whether weights are not known before the batch is looked up."""
        self.wants_outcomes = False
        """Whether to learn what became of each id of this rank's batches."""
        self.equal_batches: list[tuple[int, ...]] = []
        """Groups of ranks whose batches must be of equal size."""
        self.places: Places | None = None
        """Where vectors are pooled to if bags are whole on their own rank; None: they are sent."""
        names = [table.name for table in config.layout.tables]
        self.tag = zlib.crc32("\n".join([*names, "", *config.layout.feature_names]).encode()) >> 1

    def forward(self, features: Any, context: HashShardingContext, training: bool) -> HostAwaitable:
        """Starts the work; what is wrong with `features` is raised by the second wait."""
        job = HostJob(self, features_on_host(features), training)
        return HostAwaitable(self.config.group.exchange.submit(job), context)


class HostAwaitable(Awaitable[Awaitable[MappedBatch]]):  # type: ignore[misc]
    """The first wait returns at once, the second gives the mapped batch."""

    def __init__(self, future: Future[Result], context: HashShardingContext) -> None:
        super().__init__()
        self._mapped = _MappedAwaitable(future, context)

    def _wait_impl(self) -> Awaitable[MappedBatch]:
        return self._mapped


class _MappedAwaitable(Awaitable[MappedBatch]):  # type: ignore[misc]
    def __init__(self, future: Future[Result], context: HashShardingContext) -> None:
        super().__init__()
        self._future = future
        self._context = context

    def _wait_impl(self) -> MappedBatch:
        result = self._future.result()
        result.batch.open()
        self._context.features = result.features
        if result.assembly is not None:
            self._context.assembly = result.assembly.to(result.device)
        self._context.num_values_sent = result.num_values_sent
        self._context.outcomes = result.outcomes
        if result.late_weights is not None:
            result.late_weights.open()
            self._context.late_weights = result.late_weights
        self._context.in_place = result.in_place
        self._context.step = result.step
        self._context.copied = mark_of(result.device)
        return result.batch
