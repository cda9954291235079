"""Nodes of lookups with options: the largest of a bag, gradients by frequency, a limit of norms.

Shape letters: N keys, B bags, U distinct rows, D row width.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from recsdk_core.combine import distinct_keys
from recsdk_core.nn.function import Block, FeatureBags, Node, TableBags, gathering
from recsdk_core.tables import Bags

__all__ = ["LookupOptions", "MaxOfBags", "SumOfSquares", "node_of_lookup", "squares_of"]


@dataclass(frozen=True, kw_only=True)
class LookupOptions:
    """What a module's arguments ask of a lookup."""

    mode: str = "sum"
    """"sum", "mean" or "max"."""
    by_frequency: bool = False
    """Whether a key's gradient is divided by how often it is in the batch."""
    max_norm: float | None = None
    """Rows that exceed it are scaled back."""
    norm_type: float = 2.0


class MaxOfBags:
    """Pools vectors (N, D) to the largest number of each bag and column, (B, D); no keys: zeros."""

    def __init__(self, ends: torch.Tensor) -> None:
        self.ends = ends  # (B + 1,)

    def forward(self, vectors_ND: torch.Tensor) -> torch.Tensor:
        self._num_keys = len(vectors_ND)
        pooled_BD, _, lengths_B, self._where_BD = torch.embedding_bag(
            vectors_ND,
            torch.arange(self._num_keys, device="cpu"),
            self.ends.long(),
            mode=2,
            include_last_offset=True,
        )
        self._has_keys_B = lengths_B > 0
        return pooled_BD

    def backward(self, grad_BD: torch.Tensor) -> torch.Tensor:
        """Of each number in the result only one key's has a gradient."""
        grad_ND = grad_BD.new_zeros(self._num_keys, grad_BD.shape[1])
        where, grads = self._where_BD[self._has_keys_B], grad_BD[self._has_keys_B]
        return grad_ND.scatter_(0, where, grads)


class SumOfSquares:
    """Of all numbers of vectors (U, D), a scalar."""

    def forward(self, vectors_UD: torch.Tensor) -> torch.Tensor:
        self._vectors_UD = vectors_UD
        return vectors_UD.square().sum()

    def backward(self, grad: torch.Tensor) -> torch.Tensor:
        return grad * (2 * self._vectors_UD)


def squares_of(mapped: TableBags) -> Node:
    """The node whose vector is the sum of squares of the rows."""
    node = gathering([mapped])
    node.reduction = SumOfSquares()
    return node


def node_of_lookup(
    mapped: TableBags,
    keys: torch.Tensor,
    ends: torch.Tensor | None,
    weights: torch.Tensor | None,
    options: LookupOptions,
    writes: bool,
) -> Node:
    """The node over mapped keys (N,), with bags' ends (B + 1,) or each a bag.

    `writes`: rows that exceed max_norm are scaled back at once; else its vectors are those of rows
    that were, and a backward scales them first.
    """
    table, [feature] = mapped.table, mapped.features
    rows = Bags(feature.rows, feature.outcomes)
    limit = None
    if options.max_norm is not None:
        limit = functools.partial(table.limit_norms, rows, options.max_norm, options.norm_type)
    factors = None
    if limit is not None and writes:
        limit()
    elif options.max_norm is not None:
        factors = table.norm_factors(rows, options.max_norm, options.norm_type)
        if bool((factors == 1.0).all()):
            factors = None
    is_max = options.mode == "max"
    feature.offsets = None if is_max else ends
    feature.pooling = "sum" if is_max else options.mode
    feature.weights = weights
    by_frequency = _by_frequency(keys) if options.by_frequency else None
    pooled, trained = _block(feature, factors), _block(feature, by_frequency)
    node = Node((pooled.bags.num_bags, table.dim), [mapped], [[pooled]])
    node.trained = [[trained]]
    if is_max:
        assert ends is not None
        node.reduction = MaxOfBags(ends)
    if limit is not None and not writes:
        node.before_training = limit
    return node


def _block(feature: FeatureBags, factors: torch.Tensor | None) -> Block:
    """The feature's bags, each key's row multiplied by a factor."""
    if factors is None:
        return Block(feature, 0, 0)
    shares = _shares_of(feature)
    summed = FeatureBags(
        rows=feature.rows,
        outcomes=feature.outcomes,
        offsets=feature.offsets,
        weights=factors if shares is None else shares * factors,
        pooling="sum",
    )
    made = Block(summed, 0, 0)
    summed.weights = feature.weights  # which may want a gradient
    return made


def _shares_of(feature: FeatureBags) -> torch.Tensor | None:
    """The weight of each key in its bag's sum, (N,); None: all are 1."""
    weights = None if feature.weights is None else feature.weights.detach()
    if feature.pooling == "sum" or feature.offsets is None:
        return weights
    lengths_B = feature.offsets.long().diff()
    bag_N = torch.repeat_interleave(lengths_B)
    if weights is None:
        return 1.0 / lengths_B[bag_N].float()
    total_B = weights.new_zeros(len(lengths_B)).index_add_(0, bag_N, weights)
    return torch.where(total_B[bag_N] == 0, 0.0, weights / total_B[bag_N])


def _by_frequency(keys: torch.Tensor) -> torch.Tensor:
    """One over how often each key is among all, float32 (N,)."""
    distinct, which = distinct_keys(keys)
    counts = torch.bincount(which, minlength=len(distinct))
    return 1.0 / counts.float()[which]
