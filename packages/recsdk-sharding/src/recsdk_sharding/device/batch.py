"""A mapped batch as the device needs it: which rows to add up to which bags, and back.

All of it is computed on the host, in the background, and goes to the device in one copy.

Shape letters: N keys, B bags of a table, U distinct rows or bags.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from recsdk_core import Lease, Outcome
from recsdk_core.nn.accumulation import Accumulation
from recsdk_core.nn.function import FeatureBags
from recsdk_sharding.device.kernels import BagIndex, GradientIndex
from recsdk_sharding.device.parcel import (
    Item,
    Parcel,
    get_optional,
    get_runs,
    put_optional,
    put_runs,
)
from recsdk_sharding.device.runs import Runs, plan_runs

if TYPE_CHECKING:
    from recsdk_sharding.device.table import DeviceTable

__all__ = [
    "RowGradients",
    "TablePlan",
    "has_row",
    "plan_batch",
    "plan_joined",
]


@dataclass(frozen=True)
class _BagItems:
    """A `BagIndex` in a parcel."""

    rows_N: Item
    weights_N: Item | None
    runs: Runs[Item]
    filled_U: Item | None
    num_bags: int


@dataclass(frozen=True)
class _GradientItems:
    """A `GradientIndex` in a parcel."""

    rows_U: Item
    host_rows_U: NDArray[np.int64]
    bags_N: Item
    weights_N: Item | None
    runs: Runs[Item]


@dataclass(frozen=True)
class _WeightItems:
    """Where the weights of a table's keys are, if they come late."""

    places_N: Item
    """For each key, bag after bag: the position of its weight among those of all tables."""
    order_N: Item
    """The positions of the keys that have gradients, row after row, as in `_GradientItems`."""
    bag_N: Item
    """The bag of each key."""


RowGradients: TypeAlias = tuple[NDArray[np.int64], torch.Tensor]
"""Distinct rows (U,) on the host, and their gradients (U, D) on the device."""


@dataclass(frozen=True)
class TablePlan:
    """One table's part of a batch."""

    table: DeviceTable
    blocks: list[tuple[int, int]]
    """Bags that lie together: how many, and the first number of their vectors in the result."""
    lease: Lease | None
    accumulation: Accumulation[Any] | None
    """Collects `RowGradients`."""
    bags: _BagItems
    gradients: _GradientItems | None
    """None: the batch is not trained."""
    weights: _WeightItems | None = None
    """None: weights came with the ids, if there are any."""

    def bag_index(self, parcel: Parcel, weights_M: torch.Tensor | None = None) -> BagIndex:
        """What the forward needs, on the device; `weights_M`: those that came late."""
        bags = self.bags
        return BagIndex(
            rows_N=parcel.get(bags.rows_N),
            weights_N=self._weights(parcel, bags.weights_N, weights_M),
            runs=get_runs(parcel, bags.runs),
            filled_U=get_optional(parcel, bags.filled_U),
            num_bags=bags.num_bags,
        )

    def gradient_index(
        self, parcel: Parcel, weights_M: torch.Tensor | None = None
    ) -> GradientIndex:
        """What the backward needs, on the device; `weights_M`: those that came late."""
        gradients = self.gradients
        assert gradients is not None
        weights_N = self._weights(parcel, gradients.weights_N, weights_M)
        if self.weights is not None and weights_N is not None:
            weights_N = weights_N.index_select(0, parcel.get(self.weights.order_N))
        return GradientIndex(
            rows_U=parcel.get(gradients.rows_U),
            bags_N=parcel.get(gradients.bags_N),
            weights_N=weights_N,
            runs=get_runs(parcel, gradients.runs),
        )

    def _weights(
        self, parcel: Parcel, early: Item | None, weights_M: torch.Tensor | None
    ) -> torch.Tensor | None:
        if self.weights is None or weights_M is None:
            return get_optional(parcel, early)
        return weights_M.index_select(0, parcel.get(self.weights.places_N))

    def put_weight_grads(
        self, parcel: Parcel, store_RD: torch.Tensor, grad_BD: torch.Tensor, grad_M: torch.Tensor
    ) -> None:
        """Adds the gradient of each late weight: the dot product of its bag's gradient and its row.

        Column ranges of a table on one rank share their weights.
        """
        assert self.weights is not None
        rows_ND = store_RD.index_select(0, parcel.get(self.bags.rows_N))
        grads_ND = grad_BD.index_select(0, parcel.get(self.weights.bag_N))
        grad_M.index_add_(0, parcel.get(self.weights.places_N), (rows_ND * grads_ND).sum(1))


def plan_batch(
    mapped: Sequence[Any],
    training: bool,
    weight_starts: Sequence[Sequence[int]] | None = None,
    pooled: range | None = None,
) -> tuple[Parcel, list[TablePlan]]:
    """A sealed parcel and a plan for each table; arguments as the fields of `PoolRequest`."""
    keys = [_MappedKeys.of_features(entry.features, pooled) for entry in mapped]
    late: Sequence[Sequence[int] | None] = weight_starts or [None] * len(keys)
    parcel = Parcel()
    plans = [
        TablePlan(
            table=entry.held.table,
            blocks=_joined_blocks(entry.features, entry.held.table.dim),
            lease=entry.lease,
            accumulation=entry.accumulation,
            # The gradients of late weights read the rows of all keys, so no bag is left out then.
            bags=_plan_bags(
                parcel,
                own.read_only() if starts is None else own,
                entry.held.table.spare_row,
            ),
            gradients=_plan_gradients(parcel, own) if training else None,
            weights=None if starts is None else _plan_weights(parcel, own, entry.features, starts),
        )
        for entry, own, starts in zip(mapped, keys, late, strict=True)
    ]
    parcel.seal()
    return parcel, plans


