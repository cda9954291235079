"""Mapping and reading a batch of tables that are all on this process.

Shape letters: N keys, B samples, C columns, D width of a feature's vectors, G bags of a feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate, pairwise

import torch
from torchrec.modules.embedding_configs import PoolingType

from recsdk_core.nn.function import FeatureBags
from recsdk_sharding._batch.features import Features, map_under_leases, mean_divisor
from recsdk_sharding._batch.repeats import of_samples
from recsdk_sharding._rows.home import PoolRequest, ShardBags
from recsdk_sharding._rows.rows import TableRows, anchor_of

__all__ = ["LocalBatch"]


class LocalBatch:
    """A batch of all features of some whole tables, mapped to their rows."""

    def __init__(
        self,
        rows: Sequence[TableRows],
        features: Features,
        *,
        step: int | None,
        is_sequence: bool,
    ) -> None:
        """Maps the keys; with a `step` those without a row get one.

        `features` are those of the tables, in their order. In a sequence every key is a bag.
        """
        self._rows = list(rows)
        self._features = features
        self._home = self._rows[0].home
        self._step = step
        self._widths = [r.config.embedding_dim for r in rows for _ in r.config.feature_names]
        self._is_mean = [
            not is_sequence and r.config.pooling == PoolingType.MEAN  # type: ignore[attr-defined]
            for r in rows
            for _ in r.config.feature_names
        ]
        counts = features.num_bags if is_sequence else features.counts
        self._is_sequence = is_sequence
        is_late = self._learning_weights() is not None
        home = self._home
        self._averages = home.averages_late_weights if is_late else home.pools_to_results
        """Whether means are taken where rows are pooled."""
        self._mapped = self._map(counts)

    def _map(self, counts: list[int]) -> list[ShardBags]:
        keys = self._features.keys_N.split_with_sizes(counts)
        spans = list(accumulate((len(r.config.feature_names) for r in self._rows), initial=0))
        shards = [rows.shards[0] for rows in self._rows]
        calls = [
            (shard.held.index, torch.cat(keys[first:last]))
            for shard, first, last in zip(shards, spans[:-1], spans[1:], strict=True)
        ]
        mapped = map_under_leases(calls, insert=self._step is not None, step=self._step)
        try:
            return [
                ShardBags(
                    shard.held,
                    self._bags(rows, outcomes, counts[first:last], first),
                    lease,
                    shard.accumulation,
                )
                for shard, (rows, outcomes, lease), first, last in zip(
                    shards, mapped, spans[:-1], spans[1:], strict=True
                )
            ]
        except BaseException:
            for _, _, lease in mapped:  # the traceback would keep them open
                lease.release()
            raise

    def _bags(
        self, rows_N: torch.Tensor, outcomes_N: torch.Tensor, counts: list[int], first: int
    ) -> list[FeatureBags]:
        """The bags of a table's features, which are those from `first` on."""
        weights = self._features.weights_N
        before = sum(self._features.counts[:first]) if weights is not None else 0
        parts = zip(
            rows_N.split_with_sizes(counts),
            outcomes_N.split_with_sizes(counts),
            counts,
            strict=True,
        )
        if self._learning_weights() is not None:
            weights = None  # the batch takes them with their graph
        made = []
        for number, (rows, outcomes, count) in enumerate(parts, start=first):
            averages = self._is_mean[number] and self._averages
            made.append(
                FeatureBags(
                    rows=rows,
                    outcomes=outcomes,
                    offsets=self._offsets(number),
                    weights=None if weights is None else weights[before : before + count],
                    pooling="mean" if averages else "sum",
                )
            )
            before += count
        return made

    def _offsets(self, number: int) -> torch.Tensor | None:
        if self._is_sequence:
            return None
        first = sum(self._features.num_bags[:number])
        lengths = self._features.lengths_G.narrow(0, first, self._features.num_bags[number])
        return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))

    def outcomes(self) -> list[torch.Tensor]:
        """What became of each feature's keys, uint8 (N,): copies, as backward reads its own."""
        return [feature.outcomes.clone() for table in self._mapped for feature in table.features]

    def pooled(self) -> torch.Tensor:
        """The pooled vectors of all samples, float32 (B, C)."""
        bags = self._features.bag_of_sample
        is_whole = self._averages or not any(self._is_mean)
        if bags is None and is_whole and self._home.pools_to_results:
            starts = list(accumulate(self._widths, initial=0))
            return self._pool(starts, shape=(self._features.batch_size, starts[-1]))
        parts = self.separate()
        return torch.cat(parts if bags is None else of_samples(parts, bags), dim=1)

    def separate(self) -> list[torch.Tensor]:
        """The vectors of each feature's bags, float32 (G, D)."""
        sizes = zip(self._features.num_bags, self._widths, strict=True)
        starts = list(accumulate((count * width for count, width in sizes), initial=0))
        sizes_of = [end - start for start, end in pairwise(starts)]
        parts = self._shaped(self._pool(starts).split_with_sizes(sizes_of))
        is_left = any(self._is_mean) and not self._averages
        return self._divided(parts) if is_left else parts

    def _pool(self, starts: Sequence[int], shape: tuple[int, int] | None = None) -> torch.Tensor:
        """The vectors of all bags, those of a feature from its start on, or in its columns."""
        weights = self._learning_weights()
        weight_starts = None if weights is None else self._weight_starts()
        request = PoolRequest(starts[-1], weight_starts, shape)
        batch = self._home.plan(self._placed(starts), request, training=self._step is not None)
        batch.open()
        if weights is not None:
            batch.take_weights(weights.to(self._home.device))
        return batch.pool(anchor_of(self._rows), nullcontext)

    def _learning_weights(self) -> torch.Tensor | None:
        """The weights of ids, if they require a gradient."""
        weights_N = self._features.weights_N
        return weights_N if weights_N is not None and weights_N.requires_grad else None

    def _weight_starts(self) -> list[list[int]]:
        """Where the weights of each table's features begin."""
        starts = accumulate(self._features.counts, initial=0)
        return [[next(starts) for _ in rows.config.feature_names] for rows in self._rows]

    def _shaped(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [part.view(-1, width) for part, width in zip(parts, self._widths, strict=True)]

    def _divided(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        divisor = mean_divisor(self._features, self._is_mean).to(self._home.device)
        divisors = divisor.split_with_sizes(self._features.num_bags)
        return [part / each[:, None] for part, each in zip(parts, divisors, strict=True)]

    def _placed(self, starts: Sequence[int]) -> list[ShardBags]:
        """The mapped bags, their vectors to begin at `starts`."""
        features = [feature for table in self._mapped for feature in table.features]
        for feature, start in zip(features, starts, strict=False):
            feature.column = start
        return self._mapped
