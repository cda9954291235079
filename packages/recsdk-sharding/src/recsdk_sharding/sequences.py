"""Sequences: every id of a feature has a vector of its own.

Shape letters: N keys, U distinct keys of a feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import JaggedTensor

from recsdk_sharding.features import Features

__all__ = ["jagged_tensors", "lengths_and_keys", "without_duplicates"]


def without_duplicates(features: Features, drops_duplicates: bool) -> Features:
    """Features in which every key is a bag.

    With `drops_duplicates` a feature has each of its keys once, where it first was, and
    `bag_of_sample` says for each of the N keys before which one it is. Raises ValueError for
    features of different batch sizes.
    """
    if features.bag_of_sample is not None:
        raise ValueError("sequences take one batch size for all features of a batch")
    counts = features.counts()
    bag_of_sample = None
    keys_N = features.keys_N
    if drops_duplicates:
        parts = [_distinct(part) for part in keys_N.split_with_sizes(counts)]
        keys_N = torch.cat([keys_U for keys_U, _ in parts])
        counts = [len(keys_U) for keys_U, _ in parts]
        bag_of_sample = [position for _, position in parts]
    return replace(
        features,
        keys_N=keys_N,
        num_bags=counts,
        weights_N=None,
        bag_of_sample=bag_of_sample,
    )


def _distinct(keys_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The distinct keys in the order in which they first occur, and which one each key is."""
    _, firsts_U, which_N = np.unique(keys_N.numpy(), return_index=True, return_inverse=True)
    order_U = np.argsort(firsts_U)
    number_U = np.empty_like(order_U)
    number_U[order_U] = np.arange(len(order_U))
    return keys_N[torch.from_numpy(firsts_U[order_U])], torch.from_numpy(number_U[which_N])


def jagged_tensors(
    names: Sequence[str],
    values: Sequence[torch.Tensor],
    features: Sequence[tuple[torch.Tensor, torch.Tensor]],
    needs_indices: bool,
) -> dict[str, JaggedTensor]:
    """The vectors of features by name, with each one's lengths (B,) and, if wanted, keys (N,)."""
    return {
        name: JaggedTensor(
            values=vectors,
            lengths=lengths_B.to(vectors.device),
            weights=keys_N.to(vectors.device) if needs_indices else None,
        )
        for name, vectors, (lengths_B, keys_N) in zip(names, values, features, strict=True)
    }


def lengths_and_keys(features: Features) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The lengths (B,) and keys (N,) of each feature, as they were before duplicates were left out.

    For features of `without_duplicates`.
    """
    keys: Sequence[torch.Tensor] = features.keys_N.split_with_sizes(features.num_bags)
    if features.bag_of_sample is not None:
        pairs = zip(keys, features.bag_of_sample, strict=True)
        keys = [keys_U[which_N] for keys_U, which_N in pairs]
    lengths = features.lengths_G.view(len(keys), -1)
    return list(zip(lengths, keys, strict=True))
