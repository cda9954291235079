"""Vectors that several samples or ids share.

torch's own `index_select` would do in forward, but its backward adds atomically on a device where
positions repeat, so that no two runs would give the same bits.

Shape letters: B samples, D width, G bags of a feature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from recsdk_sharding._batch.uncompiled import uncompiled
from recsdk_sharding.device.kernels import sum_by_position
from recsdk_sharding.device.parcel import Parcel

__all__ = ["SampleBags", "of_samples"]


class SampleBags:
    """The bag of each sample, of many features, on its way to the device in one copy."""

    def __init__(self, bag_of_sample: Sequence[torch.Tensor], device: torch.device) -> None:
        """`bag_of_sample`: of each feature, int64 (B,) on the host; runs in the background."""
        self._device = device
        self._parcel = Parcel(is_pinned=device.type != "cpu")
        self._items = [self._parcel.put(bag_B.numpy()) for bag_B in bag_of_sample]
        self._parcel.seal()

    def open(self) -> None:
        """Starts the copy, on the current stream."""
        self._parcel.send(self._device)

    def record_stream(self, stream: torch.Stream) -> None:
        """Tells the allocator that work on the stream uses the device memory."""
        self._parcel.record_stream(stream)

    def of_features(self) -> list[torch.Tensor]:
        """The bags of each feature's samples on the device, once it is open."""
        return [self._parcel.get(item) for item in self._items]


def of_samples(vectors: Sequence[torch.Tensor], bags: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """For each feature the vectors of samples (B, D), of those of its bags (G, D).

    `bags`: the bag of each sample, int64 (B,), where the vectors are. In backward the gradients of
    a bag are added up in an order that depends on the positions alone.
    """
    apply: Callable[..., torch.Tensor] = _OfSamples.apply
    return [apply(*pair) for pair in zip(vectors, bags, strict=True)]


class _OfSamples(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vectors_GD: torch.Tensor, bag_B: torch.Tensor) -> torch.Tensor:
        ctx.bag_B, ctx.num_bags = bag_B, len(vectors_GD)
        return vectors_GD.index_select(0, bag_B)

    @staticmethod
    @uncompiled
    @once_differentiable
    def backward(ctx: Any, grad_BD: torch.Tensor) -> tuple[torch.Tensor, None]:
        return sum_by_position(grad_BD, ctx.bag_B, ctx.num_bags), None
