"""Checks, when a model first runs, how its tensor-parallel layers cut batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

__all__ = ["Layer", "LayoutCheck", "check_batch_sizes"]

_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Layer:
    """A module that is cut over ranks."""

    path: str
    module: nn.Module
    style: ParallelStyle

    def layouts(self, side: str) -> tuple[Placement, ...]:
        """The style's layouts of the "input" or the "output"; empty for styles without."""
        found = getattr(self.style, f"{side}_layouts", ())
        return tuple(found) if isinstance(found, (tuple, list)) else (found,)


class LayoutCheck:
    """Watches the first forward of a model: do its layers cut the batches of their ranks?

    Each rank has a batch of its own. So the first layer to run must take its input as a part of the
    joined batch, and the last must give such a part back. If a layer between takes its input as
    equal on all ranks, it must be equal. All ranks see the same, and raise together.
    """

    def __init__(self, model: nn.Module, layers: Sequence[Layer], group: dist.ProcessGroup) -> None:
        self._group = group
        self._last: Layer | None = None
        self._handles: list[Any] = [
            model.register_forward_pre_hook(self._begin),
            model.register_forward_hook(self._end),
        ]
        for layer in layers:
            hook = partial(self._enter, layer)
            handle = layer.module.register_forward_pre_hook(hook, prepend=True)
            self._handles.append(handle)

    def _begin(self, model: nn.Module, args: Any) -> None:
        self._last = None

    def _enter(self, layer: Layer, module: nn.Module, args: tuple[Any, ...]) -> None:
        is_first, self._last = self._last is None, layer
        if not any(isinstance(layout, Replicate) for layout in layer.layouts("input")):
            return
        if is_first:
            raise ValueError(
                f"{layer.path!r} is the first tensor-parallel layer to run, and takes its input as "
                "equal on all ranks, but each rank has a batch of its own: give its style "
                "input_layouts=Shard(0)"
            )
        self._require_equal(layer, args)

    def _require_equal(self, layer: Layer, args: tuple[Any, ...]) -> None:
        given = args[0] if args else None
        if not isinstance(given, torch.Tensor) or isinstance(given, DTensor):
            return
        values = given.detach().double()
        own = torch.stack([values.sum(), values.square().sum()])
        found = [torch.empty_like(own) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(found, own, group=self._group)
        if not all(torch.allclose(each, found[0], rtol=_TOLERANCE) for each in found):
            raise ValueError(
                f"{layer.path!r} takes its input as equal on all ranks, but it differs: give its "
                "style input_layouts=Shard(0) if it takes the rank's own batch; layers in between "
                "must work alike on all ranks, without random numbers of their own"
            )

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        last = self._last
        if last is None:
            return
        layouts = last.layouts("output")
        if layouts and not all(layout == Shard(0) for layout in layouts):
            raise ValueError(
                f"{last.path!r} is the last tensor-parallel layer to run, and gives its output as "
                f"{layouts[0]!r}, but each rank needs that of its own batch: give its style "
                "output_layouts=Shard(0)"
            )
        for handle in self._handles:
            handle.remove()


def check_batch_sizes(layers: Sequence[Layer], group: dist.ProcessGroup) -> None:
    """Compares batch sizes at every layer that takes a part of the joined batch.

    For models without hash tables; the exchange of hash tables compares them at no cost. Cost: a
    collective of 8 bytes a rank for each such layer and forward.
    """
    for layer in layers:
        if Shard(0) in layer.layouts("input"):
            layer.module.register_forward_pre_hook(
                partial(_require_equal_sizes, layer.path, group), prepend=True
            )


def _require_equal_sizes(
    path: str, group: dist.ProcessGroup, module: nn.Module, args: tuple[Any, ...]
) -> None:
    given = args[0]
    if isinstance(given, DTensor):
        return
    own = torch.tensor([len(given)], device=given.device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group=group)
    sizes = [int(size) for size in found]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"{path!r} got batches of {sizes} samples from the ranks that share it, which must be "
            "equal: drop or pad what is left over (DataLoader's drop_last=True)"
        )
