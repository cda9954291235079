"""Mapping and reading a batch of tables that are all on this process.

Shape letters: N keys, B samples, C columns, D width of a feature's vectors, G bags of a feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise

import numpy as np
import torch
from torchrec.modules.embedding_configs import PoolingType

from recsdk_sharding._batch.features import (
    Features,
    KeyPieces,
    map_under_leases,
    mean_divisor,
    sums_of,
)
from recsdk_sharding._batch.key_data import data_of_tables
from recsdk_sharding._batch.repeats import SampleBags, of_samples
from recsdk_sharding._rows.home import MappedBags, PoolRequest, ShardGroup
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
        now_T: Sequence[int | None] | None = None,
    ) -> None:
        """Maps the keys, with what comes with them; with a `step` those without a row get one.

        `features` are those of the tables, in their order. In a sequence every key is a bag.
        `now_T`: the time of each table from this batch on; None: it stays.
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
        self._mapped = self._map(counts, now_T)

    def _map(self, counts: list[int], now_T: Sequence[int | None] | None) -> MappedBags:
        """The bags of all features, which begin nowhere yet."""
        shards = [rows.shards[0] for rows in self._rows]
        num_pieces_T = np.array([len(rows.config.feature_names) for rows in self._rows], np.int64)
        num_keys, indexes = np.array(counts, np.int64), [shard.held.index for shard in shards]
        of_tables = sums_of(num_keys, num_pieces_T).tolist()
        mapped = map_under_leases(
            indexes,
            KeyPieces(self._features.keys_N, num_keys),
            num_pieces_T,
            insert=self._step is not None,
            step=self._step,
            data=data_of_tables(indexes, self._features.data, of_tables, now_T),
        )
        weights = self._features.weights_N
        if self._learning_weights() is not None:
            weights = None  # the batch takes them with their graph
        try:
            return MappedBags(
                group=ShardGroup(
                    [shard.held for shard in shards], [shard.accumulation for shard in shards]
                ),
                leases=mapped.leases,
                num_pieces_T=num_pieces_T,
                rows=mapped.rows_N,
                outcomes_N=mapped.outcomes_N,
                num_keys_P=num_keys,
                starts_P=np.zeros(len(counts), np.int64),
                offsets=None if self._is_sequence else self._features.offsets(),
                weights=None if weights is None else weights.split_with_sizes(counts),
                is_mean_P=np.array(self._is_mean) if self._averages else None,
            )
        except BaseException:
            mapped.leave_failed()  # the traceback would keep them open
            raise

    def outcomes(self) -> list[torch.Tensor]:
        """What became of each feature's keys, uint8 (N,): copies, as backward reads its own."""
        counts = self._mapped.num_keys_P.tolist()
        return list(self._mapped.outcomes_N.clone().split_with_sizes(counts))

    def pooled(self) -> torch.Tensor:
        """The pooled vectors of all samples, float32 (B, C)."""
        bags = self._features.bag_of_sample
        is_whole = self._averages or not any(self._is_mean)
        if bags is None and is_whole and self._home.pools_to_results:
            starts = list(accumulate(self._widths, initial=0))
            return self._pool(starts, shape=(self._features.batch_size, starts[-1]))
        parts = self.separate()
        return torch.cat(parts if bags is None else self.of_samples(parts, bags), dim=1)

    def separate(self) -> list[torch.Tensor]:
        """The vectors of each feature's bags, float32 (G, D)."""
        sizes = zip(self._features.num_bags, self._widths, strict=True)
        starts = list(accumulate((count * width for count, width in sizes), initial=0))
        sizes_of = [end - start for start, end in pairwise(starts)]
        parts = self._shaped(self._pool(starts).split_with_sizes(sizes_of))
        is_left = any(self._is_mean) and not self._averages
        return self._divided(parts) if is_left else parts

    def of_samples(
        self, parts: Sequence[torch.Tensor], bags: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """For each feature the vectors of samples, of those of its bags; `bags`: on the host."""
        samples = SampleBags(bags, self._home.device)
        samples.open()
        return of_samples(parts, samples.of_features())

    def _pool(self, starts: Sequence[int], shape: tuple[int, int] | None = None) -> torch.Tensor:
        """The vectors of all bags, those of a feature from its start on, or in its columns."""
        weights = self._learning_weights()
        num_keys = self._mapped.num_keys_P
        weight_starts_P = None if weights is None else num_keys.cumsum() - num_keys
        request = PoolRequest(starts[-1], weight_starts_P, shape)
        bags = replace(self._mapped, starts_P=np.array(starts[:-1], np.int64))
        plan = self._home.plan(bags, request, training=self._step is not None)
        batch = plan.batch(bags, request)
        batch.open()
        if weights is not None:
            batch.take_weights(weights.to(self._home.device))
        return batch.pool(partial(anchor_of, self._rows), nullcontext)

    def _learning_weights(self) -> torch.Tensor | None:
        """The weights of ids, if they require a gradient."""
        weights_N = self._features.weights_N
        return weights_N if weights_N is not None and weights_N.requires_grad else None

    def _shaped(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [part.view(-1, width) for part, width in zip(parts, self._widths, strict=True)]

    def _divided(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        divisor = mean_divisor(self._features, self._is_mean).to(self._home.device)
        divisors = divisor.split_with_sizes(self._features.num_bags)
        return [part / each[:, None] for part, each in zip(parts, divisors, strict=True)]
