"""Weights of ids that travel when a batch is looked up, and their gradients on the way back.

Weights that need no gradient are sent with the ids, ahead of time. Weights that do are made by
parameters, which the steps before this one still train: so they are sent when the model's forward
comes to the tables, and their gradients come back in its backward. Which number goes where is
computed on the host, with the ids.

Shape letters: N keys of a group, S keys sent, M keys received, G bags, U bags that have keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torchrec.distributed.comm_ops import get_gradient_division

from recsdk_sharding._batch.uncompiled import uncompiled
from recsdk_sharding.device.parcel import (
    Item,
    Parcel,
    get_optional,
    get_runs,
    put_optional,
    put_runs,
)
from recsdk_sharding.device.runs import Runs, plan_runs, run_sums
from recsdk_sharding.exchange.failures import failing_together

if TYPE_CHECKING:
    from recsdk_sharding._batch.features import Features
    from recsdk_sharding._batch.routing import Requests

__all__ = ["LateWeights", "Send", "exchange_weights", "tied"]

Send: TypeAlias = Callable[
    [torch.Tensor, list[int], list[int], Literal["forward", "backward"]],
    Callable[[], torch.Tensor],
]
"""Starts to send numbers to each rank ("forward" or "backward"); what it returns waits for what
the ranks sent."""


@dataclass(frozen=True)
class _BagItems:
    """How weights add up to those of bags."""

    runs: Runs[Item]
    bag_N: Item
    """Which of the bags that have keys each key is in."""
    filled_U: Item | None
    """The numbers of those bags; None: every bag has keys."""
    num_bags: int


class LateWeights:
    """How the weights of one batch and group of tables travel."""

    def __init__(
        self,
        features: Features,
        requests: Requests,
        num_received: Sequence[int],
        *,
        is_mean: Sequence[bool],
        own_rank: int | None,
        device: torch.device,
    ) -> None:
        """`num_received`: keys from each rank; `is_mean`: of each feature.

        `own_rank`: this rank, if every rank has all keys of all ranks.
        """
        assert requests.positions is not None
        self.sends = requests.num_keys
        """Weights for each rank."""
        self.receives = list(num_received)
        """Weights from each rank."""
        self._own_rank = own_rank
        self._spans = features.key_spans
        self._is_mean = list(is_mean)
        self._num_bags = features.num_bags
        self._device = device
        self._parcel = Parcel(is_pinned=device.type != "cpu")
        positions_S = requests.positions.numpy()
        self._positions = self._parcel.put(positions_S)
        if own_rank is not None:
            first = sum(self.sends[:own_rank])
            positions_S = positions_S[first : first + self.sends[own_rank]]
        self._order = self._parcel.put(np.argsort(positions_S, kind="stable"))
        copies_N = np.bincount(positions_S, minlength=len(features.keys_N))
        self._copies = put_runs(self._parcel, plan_runs(copies_N))
        self._bags = self._plan_bags(features.lengths_G.numpy()) if any(is_mean) else None
        self._parcel.seal()

    def _plan_bags(self, lengths_G: Any) -> _BagItems:
        filled_U = np.flatnonzero(lengths_G)
        is_full = len(filled_U) == len(lengths_G)
        lengths_U = lengths_G[filled_U]
        return _BagItems(
            runs=put_runs(self._parcel, plan_runs(lengths_U)),
            bag_N=self._parcel.put(np.repeat(np.arange(len(filled_U)), lengths_U)),
            filled_U=put_optional(self._parcel, None if is_full else filled_U),
            num_bags=len(lengths_G),
        )

    def open(self) -> None:
        """Starts the copies to the device, on the current stream."""
        self._parcel.send(self._device)

    def record_stream(self, stream: torch.Stream) -> None:
        """Tells the allocator that work on the stream uses the device memory."""
        self._parcel.record_stream(stream)

    def of_group(self, weights: torch.Tensor) -> torch.Tensor:
        """The weights of the group's keys, float32 (N,), of those of the whole batch."""
        moved = weights.to(device=self._device, dtype=torch.float32)
        if self._spans is None:
            return moved
        return torch.cat([moved[span] for span in self._spans])

    def sent(self, weights_N: torch.Tensor) -> torch.Tensor:
        """The weights as they are sent, (S,)."""
        return weights_N.index_select(0, self._parcel.get(self._positions))

    def start_back(self, grad_M: torch.Tensor, send: Send) -> Callable[[], torch.Tensor]:
        """Sends the gradients of what was received; the function waits for those of the sent.

        Replicas have computed the same gradients, so each rank keeps its own and sends none.
        """
        if self._own_rank is None:
            return send(grad_M.contiguous(), self.receives, self.sends, "backward")
        first = sum(self.receives[: self._own_rank])
        own = grad_M.narrow(0, first, self.receives[self._own_rank])
        return lambda: own

    def summed(self, grad_S: torch.Tensor) -> torch.Tensor:
        """The gradient of the group's weights, (N,): the sum of those of all copies."""
        copies = grad_S.index_select(0, self._parcel.get(self._order))[:, None]
        return run_sums(copies, get_runs(self._parcel, self._copies)).squeeze(1)

    def divisors(self, weights_N: torch.Tensor) -> list[torch.Tensor | None]:
        """What to divide each feature's sums by, float32 (G,); None: by nothing.

        Infinite where the weights add up to 0, so that both the mean and its gradients are 0.
        """
        if self._bags is None:
            return [None] * len(self._is_mean)
        sums_G = self._sums_of_bags(weights_N, self._bags)
        divisor_G = sums_G.masked_fill(sums_G == 0, torch.inf)
        parts = divisor_G.split_with_sizes(self._num_bags)
        return [part if mean else None for part, mean in zip(parts, self._is_mean, strict=True)]

    def _sums_of_bags(self, weights_N: torch.Tensor, bags: _BagItems) -> torch.Tensor:
        runs = get_runs(self._parcel, bags.runs)
        apply: Callable[..., torch.Tensor] = _RunSums.apply
        sums_U = apply(weights_N, runs, self._parcel.get(bags.bag_N))
        filled_U = get_optional(self._parcel, bags.filled_U)
        if filled_U is None:
            return sums_U
        return sums_U.new_zeros(bags.num_bags).index_copy(0, filled_U, sums_U)


