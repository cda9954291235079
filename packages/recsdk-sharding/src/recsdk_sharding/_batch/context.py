"""What the host work of batches takes, and what it leaves for the results of a batch.

Shape letters: N keys, F features, C columns, T shards of this rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext

from recsdk_core import Index, Table
from recsdk_sharding._batch.assembly import Assembly
from recsdk_sharding._batch.features import Features
from recsdk_sharding._batch.late_weights import LateWeights
from recsdk_sharding._batch.repeats import SampleBags
from recsdk_sharding._batch.row_sample import ReplicaSample
from recsdk_sharding._batch.sequences import SentSamples
from recsdk_sharding._configs.data_taken import evicts_by_time
from recsdk_sharding._rows.home import RowHome, RowTable, ShardGroup
from recsdk_sharding._rows.rows import OwnedShard
from recsdk_sharding.exchange import HostExchange
from recsdk_sharding.exchange.shared_memory import SharedMemory
from recsdk_sharding.placement.layout import Arriving, GroupLayout, ShardFeatures
from recsdk_sharding.placement.ranks import RankMap

__all__ = [
    "HashShardingContext",
    "HostDistConfig",
    "HostGroup",
    "Order",
    "Remainder",
    "ResultColumns",
]


@dataclass(frozen=True)
class HostGroup:
    """The host side of one model's sharding."""

    exchange: HostExchange
    """Where the host jobs run."""
    ranks: RankMap
    """How many ranks there are, and the rule that spreads keys."""


@dataclass(frozen=True)
class HostDistConfig:
    """What the host work of one sharding group takes."""

    group: HostGroup
    """The exchange and the rule for ranks."""
    layout: GroupLayout
    """Where the tables are."""
    home: RowHome
    """Where the rows are, and results are put together."""
    shards: list[OwnedShard]
    """Those that this rank has, in the order of the layout."""
    is_mean: list[bool]
    """Whether each feature's bags are averaged. Ranks add up; means are taken at the end."""
    is_weighted: bool = False
    """Whether ids carry weights."""
    is_sequence: bool = False
    """Whether every id gets a vector of its own."""
    drops_duplicates: bool = False
    """Whether an id that a feature has several times is sent once; for sequences."""
    sends_every_id: bool = False
    """Whether each occurrence of an id is sent: a table's rule counts them, or its new rows begin
    with shared ones when they are read, which every rank that has the table has to do alike."""
    takes: tuple[str, ...] = ()
    """What rules of the group's tables take of what comes with keys, by name of `KeyData`."""
    needs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """What keys must bring, and the rule that needs it, by the group's tables."""
    has_norms: bool = False
    """Whether a table of the group, on any rank, evicts by the norms of rows."""
    multiple: int = 1
    """What the numbers for each rank have to be a multiple of."""
    memory: SharedMemory | None = None
    """That the ranks share, where vectors are pooled to; None: they are sent."""

    @cached_property
    def rank(self) -> int:
        """This rank."""
        return self.group.exchange.rank

    @cached_property
    def indexes(self) -> list[Table | Index]:
        """What maps the keys of each shard."""
        return [own.held.index for own in self.shards]

    @cached_property
    def shard_group(self) -> ShardGroup:
        """The shards, for their home."""
        own = self.shards
        return ShardGroup([each.held for each in own], [each.accumulation for each in own])

    @cached_property
    def timed(self) -> list[tuple[int, RowTable]]:
        """The shards that evict by time: which they are, and their tables."""
        each = enumerate(self.indexes)
        return [(i, self.shards[i].table) for i, own in each if evicts_by_time(own.eviction)]

    @cached_property
    def measured(self) -> list[Table | Index]:
        """Those that evict by the norms of rows."""
        each = self.indexes
        return [own for own in each if own.eviction and own.eviction.order == "low_norm"]

    def decided(self) -> int:
        """What the shards' tables have decided, as a number of 32 bits."""
        return zlib.crc32(repr([own.decided() for own in self.indexes]).encode())

    @cached_property
    def compares_rows(self) -> bool:
        """Whether the ranks compare the shards' tables, which all of them hold: their rows, or how
        these are updated."""
        return self.layout.is_replicated and self.layout.world_size > 1

    @cached_property
    def features(self) -> ShardFeatures:
        """The features of the shards, shard by shard."""
        return self.layout.features_on(self.rank)

    @cached_property
    def arriving(self) -> Arriving:
        """What all ranks send to this one."""
        return self.layout.arriving_at(self.rank)

    @cached_property
    def num_features_T(self) -> NDArray[np.int64]:
        """Of each shard."""
        held = self.layout.shards_of(self.rank)
        return np.array([len(table.features) for table, _ in held], np.int64)

    @cached_property
    def num_pieces_T(self) -> NDArray[np.int64]:
        """Pieces of keys of each shard: of each of its features what each rank sends."""
        return self.num_features_T * self.layout.world_size


