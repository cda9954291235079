"""The host work of a batch, and what it is made of: a job of the host exchange.

Shape letters: N keys, F features, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsdk_core.nn.function import FeatureBags, TableBags
from recsdk_sharding._batch.arrivals import Arrivals
from recsdk_sharding._batch.assembly import Assembly, plan_segments
from recsdk_sharding._batch.features import (
    Features,
    Mapped,
    map_under_leases,
    mean_divisor,
    read_features,
)
from recsdk_sharding._batch.in_place import BagsOfAllRanks, CombinedKeys, WholeBags
from recsdk_sharding._batch.late_weights import LateWeights
from recsdk_sharding._batch.outcomes import of_repeated, outcomes_of_batch
from recsdk_sharding._batch.routing import Requests
from recsdk_sharding._batch.sequences import without_duplicates
from recsdk_sharding._rows.home import HeldShard, MappedBatch, RowHome
from recsdk_sharding._rows.rows import OwnedShard
from recsdk_sharding.exchange import ExchangeJob, HostExchange, Splits
from recsdk_sharding.placement.layout import GroupLayout, Route, Shard, TableLayout
from recsdk_sharding.placement.ranks import RankMap

if TYPE_CHECKING:
    from recsdk_sharding._batch.input_dist import HostDist

__all__ = ["HostDistConfig", "HostGroup", "HostJob", "Result"]


@dataclass(frozen=True)
class HostGroup:
    """The host side of one model's sharding."""

    exchange: HostExchange
    """Where the host jobs run."""
    ranks: RankMap
    """How many ranks there are, and the rule that spreads keys."""


@dataclass(frozen=True)
class HostDistConfig:
    """What the host work of one sharding group is made of."""

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
    multiple: int = 1
    """What the numbers for each rank have to be a multiple of."""


@dataclass
class Result:
    """What the work of a batch gives."""

    step: int
    batch: MappedBatch
    features: Features
    assembly: Assembly | None
    num_values_sent: list[int]
    late_weights: LateWeights | None
    device: torch.device
    outcomes: list[torch.Tensor] | None = None
    """What became of the keys of each of this rank's features, if it wants to know."""
    in_place: BagsOfAllRanks | None = None
    """What makes all ranks' gradients, if results are pooled at once on several ranks."""


