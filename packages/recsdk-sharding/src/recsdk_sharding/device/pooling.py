"""Pooling a batch of rows on a device, and training them in backward.

Shape letters: B bags of a table, M weights that come late, D row width.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.autograd.function import once_differentiable
from torchrec.streamable import Multistreamable

from recsdk_core.nn.scaled_losses import refuse_scaled_loss
from recsdk_sharding.device.batch import TablePlan
from recsdk_sharding.device.parcel import Parcel

__all__ = ["DeviceBatch"]

_Guard: TypeAlias = Callable[[], AbstractContextManager[None]]


@dataclass
class DeviceBatch(Multistreamable):  # type: ignore[misc]
    """The bags that this rank pools, mapped to rows on a device."""

    device: torch.device
    parcel: Parcel
    tables: list[TablePlan]
    num_values: int
    """Numbers that are pooled."""
    training: bool
    weights_M: torch.Tensor | None = None
    """Those that came late."""

    def take_weights(self, weights_M: torch.Tensor) -> None:
        """Takes the weights that came late."""
        self.weights_M = weights_M

    def open(self) -> None:
        """Starts the copies on the current stream."""
        self.parcel.send(self.device)

    def record_stream(self, stream: torch.Stream) -> None:
        """Tells the allocator that work on the stream uses the device memory."""
        self.parcel.record_stream(stream)

    def variable_stride_per_key(self) -> bool:
        """False, in torchrec's words: every feature has the same batch size."""
        return False

    def pool(self, anchor: torch.Tensor, guard: _Guard) -> torch.Tensor:
        """The sums of the bags of all tables as one autograd node: float32 (num_values,).

        The vectors of the bags lie where their plans say; there may be no tables.
        """
        node = _Node(self, guard)
        weights_M = self.weights_M
        wants_grad = anchor.requires_grad or (weights_M is not None and weights_M.requires_grad)
        if torch.is_grad_enabled() and wants_grad:
            apply: Callable[..., torch.Tensor] = _PoolTables.apply
            return apply(node, anchor, weights_M)
        pooled = node.pool()
        node.end()
        return pooled


class _Node:
    """What one autograd node owns from its forward to its backward."""

    def __init__(self, batch: DeviceBatch, guard: _Guard) -> None:
        self.guard = guard
        self._batch = batch
        self._is_spent = False
        self._is_accumulated = False  # the leases of accumulating tables have other keepers

    @property
    def names(self) -> list[str]:
        """Of the tables."""
        return [plan.table.name for plan in self._batch.tables]

    def pool(self) -> torch.Tensor:
        """float32 (num_values,)."""
        batch = self._batch
        pooled = torch.zeros(batch.num_values, device=batch.device)
        for plan in batch.tables:
            table = plan.table
            pooled_BD = table.pool(plan, batch.parcel, batch.weights_M)
            first = 0
            for count, start in plan.blocks:
                block = pooled_BD.narrow(0, first, count)
                pooled.narrow(0, start, count * table.dim).copy_(block.flatten())
                first += count
        return pooled

    def gradients(
        self, grad: torch.Tensor, *, trains: bool, wants_weights: bool
    ) -> torch.Tensor | None:
        """Updates each table once if `trains`; returns the late weights' gradient, if wanted.

        Raises RuntimeError the second time, and if a batch mapped for evaluation is trained.
        """
        if self._is_spent:
            raise RuntimeError(
                "this forward's backward has run already, whether it ended or raised: each forward "
                "takes one backward; run forward again"
            )
        if trains and not self._batch.training:
            raise RuntimeError(
                "this forward was mapped in evaluation mode, so it cannot be trained; call "
                "module.train() before the forward"
            )
        batch = self._batch
        grad_M = None
        if wants_weights:
            assert batch.weights_M is not None
            grad_M = torch.zeros_like(batch.weights_M)
        try:
            self._train(grad, grad_M, trains=trains)
        except BaseException:
            for plan in batch.tables:  # else some tables would be a backward ahead of others
                if plan.accumulation is not None:
                    plan.accumulation.drop()
            raise
        self._is_accumulated = trains
        return grad_M

    def _train(self, grad: torch.Tensor, grad_M: torch.Tensor | None, *, trains: bool) -> None:
        """Fills `grad_M` if it is given; updates the tables if `trains`."""
        batch = self._batch
        for plan in batch.tables:
            table = plan.table
            blocks = [grad.narrow(0, start, n * table.dim) for n, start in plan.blocks]
            grad_BD = (torch.cat(blocks) if len(blocks) != 1 else blocks[0]).view(-1, table.dim)
            if grad_M is not None:
                table.weight_grads(plan, batch.parcel, grad_BD, grad_M)
            if trains:
                table.update(plan, batch.parcel, grad_BD, batch.weights_M)

    def end(self) -> None:
        """Releases the leases: the rows' work is queued, in order."""
        for plan in self._batch.tables:
            is_kept = plan.accumulation is not None and self._is_accumulated
            if plan.lease is not None and not is_kept:
                plan.lease.release()
        self._batch = _NOTHING  # the graph may live on: a loss that is kept, say
        self._is_spent = True


_NOTHING = DeviceBatch(torch.device("cpu"), Parcel(), [], 0, training=False)


class _PoolTables(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, node: _Node, anchor: torch.Tensor, weights_M: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.node = node
        return node.pool()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, torch.Tensor | None]:
        node: _Node = ctx.node
        _, trains, wants_weights = ctx.needs_input_grad
        with node.guard():
            try:
                if trains:
                    refuse_scaled_loss(node.names)
                own = grad.contiguous()
                found = node.gradients(own, trains=trains, wants_weights=wants_weights)
            finally:
                node.end()
        return None, None, found
