"""What stands where torchrec has an input dist: it sends ids to the ranks that have them, mapped.

The work runs in the background as one job of the host exchange, so that any torchrec pipeline
overlaps it with training. A collection whose tables are sharded in several ways has such a dist for
each, and a job of each for a batch.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torchrec.distributed.embedding_sharding import BaseSparseFeaturesDist
from torchrec.distributed.types import Awaitable

from recsdk_core.batch_leases import BatchLeases, leave_failed, noting_lookups
from recsdk_sharding._batch.awaitables import Ready, Unmarked
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
from recsdk_sharding._batch.row_sample import ReplicaSample
from recsdk_sharding._rows.home import MappedBatch
from recsdk_sharding.exchange import ExchangeJob, Pending, Splits
from recsdk_sharding.placement.devices import stream_of

__all__ = ["HostDist", "start_batch"]


class _Progress:
    """How far the batches of one dist have come. Attributes of a module take long to set."""

    def __init__(self) -> None:
        self.num_steps = 0
        """Training batches mapped."""
        self.num_under_way = 0
        """Training batches that are to be."""
        self.next_look: int | None = None
        """The step of the next look at norms, where it is known."""
        self.last_said = threading.Event()
        """Whether the ranks have spoken of the last batch, if somebody asks."""
        self.last_said.set()
        self.values = (0, 0)
        """What is compared of rows, as it was when a batch was last looked up, to be said with the
        next, and how often the exchange had been opened."""
        self.time: int | None = None
        """To which the next training batch sets tables that evict by time; they keep it."""
        self.returned_time: int | None = None
        """The same of batches that came to nothing, or failed on a rank, unless a time was set
        since."""
        self.lock = threading.Lock()
        self.bytes_sent = 0


class HostDist(BaseSparseFeaturesDist[Any]):  # type: ignore[misc]
    """Sends ids to the ranks that have them and maps them, in the background.

    It has no attribute `_dist`, so torchrec's pipelines leave its collectives alone.
    """

    def __init__(self, config: HostDistConfig) -> None:
        super().__init__()
        self.config = config
        self._progress = _Progress()
        self.sends_weights_late = False
        """Whether weights are not known before the batch is looked up."""
        self.wants_outcomes = False
        """Whether to learn what became of each id of this rank's batches."""
        self.returns_keys = False
        """Whether results have the ids; for sequences."""
        self.equal_batches: list[tuple[int, ...]] = []
        """Groups of ranks whose batches must be of equal size."""
        self.results: ResultColumns | None = None
        """Where vectors are pooled to if bags are whole on their own rank; None: they are sent."""
        names = [table.name for table in config.layout.tables]
        self.tag = zlib.crc32("\n".join([*names, "", *config.layout.feature_names]).encode()) >> 1

    def forward(
        self, features: Any, context: HashShardingContext, training: bool
    ) -> Awaitable[Awaitable[MappedBatch]]:
        """Starts the work of a batch of this dist alone; see `start_batch`."""
        return start_batch([self], features, [context], training)[0]

    def job(self, features: Any, training: bool) -> _Job:
        """The work of a batch."""
        order = Order(
            source=features_on_host(features),
            training=training,
            sends_weights_late=self.sends_weights_late,
            wants_outcomes=self.wants_outcomes,
            results=self.results,
            time=self._take_time() if training else None,
            returns_keys=self.returns_keys,
        )
        return _Job(self, order, self._take_values() if training else 0)

    def start(self, job: _Job, context: HashShardingContext) -> Awaitable[Awaitable[MappedBatch]]:
        """Queues the work of a batch."""
        if job.training:
            self._begin(job)
        pending = self.config.group.exchange.submit(job)
        return Ready(_MappedAwaitable(pending, job.left, context, self.config.home.device))

    @property
    def num_steps(self) -> int:
        """Training batches mapped; the same on all ranks."""
        return self._progress.num_steps

    @property
    def bytes_sent(self) -> int:
        """To other ranks: ids, lengths and weights."""
        return self._progress.bytes_sent

    def take(self, *, bytes_sent: int = 0, steps: int = 0, under_way: int = 0) -> None:
        """Counts what a job has done."""
        progress = self._progress
        with progress.lock:
            progress.bytes_sent += bytes_sent
            progress.num_steps += steps
            progress.num_under_way += under_way

    def _begin(self, job: _Job) -> None:
        """Counts a batch that is to be trained; what was loaded since the last has other looks."""
        progress = self._progress
        if job.is_said is not None:
            progress.last_said = job.is_said
        with progress.lock:
            if progress.num_under_way == 0:
                progress.next_look = None
            progress.num_under_way += 1

    def note_looks(self, step: int, splits: Sequence[Splits]) -> None:
        """Takes from what the ranks said of the batch of a step when tables look at norms next."""
        waits = [each.look_in for each in splits if each.look_in is not None]
        with self._progress.lock:
            self._progress.next_look = step + min(waits) if waits else None

    def note_rows(self, sample: ReplicaSample) -> None:
        """Notes what the ranks compare of rows, as their batch is looked up."""
        self._progress.values = (sample.said(), self.config.group.exchange.num_opened)

    def set_time(self, time: int) -> None:
        """Sets the time for the next training batch."""
        self._progress.time = time

    def _take_time(self) -> int | None:
        progress = self._progress
        with progress.lock:
            time = progress.returned_time if progress.time is None else progress.time
            progress.time = progress.returned_time = None
        return time

    def give_back(self, time: int | None) -> None:
        """Keeps the time of a batch that came to nothing, or failed on a rank, for the next: of
        several, the last one's."""
        if time is not None:
            with self._progress.lock:
                self._progress.returned_time = time

    def _take_values(self) -> int:
        """What is to be said of rows: once, and not after a failure, as rows may be loaded then."""
        (values, num_opened), self._progress.values = self._progress.values, (0, 0)
        return values if num_opened == self.config.group.exchange.num_opened else 0

    def looks_next(self) -> bool:
        """Whether the next training batch begins with a look at norms of rows, on any rank.

        Those before it must have been trained when it is mapped. For the thread that submits; the
        same on all ranks. May wait until the last batch is mapped.
        """
        if not self.config.has_norms:
            return False
        progress = self._progress
        with progress.lock:
            is_known = progress.next_look is not None
        if not is_known:
            progress.last_said.wait()
        with progress.lock:
            return progress.next_look == progress.num_steps + progress.num_under_way + 1


