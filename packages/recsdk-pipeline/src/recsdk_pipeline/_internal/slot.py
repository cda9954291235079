"""One batch on its way through the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist
from torchrec.distributed.types import Awaitable, ShardedModule

from recsdk_core.batch_leases import BatchLeases, noting_lookups
from recsdk_pipeline._internal.clicks import with_clicks_of
from recsdk_pipeline._internal.feeds import Feed
from recsdk_pipeline._internal.streams import SideStream
from recsdk_sharding.exchange import ExchangeJob, HostExchange, Pending, Splits

_NOTHING = object()


class _Presence(ExchangeJob[None]):
    """Says that this rank has a batch, and moves nothing."""

    training = False
    tag = 0

    def step(self) -> int:
        return 0

    def prepare(self) -> tuple[Splits, None]:
        return Splits(), None

    def transfer(self, group: dist.ProcessGroup, splits: Sequence[Splits], prepared: None) -> None:
        pass

    def finish(self, received: None) -> None:
        pass


@dataclass
class Request:
    """The input exchange of one sharded module for one batch."""

    feed: Feed
    context: Any
    awaitable: Awaitable[Any]
    is_under_way: bool = False
    """Whether the first wait is done: sizes are known and data moves."""
    result: Any = _NOTHING

    def get_under_way(self) -> None:
        """Start moving the data."""
        if not self.is_under_way:
            self.is_under_way = True
            self.awaitable = self.awaitable.wait()

    def get(self) -> Any:
        """Return the module's input, waiting for it."""
        self.get_under_way()
        if self.result is _NOTHING:
            self.result = self.awaitable.wait()
        return self.result


@dataclass
class Slot:
    """A batch fetched ahead, and the requests started for it.

    Requests of stock modules are collectives that a rank without this batch would not join. So they
    start only when the host exchanges say that all ranks have the batch.
    """

    host_batch: Any
    batch: Any
    is_training: bool
    num_trained: int
    """Batches that had been trained when its host work began."""
    requests: list[Request] = field(default_factory=list)
    presence: list[tuple[HostExchange, Pending[None]]] = field(default_factory=list)
    """Tells whether all ranks have the batch, if no request does."""
    waiting: list[Feed] = field(default_factory=list)
    """Stock modules whose requests have not started."""
    error: Exception | None = None
    """What went wrong on the way; raised when it is this batch's turn."""
    position: bytes | None = None
    """Where the data is after this batch, if it can tell."""
    mark: Any = None
    is_settled: bool = False
    looked_up: list[BatchLeases] = field(default_factory=list)
    """Of the tables, once the model has looked the batch up, or it has failed before."""

    def start(self, feeds: Sequence[Feed], exchanges: Sequence[HostExchange]) -> None:
        """Hand the batch's parts to the hash modules; without any, to the stock modules."""
        for feed in feeds:
            if feed.exchange is None and exchanges:
                self.waiting.append(feed)
            else:
                self._request(feed)
        told = [request.feed.exchange for request in self.requests]
        self.presence = [(e, e.submit(_Presence())) for e in exchanges if e not in told]

    def start_stock(self, stream: SideStream) -> None:
        """Hand the batch's parts to the stock modules, once all ranks are known to have it."""
        if not self.waiting:
            return
        feeds, self.waiting = self.waiting, []
        with stream.use():
            self._wait()
            for feed in feeds:
                if self.error is None:
                    self._try(partial(self._request, feed))
            self.mark = stream.mark()

    def _request(self, feed: Feed) -> None:
        source = self.batch if feed.exchange is None else self.host_batch
        context = feed.module.create_context()
        part = feed.part_of(source)
        if feed.takes_clicks:
            part = with_clicks_of(source, part)
        awaitable = feed.module.input_dist(context, part)
        self.requests.append(Request(feed, context, awaitable))

    def _wait_for_host(self) -> None:
        for _, pending in self.presence:
            self._try(pending.result)
        for request in self.requests:
            if request.feed.exchange is not None:
                self._try(request.get)

    def _wait(self) -> None:
        self._wait_for_host()
        for request in self.requests:
            if request.feed.exchange is None:
                self._try(request.get)

    @classmethod
    def failed(cls, error: Exception) -> Slot:
        """Stand for a batch that could not be fetched or started."""
        return cls(None, None, is_training=False, num_trained=0, error=error)

    def get_under_way(self) -> None:
        """Do what all ranks have to do before data of this batch can move."""
        for request in self.requests:
            self._try(request.get_under_way)

    def wait_for_host(self, stream: SideStream) -> None:
        """Wait for what has been submitted to the host exchanges, and submit or exchange nothing.

        So one rank may do it alone. The first error is kept for later.
        """
        with stream.use():
            self._wait_for_host()
            self.mark = stream.mark()

    def settle(self, stream: SideStream) -> None:
        """Wait for all requests; the first error is kept for later."""
        if self.is_settled:
            return
        self.is_settled = True
        self.start_stock(stream)
        with stream.use():
            self._wait()
            self.mark = stream.mark()

    def abandon(self) -> None:
        """Ends what the batch holds of the tables, also where a traceback keeps it."""
        for request in self.requests:
            if request.feed.exchange is not None and request.result is not _NOTHING:
                self.looked_up += [batch.in_flight for batch in request.result]
        for leases in self.looked_up:
            leases.abandon()
        self.requests, self.presence = [], []  # what was not waited for ends with its awaitable

    def check_mode(self, is_training: bool) -> None:
        """Refuse to evaluate a batch fetched ahead for training, and the other way round."""
        if self.requests and self.is_training != is_training:
            fetched, now = ("train", "eval") if self.is_training else ("eval", "train")
            raise RuntimeError(
                f"this batch was fetched ahead in {fetched} mode, and the model is now in {now} "
                "mode; pass another iterator to progress() when you switch modes"
            )

    def hand_over(self, stream: SideStream) -> None:
        """Let the compute stream use the batch and the requests' results."""
        inputs = [part for request in self.requests for part in (request.context, request.get())]
        stream.hand_over(self.mark, self.batch, *inputs)

    @contextmanager
    def feeding(self) -> Iterator[None]:
        """Inside, the sharded modules answer from this batch's requests."""
        for request in self.requests:
            request.feed.module.forward = self._answer(request)
        try:
            yield
        finally:
            for request in self.requests:
                del request.feed.module.forward

    def _answer(self, request: Request) -> Callable[..., Any]:
        feed = request.feed
        module: ShardedModule[Any, Any, Any, Any] = feed.module

        def forward(*args: Any, **kwargs: Any) -> Any:
            given = (*args, *kwargs.values())
            if len(given) != 1 or given[0] is not feed.part_of(self.batch):
                raise RuntimeError(
                    f"module {feed.name!r} was given another input than on the first batch; a "
                    "model under this pipeline must hand the same field of each batch to it"
                )
            return module.compute_and_output_dist(request.context, request.get())

        return forward

    def _try(self, work: Callable[[], Any]) -> None:
        try:
            with noting_lookups(self.looked_up):
                work()
        except Exception as error:
            self.error = self.error or error
