"""Pooling straight into the results of a batch, on a rank that is alone.

Nothing travels then: every bag is whole and every vector has its place in the matrix of results, so
neither the forward nor the backward copies what it could read or write in place.

Shape letters: B samples, C columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from recsdk_core import Lease
from recsdk_core.nn.function import FeatureBags
from recsdk_sharding.features import Features

__all__ = ["Places", "WholeBags"]


@dataclass(frozen=True)
class Places:
    """Where the vectors of one group's features go, if it is a module's only one."""

    columns: list[int]
    """First column of each of the group's features."""
    num_columns: int
    """C."""


class WholeBags:
    """The bags of a batch that stays where it is."""

    def __init__(self, places: Places, features: Features, is_mean: Sequence[bool]) -> None:
        """`is_mean`: of each feature. `features` have one batch size."""
        self.shape = features.batch_size, places.num_columns
        """Of the results, (B, C)."""
        self._places = places
        self._features = features
        self._is_mean = is_mean
        self._keys = list(accumulate(features.counts(), initial=0))

    def of_part(
        self,
        wanted: Sequence[int],
        mapped: tuple[torch.Tensor, torch.Tensor, Lease],
        first_column: int,
    ) -> list[FeatureBags]:
        """The bags of a table's features, at its columns from `first_column` on, mapped."""
        rows, outcomes, _ = mapped
        counts = [self._keys[number + 1] - self._keys[number] for number in wanted]
        parts = zip(
            wanted, rows.split_with_sizes(counts), outcomes.split_with_sizes(counts), strict=True
        )
        return [
            FeatureBags(
                rows=own_rows,
                outcomes=own_outcomes,
                offsets=self._offsets(number),
                weights=self._weights(number),
                pooling="mean" if self._is_mean[number] else "sum",
                column=self._places.columns[number] + first_column,
            )
            for number, own_rows, own_outcomes in parts
        ]

    def _offsets(self, number: int) -> torch.Tensor | None:
        """None if every bag has one key."""
        size = self._features.batch_size
        lengths = self._features.lengths_G.narrow(0, number * size, size)
        if self._keys[number + 1] - self._keys[number] == size and bool(lengths.eq(1).all()):
            return None
        return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))

    def _weights(self, number: int) -> torch.Tensor | None:
        weights_N = self._features.weights_N
        if weights_N is None:
            return None
        return weights_N.detach()[self._keys[number] : self._keys[number + 1]]