class HostJob(ExchangeJob[Result]):
    """One batch of one sharding group."""

    def __init__(self, owner: HostDist, source: Any, training: bool) -> None:
        self.training = training
        self.tag = owner.tag
        self.equal_batches = owner.equal_batches
        self._owner = owner
        self._config = owner.config
        self._source = source
        self._is_late = owner.sends_weights_late or (
            owner.config.is_weighted and _requires_grad(source)
        )
        self._rank = owner.config.group.exchange.rank
        self._wants_outcomes = owner.wants_outcomes
        self._whole: WholeBags | None = None
        self._combined: CombinedKeys | None = None

    def step(self) -> int:
        return self._owner.num_steps + int(self.training)

    @torch.no_grad()
    def prepare(self) -> Splits:
        config = self._config
        has_weights = config.is_weighted and not self._owner.sends_weights_late
        features = read_features(self._source, config.layout.feature_names, has_weights)
        self._source = None
        if config.is_sequence:
            features = without_duplicates(features, config.drops_duplicates)
        self._features = features
        if self._owner.places is not None and not self._is_late and not features.bag_of_sample:
            is_alone = config.layout.world_size == 1
            if not is_alone and features.weights_N is not None:  # read in backward too
                features = replace(features, weights_N=features.weights_N.detach().clone())
            self._whole = WholeBags(self._owner.places, features)
            if is_alone:
                return Splits(batch_size=features.batch_size, wants_outcomes=self._wants_outcomes)
            self._combined = CombinedKeys(features)
        self._sent = self._requests()
        return Splits(
            batch_size=features.batch_size,
            counts=tuple(self._sent.num_words),
            sends_weights_late=self._is_late,
            combines_keys=self._combined is not None,
            wants_outcomes=self._wants_outcomes,
        )

    def _requests(self) -> Requests:
        config = self._config
        return Requests.of_features(
            self._features if self._combined is None else self._combined.features,
            config.layout,
            is_sequence=config.is_sequence or self._combined is not None,
            notes_positions=self._wants_outcomes or (config.is_weighted and self._combined is None),
        )

    def _plan(self, features: Features) -> Assembly:
        config = self._config
        divisors = None
        if any(config.is_mean) and not self._is_late:
            divisors = mean_divisor(features, config.is_mean).split_with_sizes(features.num_bags)
        segments = plan_segments(config.layout, self._sent, features.num_bags, self._rank)
        return Assembly(segments, divisors, config.multiple)

    def transfer(self, group: dist.ProcessGroup, splits: Sequence[Splits]) -> None:
        config = self._config
        if config.layout.world_size == 1 and self._whole is not None:
            return
        num_words = [entry.counts[self._rank] for entry in splits]
        combines = [entry.combines_keys for entry in splits]
        self._is_late = any(entry.sends_weights_late for entry in splits)
        if self._is_late and any(combines):  # the ranks learn only now that weights come late
            num_words, combines = self._send_all_keys(group), [False] * len(splits)
        sent = self._sent
        words = _all_to_all(group, sent.words, sent.num_words, num_words)
        self._arrived = Arrivals(
            words.split_with_sizes(num_words),
            [route for route in config.layout.routes if self._rank in route.ranks],
            [config.is_sequence or of_rank for of_rank in combines],
        )
        self._owner.bytes_sent += 8 * (sum(sent.num_words) - sent.num_words[self._rank])
        if config.is_weighted and not self._is_late and not all(combines):
            self._exchange_weights(group, combines)

    def _send_all_keys(self, group: dist.ProcessGroup) -> list[int]:
        """Has keys sent as they are, not combined; how many words each rank then sends here."""
        if self._combined is not None:
            self._whole, self._combined = None, None
            self._sent = self._requests()
        ones = [1] * len(self._sent.num_words)
        return _all_to_all(group, torch.tensor(self._sent.num_words), ones, ones).tolist()

    def _exchange_weights(self, group: dist.ProcessGroup, combines: Sequence[bool]) -> None:
        """Sends the weights of ids; ranks that combined keys have applied theirs."""
        sent = self._sent
        num_keys = self._arrived.num_keys
        counts = [0 if ready else n for ready, n in zip(combines, num_keys, strict=True)]
        own, sends = torch.zeros(0), [0] * len(counts)
        if self._combined is None:
            assert sent.positions is not None
            assert self._features.weights_N is not None
            own = self._features.weights_N.detach().index_select(0, sent.positions)
            sends = sent.num_keys
        weights = _all_to_all(group, own, sends, counts).split_with_sizes(counts)
        self._arrived.add_weights(
            [None if ready else part for ready, part in zip(combines, weights, strict=True)]
        )
        self._owner.bytes_sent += 4 * (sum(sends) - sends[self._rank])

    @torch.no_grad()
    def finish(self) -> Result:
        config = self._config
        step = self.step()
        self._owner.num_steps += int(self.training)
        shards = config.layout.shards_of(self._rank)
        routes = [config.layout.route_on(table, shard, self._rank) for table, shard in shards]
        places = [(route, table.features) for route, (table, _) in zip(routes, shards, strict=True)]
        alone = self._whole if config.layout.world_size == 1 else None
        calls = [
            (
                own.held.index,
                self._arrived.keys_of(*place) if alone is None else alone.keys_of(place[1]),
            )
            for own, place in zip(config.shards, places, strict=True)
        ]
        mapped = map_under_leases(calls, insert=self.training, step=step if self.training else None)
        try:
            return self._result(step, shards, places, mapped)
        except BaseException:
            for _, _, lease in mapped:  # the traceback would keep them open
                lease.release()
            raise

    def _result(
        self,
        step: int,
        shards: Sequence[tuple[TableLayout, Shard]],
        places: Sequence[tuple[Route, Sequence[int]]],
        mapped: Mapped,
    ) -> Result:
        config = self._config
        self._found = [(*place, found[1]) for place, found in zip(places, mapped, strict=True)]
        alone = self._whole if config.layout.world_size == 1 else None
        if alone is not None:
            features = [
                alone.of_shard(table.features, rows, outcomes, shard.columns[0])
                for (table, shard), (rows, outcomes, _) in zip(shards, mapped, strict=True)
            ]
            return self._result_in_place(step, alone, features, mapped)
        widths = [shard.width for _, shard in shards]
        starts = self._arrived.starts_of(places, widths, config.multiple)
        if self._whole is not None:
            assert self._combined is not None
            bags = BagsOfAllRanks(self._whole, self._combined, self._arrived, starts, self._rank)
            features = [
                bags.of_shard(*place, found, width)
                for place, found, width in zip(places, mapped, widths, strict=True)
            ]
            return self._result_in_place(step, bags, features, mapped)
        reads_only = self._rank if config.layout.is_replicated else None
        features = [
            self._arrived.bags_of(*place, found, start, reads_only)
            for place, found, start in zip(places, mapped, starts.of_shards, strict=True)
        ]
        weight_starts = None
        if self._is_late:
            weight_starts = [self._arrived.weight_starts_of(*place) for place in places]
        return Result(
            step=step,
            batch=config.home.plan(
                self._held,
                self._tables(features, mapped),
                sum(starts.num_values),
                training=self.training,
                weight_starts=weight_starts,
            ),
            features=self._features,
            assembly=self._plan(self._features),
            num_values_sent=starts.num_values,
            late_weights=self._late_weights() if self._is_late else None,
            device=config.home.device,
        )

    @torch.no_grad()
    def answer(self, group: dist.ProcessGroup, splits: Sequence[Splits], result: Result) -> None:
        wanted = [entry.wants_outcomes for entry in splits]
        if not any(wanted):
            return
        if self._config.layout.world_size == 1 and self._whole is not None:
            result.outcomes = self._whole.outcomes_of(self._found)
            return
        if self._config.layout.is_replicated:  # each rank knows what became of its own keys
            wanted = [of_rank and rank == self._rank for rank, of_rank in enumerate(wanted)]
        pairs = zip(self._arrived.outcomes_of(self._found), wanted, strict=True)
        sent = [found if of_rank else found[:0] for found, of_rank in pairs]
        places = self._places_of_answers()
        numbers = [list(map(len, sent)), list(map(len, places))]
        received = _all_to_all(group, torch.cat(sent), *numbers)
        self._owner.bytes_sent += sum(numbers[0]) - numbers[0][self._rank]
        if self._wants_outcomes:
            result.outcomes = self._outcomes_of_features(torch.cat(places), received)

    def _places_of_answers(self) -> list[torch.Tensor]:
        """Which of this rank's keys each rank tells the outcome of."""
        positions = self._sent.positions
        if not self._wants_outcomes or positions is None:
            return [torch.zeros(0, dtype=torch.int64)] * self._config.layout.world_size
        places = positions.split_with_sizes(self._sent.num_keys)
        if not self._config.layout.is_replicated:
            return list(places)
        return [each if rank == self._rank else each[:0] for rank, each in enumerate(places)]

    def _outcomes_of_features(
        self, places: torch.Tensor, outcomes: torch.Tensor
    ) -> list[torch.Tensor]:
        features, which = self._features, None
        counts = features.num_bags
        if self._combined is not None:
            features, which = self._combined.features, self._combined.which
            counts = features.num_bags
        elif self._config.is_sequence:
            which = features.bag_of_sample
        else:
            counts = features.counts()
        parts = outcomes_of_batch(sum(counts), places, outcomes).split_with_sizes(counts)
        if which is None:
            return list(parts)
        return [of_repeated(*pair) for pair in zip(parts, which, strict=True)]

    def _result_in_place(
        self,
        step: int,
        bags: WholeBags | BagsOfAllRanks,
        features: Sequence[list[FeatureBags]],
        mapped: Mapped,
    ) -> Result:
        tables, home = self._tables(features, mapped), self._config.home
        return Result(
            step=step,
            batch=home.plan(self._held, tables, 0, training=self.training, shape=bags.shape),
            features=self._features,
            assembly=None,
            num_values_sent=[],
            late_weights=None,
            device=home.device,
            in_place=bags if isinstance(bags, BagsOfAllRanks) else None,
        )

    @property
    def _held(self) -> list[HeldShard]:
        return [shard.held for shard in self._config.shards]

    def _tables(self, features: Sequence[list[FeatureBags]], mapped: Mapped) -> list[TableBags]:
        return [
            TableBags(
                table=own.held.index, features=bags, lease=lease, accumulation=own.accumulation
            )
            for own, bags, (_, _, lease) in zip(self._config.shards, features, mapped, strict=True)
        ]

    def _late_weights(self) -> LateWeights:
        config = self._config
        return LateWeights(
            self._features,
            self._sent,
            self._arrived.num_keys,
            is_mean=config.is_mean,
            own_rank=self._rank if config.layout.is_replicated else None,
            device=config.home.device,
        )


def _requires_grad(source: Any) -> bool:
    weights = source.weights_or_none() if isinstance(source, KeyedJaggedTensor) else None
    return weights is not None and weights.requires_grad


def _all_to_all(
    group: dist.ProcessGroup, sent: torch.Tensor, sends: list[int], receives: list[int]
) -> torch.Tensor:
    if len(sends) == 1:
        return sent
    received = sent.new_empty(sum(receives))
    dist.all_to_all_single(received, sent.contiguous(), receives, sends, group=group)
    return received
