"""The host work of a batch: send each id to the rank that owns it, and map it to a row there.

It stands where torchrec has an input dist, and runs in the background as one job of the host
exchange, so that any torchrec pipeline overlaps it with training.

Shape letters: N keys, F features, B batch, W ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torchrec.distributed.embedding_sharding import BaseSparseFeaturesDist, EmbeddingShardingContext
from torchrec.distributed.types import Awaitable
from torchrec.streamable import Multistreamable

from recsdk_core.nn.function import TableBags
from recsdk_sharding.exchange import ExchangeJob, HostExchange, Splits
from recsdk_sharding.features import Features, TableInput, map_features, read_features
from recsdk_sharding.ranks import RankMap

__all__ = ["HashShardingContext", "HostDist", "HostGroup", "MappedBatch"]


@dataclass(frozen=True)
class HostGroup:
    """The host side of one model's sharding."""

    exchange: HostExchange
    """Where the host jobs run."""
    ranks: RankMap
    """Which rank owns a key."""


@dataclass
class HashShardingContext(EmbeddingShardingContext):  # type: ignore[misc]
    """What the output dist of a batch needs to know of its input dist."""

    divisor_BF: torch.Tensor | None = None
    """float32 (B, F): what to divide the pooled vectors by; None: nothing is a mean."""


@dataclass
class MappedBatch(Multistreamable):  # type: ignore[misc]
    """The bags that this rank pools for all ranks, mapped to its rows."""

    tables: list[TableBags]
    """Bags of every table, those of rank 0's samples first."""
    batch_sizes: list[int]
    """Samples of each rank, W numbers."""
    divisor_BF: torch.Tensor | None
    """As in `HashShardingContext`, of this rank's samples."""
    training: bool
    """Whether ids without a row got one."""

    def record_stream(self, stream: torch.Stream) -> None:
        """Does nothing: all of it is on the host."""

    def variable_stride_per_key(self) -> bool:
        """False, in torchrec's words: every feature has the same batch size."""
        return False


@dataclass(frozen=True)
class HostDistConfig:
    """What the host work of one sharding group is made of."""

    group: HostGroup
    """The exchange and the rule for ranks."""
    feature_names: list[str]
    """Features in the order of the group's tables."""
    is_mean: list[bool]
    """Whether each feature's bags are averaged."""
    is_weighted: bool
    """Whether ids carry weights."""
    inputs: list[TableInput]
    """What each table reads. Pooling here is "sum": the mean is taken over all ranks' parts."""


class HostDist(BaseSparseFeaturesDist[Any]):  # type: ignore[misc]
    """Sends ids to their owners and maps them, in the background.

    It has no attribute `_dist`, so torchrec's pipelines leave its collectives alone.
    """

    def __init__(self, config: HostDistConfig) -> None:
        super().__init__()
        self.config = config
        self.num_steps = 0  # training batches exchanged; the same on all ranks
        self.tag = zlib.crc32("\n".join(config.feature_names).encode()) >> 1

    def forward(self, features: Any, context: HashShardingContext, training: bool) -> HostAwaitable:
        """Starts the work; what is wrong with `features` is raised by the second wait."""
        job = _RowWiseJob(self, features, training)
        return HostAwaitable(self.config.group.exchange.submit(job), context)


class HostAwaitable(Awaitable[Awaitable[MappedBatch]]):  # type: ignore[misc]
    """The first wait returns at once, the second gives the mapped batch."""

    def __init__(self, future: Future[MappedBatch], context: HashShardingContext) -> None:
        super().__init__()
        self._mapped = _MappedAwaitable(future, context)

    def _wait_impl(self) -> Awaitable[MappedBatch]:
        return self._mapped


class _MappedAwaitable(Awaitable[MappedBatch]):  # type: ignore[misc]
    def __init__(self, future: Future[MappedBatch], context: HashShardingContext) -> None:
        super().__init__()
        self._future = future
        self._context = context

    def _wait_impl(self) -> MappedBatch:
        mapped = self._future.result()
        self._context.batch_size_per_rank = mapped.batch_sizes
        self._context.divisor_BF = mapped.divisor_BF
        return mapped


