"""Returns pooled partial sums to the ranks whose samples they are of.

torchrec's own way (reduce-scatter, and all-gather in backward) needs equal batch sizes on gloo.
Here both directions are an all-to-all, which takes any sizes and adds in rank order.

Shape letters: B samples of this rank, S samples of all ranks, F features, C columns, W ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.embedding_sharding import BaseEmbeddingDist
from torchrec.distributed.types import Awaitable

from recsdk_sharding.host_dist import HashShardingContext

__all__ = ["RowWiseOutputDist"]


class RowWiseOutputDist(BaseEmbeddingDist[Any, Any, Any]):  # type: ignore[misc]
    """Adds up the ranks' partial sums (S, C) and divides means: float32 (B, C) for each rank.

    In backward every rank gets the gradient of all samples, divided by W as in torchrec's row_wise
    (unless its gradient division is off), so that the loss is the mean over the ranks.
    """

    def __init__(self, group: dist.ProcessGroup, widths: Sequence[int]) -> None:
        super().__init__()
        self._group = group
        self._widths = torch.tensor(widths)

    def forward(
        self, local_embs: torch.Tensor, sharding_ctx: HashShardingContext | None = None
    ) -> Awaitable[torch.Tensor]:
        """Starts sending partial sums; the awaitable gives this rank's pooled vectors."""
        assert sharding_ctx is not None
        divisor_BF = sharding_ctx.divisor_BF
        divisor_BC = None
        if divisor_BF is not None:
            divisor_BC = divisor_BF.repeat_interleave(self._widths, dim=1)
        transfer = _Transfer(self._group, sharding_ctx.batch_size_per_rank, local_embs)
        return _PooledAwaitable(local_embs, transfer, divisor_BC)


class _PooledAwaitable(Awaitable[torch.Tensor]):  # type: ignore[misc]
    def __init__(
        self, partial_SC: torch.Tensor, transfer: _Transfer, divisor_BC: torch.Tensor | None
    ) -> None:
        super().__init__()
        self._partial_SC = partial_SC
        self._transfer = transfer
        self._divisor_BC = divisor_BC

    def _wait_impl(self) -> torch.Tensor:
        apply: Callable[..., torch.Tensor] = _SumOverRanks.apply
        pooled_BC = apply(self._partial_SC, self._transfer)
        return pooled_BC if self._divisor_BC is None else pooled_BC / self._divisor_BC


class _Transfer:
    """The partial sums of one batch on their way."""

    def __init__(
        self, group: dist.ProcessGroup, batch_sizes: list[int], partial_SC: torch.Tensor
    ) -> None:
        self.group = group
        self.batch_sizes = batch_sizes
        self.world_size = dist.get_world_size(group)
        self.batch_size = batch_sizes[dist.get_rank(group)]
        num_columns = partial_SC.shape[1]
        self._sent_SC = partial_SC.detach().contiguous()
        self._parts_WBC = partial_SC.new_empty(self.world_size, self.batch_size, num_columns)
        self._work = dist.all_to_all_single(
            self._parts_WBC.view(-1, num_columns),
            self._sent_SC,
            [self.batch_size] * self.world_size,
            batch_sizes,
            group=group,
            async_op=True,
        )

    def sum(self) -> torch.Tensor:
        """The parts of this rank's samples, added in rank order."""
        self._work.wait()
        total_BC = self._parts_WBC[0].clone()
        for part_BC in self._parts_WBC[1:]:
            total_BC += part_BC
        return total_BC

    def spread(self, grad_BC: torch.Tensor) -> torch.Tensor:
        """The gradients of all ranks' samples (S, C)."""
        grad_SC = grad_BC.new_empty(sum(self.batch_sizes), grad_BC.shape[1])
        dist.all_to_all_single(
            grad_SC,
            grad_BC.repeat(self.world_size, 1),
            self.batch_sizes,
            [self.batch_size] * self.world_size,
            group=self.group,
        )
        return grad_SC


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial_SC: torch.Tensor, transfer: _Transfer) -> torch.Tensor:
        ctx.transfer = transfer
        return transfer.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BC: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad_SC = ctx.transfer.spread(grad_BC)
        if get_gradient_division():
            grad_SC /= ctx.transfer.world_size
        return grad_SC, None
