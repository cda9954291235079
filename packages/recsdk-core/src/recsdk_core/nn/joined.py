"""Pooling the bags of many tables that lie in one array of each kind, as one autograd node.

With many tables this costs the host less than `function.pool_features`: nothing is made for each
feature. Weights of keys, accumulation and `SharedTraining` need `pool_features`.

Shape letters: B bags, C columns, M numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

from recsdk_core.nn.function import Anchor, Guard, Node, run
from recsdk_core.table import Lease, Table
from recsdk_core.tables import JoinedBags, pool_joined, update_joined

__all__ = ["pool_joined_bags"]


def pool_joined_bags(
    tables: Sequence[Table],
    leases: Sequence[Lease],
    bags: JoinedBags,
    shape: tuple[int, ...],
    anchor: Anchor,
    guard: Guard = nullcontext,
    pooled: range | None = None,
    out: Callable[[int], torch.Tensor] | None = None,
) -> torch.Tensor:
    """The pooled vectors of many tables' bags, float32 of `shape`, (M,) or (B, C).

    `leases`: the batch that each table's rows were mapped under. What lies where is as in
    `recsdk_core.pool_joined`; leases, backward and its errors are as in `pool_features`, and
    `pooled` is as in `pack_features`: all pieces are trained. `out` makes the memory of a result
    of one dimension, float32 (M,); None: new memory.
    """
    return run(_Node(tables, leases, bags, shape, guard, pooled, out), anchor)


class _Node(Node):
    """A node that has no blocks: its bags lie side by side."""

    def __init__(
        self,
        tables: Sequence[Table],
        leases: Sequence[Lease],
        bags: JoinedBags,
        shape: tuple[int, ...],
        guard: Guard,
        pooled: range | None,
        out: Callable[[int], torch.Tensor] | None,
    ) -> None:
        super().__init__(shape, (), [], guard=guard)
        self.tables, self.leases = list(tables), list(leases)
        self.trained = [[] for _ in self.tables]  # none has weights
        self.waiting = [None] * len(self.tables)
        self._bags: JoinedBags | None = bags
        self._pooled = pooled
        self._out = out

    def vectors(self) -> torch.Tensor:
        assert self._bags is not None
        out = None if self._out is None else self._out(self.shape[0])
        found: torch.Tensor = pool_joined(self.tables, self._bags, self.shape, self._pooled, out)
        return found

    def update(
        self, given: Sequence[torch.Tensor], wanted: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        assert self._bags is not None
        update_joined(self.tables, self._bags, given[0])
        return []

    def end(self) -> None:
        super().end()
        self._bags = None
