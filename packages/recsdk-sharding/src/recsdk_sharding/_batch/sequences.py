"""Sequences: every id of a feature has a vector of its own.

Shape letters: B samples, G bags, N keys, U distinct keys of a feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor

from recsdk_core import distinct_keys
from recsdk_sharding._batch.features import Features
from recsdk_sharding.device.parcel import Parcel

__all__ = ["Samples", "SentSamples", "jagged_tensors", "samples_of", "without_duplicates"]

Samples: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]
"""The lengths of a feature's samples (B,), and their keys (N,), with all duplicates; None: nobody
wants the keys."""


def without_duplicates(features: Features, drops_duplicates: bool) -> Features:
    """Features in which every key is a bag.

    With `drops_duplicates` a feature has each of its keys once, in order of first occurrence, and
    `bag_of_sample` says which of them each of the N original keys is. Likewise if samples share
    bags: then `lengths_G` are those of the samples, and N counts the keys of all samples.
    """
    counts = features.counts
    keys_N = features.keys_N
    which: list[torch.Tensor] | None = None
    data = features.data
    if drops_duplicates:
        parts = [distinct_keys(part) for part in keys_N.split_with_sizes(counts)]
        which = [position for _, position in parts]
        sizes = [len(keys_U) for keys_U, _ in parts]
        data = {name: _largest(own_N, counts, which, sizes) for name, own_N in data.items()}
        keys_N = torch.cat([keys_U for keys_U, _ in parts])
        counts = sizes
    lengths_G = features.lengths_G
    if features.bag_of_sample is not None:
        lengths_G, positions = _of_samples(features, features.bag_of_sample)
        if which is not None:
            pairs = zip(which, positions, strict=True)
            positions = [which_N[position] for which_N, position in pairs]
        which = positions
    return replace(
        features,
        keys_N=keys_N,
        lengths=lengths_G,
        num_bags=counts,
        counts=counts,
        has_one_key_each_F=[True] * len(counts),
        weights_N=None,
        bag_of_sample=which,
        data=data,
    )


def _largest(
    numbers_N: torch.Tensor, counts: list[int], which: list[torch.Tensor], sizes: list[int]
) -> torch.Tensor:
    """The largest number of each distinct key, as a table takes it of equal keys' times or scores.

    Tables that add up what comes with equal keys take all of them.
    """
    parts = zip(numbers_N.split_with_sizes(counts), which, sizes, strict=True)
    return torch.cat(
        [
            numbers_N.new_zeros(size).index_reduce(0, which_N, part, "amax", include_self=False)
            for part, which_N, size in parts
        ]
    )


def _of_samples(
    features: Features, bag_of_sample: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The lengths of all samples' bags, and of each feature the positions of their keys."""
    lengths, positions = [], []
    of_features = features.lengths_G.split_with_sizes(features.num_bags)
    for lengths_G, bag_B in zip(of_features, bag_of_sample, strict=True):
        lengths_B = lengths_G[bag_B]
        first_B = (lengths_G.cumsum(0) - lengths_G)[bag_B]
        shift_B = first_B - (lengths_B.cumsum(0) - lengths_B)
        total = int(lengths_B.sum())
        positions.append(torch.arange(total, device="cpu") + shift_B.repeat_interleave(lengths_B))
        lengths.append(lengths_B)
    return torch.cat(lengths), positions


def jagged_tensors(
    names: Sequence[str],
    values: Sequence[torch.Tensor],
    samples: Sequence[Samples],
) -> dict[str, JaggedTensor]:
    """The vectors of features by name, with the lengths and keys of each one's samples."""
    return {
        name: JaggedTensor(values=vectors, lengths=lengths_B, weights=keys_N)
        for name, vectors, (lengths_B, keys_N) in zip(names, values, samples, strict=True)
    }


class SentSamples:
    """The samples of each feature, of `without_duplicates`, on their way to the device in one copy:
    else the host would wait in each step for one of each feature."""

    def __init__(self, features: Features, device: torch.device, *, with_keys: bool) -> None:
        """Runs in the background."""
        self._device = device
        self._on_host = samples_of(features, with_keys=with_keys)
        self._parcel = Parcel()
        self._items = []
        if device.type != "cpu":
            of_each = [part for part in zip(*self._on_host, strict=True) if part[0] is not None]
            self._items = [[self._parcel.put(own.numpy()) for own in part] for part in of_each]
        self._parcel.seal()

    def open(self) -> None:
        """Starts the copy, on the current stream."""
        self._parcel.send(self._device)

    def record_stream(self, stream: torch.Stream) -> None:
        """Tells the allocator that work on the stream uses the device memory."""
        self._parcel.record_stream(stream)

    def of_features(self) -> list[Samples]:
        """Those of each feature on the device, once it is open."""
        if not self._items:
            return self._on_host
        lengths, *keys = [[self._parcel.get(item) for item in part] for part in self._items]
        return list(zip(lengths, keys[0] if keys else [None] * len(lengths), strict=True))


def samples_of(features: Features, *, with_keys: bool) -> list[Samples]:
    """The samples of each feature, of `without_duplicates`."""
    lengths = features.lengths_G.view(len(features.num_bags), -1)
    if not with_keys:
        return [(lengths_B, None) for lengths_B in lengths]
    keys: Sequence[torch.Tensor] = features.keys_N.split_with_sizes(features.num_bags)
    if features.bag_of_sample is not None:
        pairs = zip(keys, features.bag_of_sample, strict=True)
        keys = [keys_U[which_N] for keys_U, which_N in pairs]
    return list(zip(lengths, keys, strict=True))