class _RowWiseJob(ExchangeJob[MappedBatch]):
    """One batch of one sharding group."""

    def __init__(self, owner: HostDist, source: Any, training: bool) -> None:
        self.training = training
        self.tag = owner.tag
        self._owner = owner
        self._config = owner.config
        self._source = source
        self._divisor_BF: torch.Tensor | None = None

    def step(self) -> int:
        return self._owner.num_steps + int(self.training)

    @torch.no_grad()
    def prepare(self) -> Splits:
        config = self._config
        features = read_features(self._source, config.feature_names, config.is_weighted)
        self._source = None
        if any(config.is_mean):
            self._divisor_BF = _divisor(features, config.is_mean)
        self._sent = _Bucketized.of_features(features, config.group.ranks)
        return Splits(batch_size=features.batch_size, counts=self._sent.counts)

    def transfer(self, group: dist.ProcessGroup, splits: Sequence[Splits]) -> None:
        rank = dist.get_rank(group)
        self._batch_sizes = [entry.batch_size for entry in splits]
        self._counts = [entry.counts[rank] for entry in splits]
        num_features = len(self._config.feature_names)
        num_words = [
            num_features * size + count
            for size, count in zip(self._batch_sizes, self._counts, strict=True)
        ]
        self._words = _all_to_all(group, self._sent.words, self._sent.num_words, num_words)
        self._weights: torch.Tensor | None = None
        if self._sent.weights is not None:
            self._weights = _all_to_all(
                group, self._sent.weights, list(self._sent.counts), self._counts
            )

    @torch.no_grad()
    def finish(self) -> MappedBatch:
        step = self.step()
        self._owner.num_steps += int(self.training)
        features = self._received()
        tables = map_features(
            self._config.inputs,
            features,
            insert=self.training,
            step=step if self.training else None,
        )
        return MappedBatch(tables, self._batch_sizes, self._divisor_BF, self.training)

    def _received(self) -> Features:
        """What all ranks sent: feature by feature, rank by rank, in the order of their batches."""
        num_features = len(self._config.feature_names)
        lengths, keys, weights = [], [], []
        start = first = 0
        for size, count in zip(self._batch_sizes, self._counts, strict=True):
            middle = start + num_features * size
            lengths_FB = self._words[start:middle].view(num_features, size)
            per_feature = lengths_FB.sum(1).tolist()
            lengths.append(lengths_FB)
            keys.append(self._words[middle : middle + count].split_with_sizes(per_feature))
            if self._weights is not None:
                weights.append(self._weights[first : first + count].split_with_sizes(per_feature))
            start, first = middle + count, first + count
        return Features(
            _by_feature(keys),
            torch.cat(lengths, dim=1),
            _by_feature(weights) if self._weights is not None else None,
        )


def _by_feature(parts: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """Joins parts that lie rank by rank and feature by feature, feature by feature first."""
    return torch.cat([part for of_ranks in zip(*parts, strict=True) for part in of_ranks])


def _divisor(features: Features, is_mean: Sequence[bool]) -> torch.Tensor:
    """What to divide sums by, float32 (B, F): the mean's count or sum of weights, else 1.

    Infinite where that is 0, so that both the mean and its gradient are 0.
    """
    divisor_FB = features.lengths_FB.to(torch.float32)
    if features.weights_N is not None:
        bag_N = torch.repeat_interleave(features.lengths_FB.flatten())
        sums = torch.zeros(divisor_FB.numel()).index_add_(0, bag_N, features.weights_N)
        divisor_FB = sums.view_as(divisor_FB)
    divisor_FB = divisor_FB.masked_fill(divisor_FB == 0, torch.inf)
    divisor_FB[~torch.tensor(is_mean)] = 1.0
    return divisor_FB.T.contiguous()


@dataclass(frozen=True)
class _Bucketized:
    """Features as they are sent: for each rank its bags' lengths (F * B), then its keys."""

    words: torch.Tensor
    """int64."""
    num_words: list[int]
    """Words for each rank."""
    counts: tuple[int, ...]
    """Keys for each rank."""
    weights: torch.Tensor | None
    """float32 (N,): the weights of the keys, in the same order."""

    @staticmethod
    def of_features(features: Features, ranks: RankMap) -> _Bucketized:
        """Cuts the bags by owner; within a rank the order of the input is kept."""
        lengths = features.lengths_FB.flatten().numpy()
        keys = features.keys_N.numpy()
        owners = ranks.owners(keys)
        order = np.argsort(owners.astype(np.uint16), kind="stable")
        lengths_WFB = _lengths_per_rank(owners, lengths, ranks.world_size)
        counts = np.bincount(owners, minlength=ranks.world_size)
        parts = np.split(keys[order], np.cumsum(counts)[:-1])
        words = np.concatenate(
            [half for pair in zip(lengths_WFB, parts, strict=True) for half in pair]
        )
        weights = features.weights_N
        return _Bucketized(
            words=torch.from_numpy(words),
            num_words=[len(lengths) + int(count) for count in counts],
            counts=tuple(counts.tolist()),
            weights=None if weights is None else weights[torch.from_numpy(order)],
        )


def _lengths_per_rank(
    owners: NDArray[np.int64], lengths: NDArray[np.int64], world_size: int
) -> NDArray[np.int64]:
    """How many keys of each bag go to each rank, int64 (W, F * B)."""
    num_bags = len(lengths)
    bag_N = np.repeat(np.arange(num_bags), lengths)
    flat = np.bincount(owners * num_bags + bag_N, minlength=world_size * num_bags)
    return flat.reshape(world_size, num_bags)


def _all_to_all(
    group: dist.ProcessGroup, sent: torch.Tensor, sends: list[int], receives: list[int]
) -> torch.Tensor:
    received = sent.new_empty(sum(receives))
    dist.all_to_all_single(received, sent.contiguous(), receives, sends, group=group)
    return received