def plan_joined(parcel: Parcel, rows: Sequence[NDArray[np.int64]]) -> Callable[[], GradientIndex]:
    """Puts into a parcel how the gradients of several batches' rows are added up.

    Returns a function that gives the index once the parcel is sent.
    """
    rows_N = np.concatenate(rows)
    order_N = np.argsort(rows_N, kind="stable")
    rows_U, lengths_U = np.unique(rows_N, return_counts=True)
    touched, order = parcel.put(rows_U), parcel.put(order_N)
    runs = put_runs(parcel, plan_runs(lengths_U))
    return lambda: GradientIndex(
        parcel.get(touched), parcel.get(order), None, get_runs(parcel, runs)
    )


def _joined_blocks(features: Sequence[FeatureBags], dim: int) -> list[tuple[int, int]]:
    """The features' bags and where their vectors begin; neighbours are one block."""
    blocks: list[tuple[int, int]] = []
    for feature in features:
        count, start = _num_bags(feature), feature.column
        if blocks and blocks[-1][1] + blocks[-1][0] * dim == start:
            count, start = count + blocks[-1][0], blocks.pop()[1]
        blocks.append((count, start))
    return blocks


def _num_bags(feature: FeatureBags) -> int:
    return len(feature.rows) if feature.offsets is None else len(feature.offsets) - 1


@dataclass(frozen=True)
class _MappedKeys:
    """The keys of all features of a table, feature after feature."""

    rows_N: NDArray[np.int64]
    outcomes_N: NDArray[np.uint8]
    weights_N: NDArray[np.float32] | None
    lengths_B: NDArray[np.int64]
    is_read_B: NDArray[np.bool_]
    """Whether a bag's vector is read; it is trained in any case."""

    @staticmethod
    def of_features(features: Sequence[FeatureBags], pooled: range | None) -> _MappedKeys:
        weights = [f.weights for f in features if f.weights is not None]
        return _MappedKeys(
            rows_N=torch.cat([f.rows for f in features]).numpy(),
            outcomes_N=torch.cat([f.outcomes for f in features]).numpy(),
            weights_N=torch.cat(weights).numpy() if weights else None,
            lengths_B=torch.cat([_lengths(f) for f in features]).numpy(),
            is_read_B=np.repeat(
                np.array([pooled is None or f.column in pooled for f in features]),
                list(map(_num_bags, features)),
            ),
        )

    def read_only(self) -> _MappedKeys:
        """The same for the forward: bags that nobody reads are empty."""
        if self.is_read_B.all():
            return self
        is_read_N = np.repeat(self.is_read_B, self.lengths_B)
        return replace(
            self,
            rows_N=self.rows_N[is_read_N],
            outcomes_N=self.outcomes_N[is_read_N],
            weights_N=None if self.weights_N is None else self.weights_N[is_read_N],
            lengths_B=np.where(self.is_read_B, self.lengths_B, 0),
        )


def has_row(outcomes_N: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Which keys have a row."""
    is_row: NDArray[np.bool_] = (outcomes_N == Outcome.FOUND) | (outcomes_N == Outcome.INSERTED)
    return is_row


def _lengths(feature: FeatureBags) -> torch.Tensor:
    if feature.offsets is None:
        return torch.ones(len(feature.rows), dtype=torch.int64)
    return feature.offsets.diff()


def _plan_bags(parcel: Parcel, keys: _MappedKeys, spare_row: int) -> _BagItems:
    filled_U = np.flatnonzero(keys.lengths_B)
    is_full = len(filled_U) == len(keys.lengths_B)
    return _BagItems(
        rows_N=parcel.put(np.where(has_row(keys.outcomes_N), keys.rows_N, spare_row)),
        weights_N=put_optional(parcel, keys.weights_N),
        runs=put_runs(parcel, plan_runs(keys.lengths_B[filled_U])),
        filled_U=None if is_full else parcel.put(filled_U),
        num_bags=len(keys.lengths_B),
    )


def _plan_gradients(parcel: Parcel, keys: _MappedKeys) -> _GradientItems:
    order_N = _in_order_of_rows(keys)
    rows_U, lengths_U = np.unique(keys.rows_N[order_N], return_counts=True)
    bag_N = np.repeat(np.arange(len(keys.lengths_B)), keys.lengths_B)
    return _GradientItems(
        rows_U=parcel.put(rows_U),
        host_rows_U=rows_U,
        bags_N=parcel.put(bag_N[order_N]),
        weights_N=put_optional(parcel, None if keys.weights_N is None else keys.weights_N[order_N]),
        runs=put_runs(parcel, plan_runs(lengths_U)),
    )


def _in_order_of_rows(keys: _MappedKeys) -> NDArray[np.int64]:
    """The keys that have a row, row after row."""
    with_row = np.flatnonzero(has_row(keys.outcomes_N))
    return with_row[np.argsort(keys.rows_N[with_row], kind="stable")]


def _plan_weights(
    parcel: Parcel, keys: _MappedKeys, features: Sequence[FeatureBags], starts: Sequence[int]
) -> _WeightItems:
    counts = [len(feature.rows) for feature in features]
    places = [start + np.arange(n) for start, n in zip(starts, counts, strict=True)]
    return _WeightItems(
        places_N=parcel.put(np.concatenate(places)),
        order_N=parcel.put(_in_order_of_rows(keys)),
        bag_N=parcel.put(np.repeat(np.arange(len(keys.lengths_B)), keys.lengths_B)),
    )