def exchange_weights(
    ways: Sequence[LateWeights],
    sends: Sequence[Send],
    weights: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
) -> list[torch.Tensor]:
    """Sends the weights (N,) of each group of tables; gives what the ranks sent, (M,), with its
    graph. `group` is of these ranks.

    In backward the gradients go back. They are those of each rank's own loss: torchrec's division
    of the tables' gradients by W is undone. All ranks take part, whatever their weights.
    """
    apply: Callable[..., tuple[torch.Tensor, ...]] = _Exchange.apply
    return list(
        apply(ways, sends, group, torch.zeros(0, dtype=torch.float32, requires_grad=True), *weights)
    )


def tied(tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    """The same tensor; its backward also runs that of the others, with gradients of 0."""
    apply: Callable[..., torch.Tensor] = _Tie.apply
    return apply(tensor, *others)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ways: Sequence[LateWeights],
        sends: Sequence[Send],
        group: dist.ProcessGroup,
        anchor: torch.Tensor,
        *weights: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.ways, ctx.sends, ctx.group = ways, sends, group
        groups = zip(ways, sends, weights, strict=True)
        started = [
            send(way.sent(weights_N), way.sends, way.receives, "forward")
            for way, send, weights_N in groups
        ]
        return tuple(finish() for finish in started)

    @staticmethod
    @uncompiled
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        groups = list(zip(ctx.ways, ctx.sends, grads, strict=True))
        with failing_together(ctx.group):
            started = [way.start_back(grad_M, send) for way, send, grad_M in groups]
            back = [way.summed(finish()) for way, finish in zip(ctx.ways, started, strict=True)]
        if get_gradient_division():
            back = [grad_N * len(ctx.ways[0].sends) for grad_N in back]
        return None, None, None, None, *back


class _RunSums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values_N: torch.Tensor, runs: Runs[torch.Tensor], run_N: torch.Tensor
    ) -> torch.Tensor:
        ctx.run_N = run_N
        return run_sums(values_N.clone()[:, None], runs).squeeze(1)

    @staticmethod
    @uncompiled
    @once_differentiable
    def backward(ctx: Any, grad_U: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad_U.index_select(0, ctx.run_N), None, None


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.others = [(other.shape, other.dtype, other.device) for other in others]
        return tensor.view_as(tensor)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        zeros = [
            torch.zeros(shape, dtype=dtype, device=device) if needed else None
            for (shape, dtype, device), needed in zip(
                ctx.others, ctx.needs_input_grad[1:], strict=True
            )
        ]
        return grad, *zeros