def start_batch(
    dists: Sequence[HostDist],
    features: Any,
    contexts: Sequence[HashShardingContext],
    training: bool,
) -> list[Awaitable[Awaitable[MappedBatch]]]:
    """Starts the work of a batch in each dist of a collection.

    Of each result the first wait returns at once, the second gives the mapped batch. What is wrong
    with `features` is raised by the second of the first dist, and then none maps its part: all are
    prepared before any of them maps.
    """
    jobs = [dist.job(features, training) for dist in dists]
    for first in jobs[:1]:
        first.others = jobs[1:]
    triples = zip(dists, jobs, contexts, strict=True)
    return [dist.start(job, context) for dist, job, context in triples]


class _Left:
    """The leases of what a rank has mapped of a batch, in case that it fails here or elsewhere.

    They end with what waits for the batch: an error that nobody asks for keeps its job.
    """

    def __init__(self) -> None:
        self.leases: list[BatchLeases] = []
        self._is_dropped = False

    def take(self) -> list[BatchLeases]:
        """Those of now, which are no longer ended here."""
        taken = self.leases[:]
        del self.leases[: len(taken)]  # a job that goes on adds its own behind them
        return taken

    def drop(self) -> None:
        """Ends them, now or once the job has ended."""
        self._is_dropped = True
        self.end_if_dropped()

    def end_if_dropped(self) -> None:
        """Ends them if nobody waits for the batch."""
        if self._is_dropped:
            for each in self.leases:
                each.abandon()


_Done: TypeAlias = tuple[MappedBatch, Remainder]
"""What the work of a batch gives."""


