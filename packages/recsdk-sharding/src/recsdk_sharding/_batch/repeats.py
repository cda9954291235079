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

from recsdk_sharding.device.kernels import sum_by_position

__all__ = ["of_samples"]


def of_samples(vectors: Sequence[torch.Tensor], bags: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """For each feature the vectors of samples (B, D), of those of its bags (G, D).

    `bags`: the bag of each sample, int64 (B,), on any device. In backward the gradients of a bag
    are added up in an order that depends on the positions alone.
    """
    apply: Callable[..., torch.Tensor] = _OfSamples.apply
    pairs = zip(vectors, bags, strict=True)
    return [apply(part_GD, bag_B.to(part_GD.device)) for part_GD, bag_B in pairs]


class _OfSamples(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vectors_GD: torch.Tensor, bag_B: torch.Tensor) -> torch.Tensor:
        ctx.bag_B, ctx.num_bags = bag_B, len(vectors_GD)
        return vectors_GD.index_select(0, bag_B)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BD: torch.Tensor) -> tuple[torch.Tensor, None]:
        return sum_by_position(grad_BD, ctx.bag_B, ctx.num_bags), None