@dataclass(frozen=True)
class ResultColumns:
    """Where the vectors of one group's features go, if it is a module's only one."""

    columns_F: NDArray[np.int64]
    """First column of each of the group's features."""
    num_columns: int
    """C."""
    is_mean_F: NDArray[np.bool_]
    """Whether each feature's bags are averaged."""
    swap: Callable[[torch.Tensor, Sequence[int]], list[torch.Tensor]]
    """Gives the gradients of all ranks for this one's, where every rank has the tables."""


@dataclass(frozen=True)
class Order:
    """A batch whose host work is wanted."""

    source: Any
    """Its ids, on the host."""
    training: bool
    """Whether it is trained."""
    sends_weights_late: bool
    """Whether weights are not known before the batch is looked up."""
    wants_outcomes: bool
    """Whether to learn what became of each id."""
    results: ResultColumns | None
    """Where vectors are pooled to if bags are whole on their own rank; None: they are sent."""
    time: int | None = None
    """Its time, for tables that evict by time."""
    returns_keys: bool = False
    """Whether results have the ids; for sequences."""


@dataclass(frozen=True)
class Remainder:
    """What the results of a batch need beside its mapped bags."""

    step: int
    """The step of the batch."""
    features: Features
    """This rank's batch."""
    assembly: Assembly | None = None
    """How this rank's results are made of what ranks send; None: they are made at once."""
    num_values_sent: list[int] = field(default_factory=list)
    """Numbers that this rank sends to each rank."""
    late_weights: LateWeights | None = None
    """How weights travel when the batch is looked up; None: they came with the ids, if any."""
    samples: SampleBags | None = None
    """The bag of each sample; None: bag b is that of sample b."""
    sent_samples: SentSamples | None = None
    """Lengths of each feature's samples, of sequences."""
    outcomes: list[torch.Tensor] | None = None
    """What became of the ids of each of the group's features, uint8 (N,), if it was wanted."""
    sample: ReplicaSample | None = None
    """What the ranks compare, of tables that all of them hold; None: nothing."""

    def open(self) -> None:
        """Makes it usable for work on the current stream; starts copies on it."""
        for part in self._parts:
            if part is not None:
                part.open()

    def record_stream(self, stream: torch.Stream) -> None:
        """Tells the allocator that work on the stream uses the device memory."""
        for part in self._parts:
            if part is not None:
                part.record_stream(stream)

    @property
    def _parts(self) -> tuple[Assembly | LateWeights | SampleBags | SentSamples | None, ...]:
        """What has memory on the device."""
        return self.assembly, self.late_weights, self.samples, self.sent_samples


@dataclass
class HashShardingContext(EmbeddingShardingContext):  # type: ignore[misc]
    """One batch of one sharding group; filled when its host work is done."""

    is_training: bool = False
    """Whether its ids were sent to be trained."""
    own_weights: torch.Tensor | None = None
    """The weights of the batch's ids as they were given, with their autograd graph."""
    remainder: Remainder | None = None
    """What the host work left."""
    copied: torch.Event | None = None
    """Where the batch's copies to the device end, in the stream that they are on; None: on the cpu.

    torchrec's pipelines may look a batch up on another stream, without a wait between the two."""

    @property
    def done(self) -> Remainder:
        """What the host work left, which is done."""
        assert self.remainder is not None
        return self.remainder

    def record_stream(self, stream: torch.Stream) -> None:
        """Tells the allocator that work on the stream uses the device memory."""
        if self.remainder is not None:
            self.remainder.record_stream(stream)