class _Job(ExchangeJob[_Done]):
    """One batch of one sharding group, in the words of the exchange."""

    def __init__(self, owner: HostDist, order: Order, values: int = 0) -> None:
        self.training = order.training
        self.tag = owner.tag
        self.equal_batches = owner.equal_batches
        self._owner = owner
        self._order = order
        self._values = values
        self._time: int | None = None
        self._step = 0
        self._is_under_way = order.training
        self._is_mapped = False
        self._prepared: tuple[Splits, Alone | Prepared] | None = None
        self.left = _Left()
        self.others: Sequence[_Job] = ()
        """Those of the same batch that come after this one."""
        self.is_said = threading.Event() if owner.config.has_norms else None
        """What all ranks said of the batch is known, or never will be; None: nobody asks."""

    def step(self) -> int:
        return self._owner.num_steps + int(self.training)

    def prepare(self) -> tuple[Splits, Alone | Prepared]:
        prepared, self._prepared = self._prepared or self._prepare(), None
        for job in self.others:
            job._prepared = job._prepare()
        self.others = ()
        return prepared

    def _prepare(self) -> tuple[Splits, Alone | Prepared]:
        config = self._owner.config
        prepared = prepare(config, self._order)
        splits = prepared.splits
        if self.training and config.measured:
            waits = [table.steps_to_look(self.step()) for table in config.measured]
            splits = replace(splits, look_in=min(each for each in waits if each is not None))
        if self.training and config.layout.is_replicated:
            splits = replace(splits, decided=config.decided(), values=self._values)
        return splits, prepared

    def transfer(
        self, group: dist.ProcessGroup, splits: Sequence[Splits], prepared: Alone | Prepared
    ) -> Alone | Received:
        if self.is_said is not None and self.training:
            self._owner.note_looks(self.step(), splits)
            self.is_said.set()
        self._time = max((each.time for each in splits if each.time is not None), default=None)
        received = prepared.receive(group, splits)
        if received.bytes_sent:
            self._owner.take(bytes_sent=received.bytes_sent)
        self._step = self.step()
        if self.training:  # before mapping, which may fail on one rank alone
            self._is_under_way = False
            self._owner.take(steps=1, under_way=-1)
        return received

    def finish(self, received: Alone | Received) -> Mapped:
        with noting_lookups(self.left.leases):
            mapped = map_keys(received, self._step, self._time)
        self.left.leases.append(mapped.batch.in_flight)
        return mapped

    def end(self) -> None:
        if self._is_under_way:
            self._is_under_way = False
            self._owner.take(under_way=-1)
        if not self._is_mapped:
            self._owner.give_back(self._order.time)
        if self.is_said is not None:
            self.is_said.set()
        self.left.end_if_dropped()

    def answer(self, group: dist.ProcessGroup, splits: Sequence[Splits], found: Mapped) -> _Done:
        self._is_mapped = True  # on every rank
        remainder, bytes_sent = found.answer(group, splits)
        if bytes_sent:
            self._owner.take(bytes_sent=bytes_sent)
        return found.batch, remainder


class _MappedAwaitable(Unmarked[MappedBatch]):
    def __init__(
        self,
        pending: Pending[_Done],
        left: _Left,
        context: HashShardingContext,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._pending: Pending[_Done] | None = pending
        self._left = left
        self._context = context
        self._device = device

    def _wait_impl(self) -> MappedBatch:
        if self._pending is None:
            raise RuntimeError(
                "a batch is looked up once, and this one was before: the step of a pipeline that "
                "failed cannot be tried again; call reset() of the pipeline, which drops it"
            )
        pending, self._pending = self._pending, None
        try:
            batch, remainder = pending.result()
            self._left.take()
        except BaseException:
            leave_failed(self._left.take())
            raise
        finally:
            # Else an error's traceback keeps this frame, and so itself, alive; and, where a caller
            # waits for several batches, the leases of those that were mapped.
            del pending
        context, stream = self._context, stream_of(self._device)
        remainder.open()
        context.remainder = remainder
        batch.open()
        context.copied = None if stream is None else stream.record_event()
        return batch

    def drop(self) -> None:
        """Ends what was mapped of a batch that nobody waits for any more, now or once it is."""
        self._left.drop()

    def __del__(self) -> None:
        self.drop()
