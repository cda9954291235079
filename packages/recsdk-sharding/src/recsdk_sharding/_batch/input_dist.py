"""What stands where torchrec has an input dist: it sends ids to the ranks that have them, mapped.

The work runs in the background as one job of the host exchange, so that any torchrec pipeline
overlaps it with training.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torchrec.distributed.embedding_sharding import BaseSparseFeaturesDist
from torchrec.distributed.types import Awaitable, NoWait

from recsdk_sharding._batch.context import (
    HashShardingContext,
    HostDistConfig,
    Order,
    Remainder,
    ResultColumns,
)
from recsdk_sharding._batch.features import features_on_host
from recsdk_sharding._batch.host_job import (
    Alone,
    Mapped,
    Prepared,
    Received,
    map_keys,
    prepare,
)
from recsdk_sharding._rows.home import MappedBatch
from recsdk_sharding.exchange import ExchangeJob, Splits
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
        self.time: int | None = None
        """The time of batches from now on, for tables that evict by time."""
        self.results: ResultColumns | None = None
        """Where vectors are pooled to if bags are whole on their own rank; None: they are sent."""
        names = [table.name for table in config.layout.tables]
        self.tag = zlib.crc32("\n".join([*names, "", *config.layout.feature_names]).encode()) >> 1

    def forward(
        self, features: Any, context: HashShardingContext, training: bool
    ) -> Awaitable[Awaitable[MappedBatch]]:
        """Starts the work. The first wait returns at once, the second gives the mapped batch.

        What is wrong with `features` is raised by the second.
        """
        order = Order(
            source=features_on_host(features),
            training=training,
            sends_weights_late=self.sends_weights_late,
            wants_outcomes=self.wants_outcomes,
            results=self.results,
            time=self.time,
        )
        future = self.config.group.exchange.submit(_Job(self, order))
        return NoWait(_MappedAwaitable(future, context, self.config.home.device))

    def take(self, *, bytes_sent: int = 0, steps: int = 0) -> None:
        """Counts what a job has done."""
        self.bytes_sent += bytes_sent
        self.num_steps += steps


_Done: TypeAlias = tuple[MappedBatch, Remainder]
"""What the work of a batch gives."""


class _Job(ExchangeJob[_Done]):
    """One batch of one sharding group, in the words of the exchange."""

    def __init__(self, owner: HostDist, order: Order) -> None:
        self.training = order.training
        self.tag = owner.tag
        self.equal_batches = owner.equal_batches
        self._owner = owner
        self._order = order
        self._time: int | None = None

    def step(self) -> int:
        return self._owner.num_steps + int(self.training)

    def prepare(self) -> tuple[Splits, Alone | Prepared]:
        prepared = prepare(self._owner.config, self._order)
        return prepared.splits, prepared

    def transfer(
        self, group: dist.ProcessGroup, splits: Sequence[Splits], prepared: Alone | Prepared
    ) -> Alone | Received:
        self._time = max((each.time for each in splits if each.time is not None), default=None)
        received = prepared.receive(group, splits)
        self._owner.take(bytes_sent=received.bytes_sent)
        return received

    def finish(self, received: Alone | Received) -> Mapped:
        step = self.step()
        self._owner.take(steps=int(self.training))
        return map_keys(received, step, self._time)

    def answer(self, group: dist.ProcessGroup, splits: Sequence[Splits], found: Mapped) -> _Done:
        remainder, bytes_sent = found.answer(group, splits)
        self._owner.take(bytes_sent=bytes_sent)
        return found.batch, remainder


class _MappedAwaitable(Awaitable[MappedBatch]):  # type: ignore[misc]
    def __init__(
        self, future: Future[_Done], context: HashShardingContext, device: torch.device
    ) -> None:
        super().__init__()
        self._future = future
        self._context = context
        self._device = device

    def _wait_impl(self) -> MappedBatch:
        batch, remainder = self._future.result()
        batch.open()
        remainder.open()
        self._context.remainder = remainder
        self._context.copied = mark_of(self._device)
        return batch
