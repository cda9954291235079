"""Pooling a batch of rows on a device, and training them in backward.

Shape letters: N keys, K keys that read initial rows, U distinct ones, R rows that a kernel reads, B
bags of a set of tables or samples, C columns, M weights that come late, D row width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch.autograd.function import once_differentiable
from torchrec.streamable import Multistreamable

from recsdk_core import Lease, release_leases
from recsdk_core.batch_leases import BatchLeases
from recsdk_core.nn.scaled_losses import refuse_scaled_loss
from recsdk_sharding.device.batch import BagItems, TableSet
from recsdk_sharding.device.kernels import (
    BagIndex,
    RowIndex,
    bags_of_keys,
    fused_kernel,
    kernel,
    plan_rows,
    pool_rows,
    sum_by_position,
)
from recsdk_sharding.device.new_rows import write_new_rows
from recsdk_sharding.device.parcel import Parcel, get_optional
from recsdk_sharding.device.training import train_set
from recsdk_sharding.device.vectors import (
    gradients_of,
    in_a_row,
    matrix_of,
    rows_of,
    side_by_side,
)

__all__ = ["DeviceBatch"]

_Anchor: TypeAlias = Callable[[], torch.Tensor]
_Guard: TypeAlias = Callable[[], AbstractContextManager[None]]


@dataclass
class DeviceBatch(Multistreamable):  # type: ignore[misc]
    """The bags that this rank pools, mapped to rows on a device."""

    device: torch.device
    parcel: Parcel
    sets: Sequence[TableSet]
    leases: list[Sequence[Lease]]
    """What the keys of each set's tables are under."""
    num_values: int
    """Numbers that are pooled; not used with a `shape`."""
    shape: tuple[int, int] | None
    """(B, C) of the matrix of results, if bags are pooled straight into it."""
    training: bool
    weights_M: torch.Tensor | None = None
    """Those that came late."""
    indexes: list[RowIndex | None] = field(default_factory=list)
    """Of each set that is trained, once the batch is open; None: it has no keys."""

    def __post_init__(self) -> None:
        self.in_flight = BatchLeases([lease for of_set in self.leases for lease in of_set])

    def take_weights(self, weights_M: torch.Tensor) -> None:
        """Takes the weights that came late."""
        self.weights_M = weights_M

    @torch.no_grad()
    def open(self) -> None:
        """Starts the copies, and finds what belongs to which row, on the current stream."""
        self.parcel.send(self.device)
        if not self.training or self.indexes:
            return
        plan = kernel(self.device.type, "plan_rows", plan_rows)
        for each in self.sets:
            index = self.bag_index(each.bags)
            num_rows = len(each.tables[0].store.weight_RD)
            is_empty = len(index.rows_N) == 0
            self.indexes.append(None if is_empty else plan(index, num_rows, each.spare_row))

    def bag_index(self, items: BagItems, weights_N: torch.Tensor | None = None) -> BagIndex:
        """Keys of a set, on the device; `weights_N`: theirs, if they came late."""
        own = get_optional(self.parcel, items.weights_N) if weights_N is None else weights_N
        return BagIndex(
            rows_N=self.parcel.get(items.rows_N),
            offsets=get_optional(self.parcel, items.offsets),
            weights_N=own,
        )

    def rows_of_keys(self, plan: TableSet, items: BagItems) -> torch.Tensor:
        """What each key of bags of a set reads, float32 (N, D)."""
        rows_N = self.parcel.get(items.rows_N)
        rows_ND = plan.tables[0].store.weight_RD.index_select(0, rows_N)
        if items.initial is not None:
            values_UD = self.parcel.get(items.initial.values).view(-1, plan.dim)
            values_KD = values_UD.index_select(0, self.parcel.get(items.initial.which_K))
            rows_ND.index_copy_(0, self.parcel.get(items.initial.places_K), values_KD)
        return rows_ND

    def record_stream(self, stream: torch.Stream) -> None:
        """Tells the allocator that work on the stream uses the device memory."""
        self.parcel.record_stream(stream)
        for index in self.indexes:
            for tensor in [] if index is None else index.tensors:
                if tensor.device.type != "cpu":
                    tensor.record_stream(stream)

    def variable_stride_per_key(self) -> bool:
        """False, in torchrec's words: every feature has the same batch size."""
        return False

    def pool(self, anchor: _Anchor, guard: _Guard) -> torch.Tensor:
        """The bags of all tables as one autograd node: float32 (num_values,), or of the `shape`.

        The vectors of the bags lie where their plans say; there may be no tables.
        """
        own = anchor()
        node = _Node(self, anchor, guard)
        weights_M = self.weights_M
        wants_grad = own.requires_grad or (weights_M is not None and weights_M.requires_grad)
        if torch.is_grad_enabled() and wants_grad:
            apply: Callable[..., torch.Tensor] = _PoolTables.apply
            return apply(node, own, weights_M)
        pooled = node.pool()
        node.end()
        return pooled


class _Node:
    """What one autograd node owns from its forward to its backward."""

    def __init__(self, batch: DeviceBatch, anchor: _Anchor, guard: _Guard) -> None:
        self.guard = guard
        self._batch = batch
        self._anchor: _Anchor | None = anchor
        self._is_spent = False
        self._is_accumulated = False  # the leases of accumulating tables have other keepers

    @torch.no_grad()
    def pool(self) -> torch.Tensor:
        """float32 (num_values,), or of the shape."""
        batch = self._batch
        write_new_rows([each.tables for each in batch.sets])
        for each in batch.sets:
            for table, last_call in each.begins:
                table.begin_rows(last_call)
        into = fused_kernel(batch.device.type, "pool_into")
        if batch.shape is not None and batch.sets and into is not None:
            values_SC = torch.empty(batch.shape, dtype=torch.float32, device=batch.device)
            for each in batch.sets:
                self._pool_set_into(each, values_SC, into)
            return values_SC
        pooled = [self._pool_set(each) for each in batch.sets]
        if batch.shape is not None:
            return side_by_side(batch.sets, pooled, batch.shape, batch.device)
        return in_a_row(batch.sets, pooled, batch.num_values, batch.device)

    def _pool_set_into(
        self, plan: TableSet, values_SC: torch.Tensor, into: Callable[..., bool]
    ) -> None:
        """Writes the vectors of a set's bags to their columns."""
        rows_RD, index = self._what_is_pooled(plan)
        matrix = matrix_of(plan, self._batch.parcel, values_SC)
        if not into(rows_RD, index, matrix):
            matrix.take(kernel(values_SC.device.type, "pool_rows", pool_rows)(rows_RD, index))

    def _pool_set(self, plan: TableSet) -> torch.Tensor:
        """The vectors of a set's bags, float32 (B, D); those that nobody reads are left out."""
        run = kernel(self._batch.device.type, "pool_rows", pool_rows)
        pooled_BD: torch.Tensor = run(*self._what_is_pooled(plan))
        return pooled_BD

    def _what_is_pooled(self, plan: TableSet) -> tuple[torch.Tensor, BagIndex]:
        """Rows, the store's or those of the keys, (R, D), and which of them to which bags."""
        batch = self._batch
        late = _late_weights(plan, batch)
        bags = plan.bags if plan.read is None else plan.read.bags
        if plan.read is None:
            index = batch.bag_index(bags, late)
        else:
            index = batch.bag_index(bags)
            if late is not None:
                own = late.narrow(0, plan.read.first_key, len(index.rows_N))
                index = replace(index, weights_N=own)
        index = replace(index, divisors_B=get_optional(batch.parcel, plan.divisors_B))
        rows_RD = plan.tables[0].store.weight_RD
        if bags.initial is not None:
            rows_RD = batch.rows_of_keys(plan, bags)
            every_N = torch.arange(len(rows_RD), dtype=index.rows_N.dtype, device=rows_RD.device)
            index = replace(index, rows_N=every_N)
        return rows_RD, index

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
        assert self._anchor is not None
        # The table may have been frozen since the forward.
        trains = trains and self._anchor().requires_grad
        if trains and not self._batch.training:
            raise RuntimeError(
                "this forward was mapped in evaluation mode, so it cannot be trained; call "
                "module.train() before the forward"
            )
        if trains:
            refuse_scaled_loss(table.name for each in self._batch.sets for table in each.tables)
        batch = self._batch
        grad_M = None
        if wants_weights:
            assert batch.weights_M is not None
            grad_M = torch.zeros_like(batch.weights_M)
        try:
            self._train(grad, grad_M, trains=trains)
        except BaseException:
            for each in batch.sets:  # else some tables would be one backward ahead
                for accumulation in each.accumulations:
                    accumulation.drop()
            raise
        self._is_accumulated = trains
        return grad_M

    @torch.no_grad()
    def _train(self, grad: torch.Tensor, grad_M: torch.Tensor | None, *, trains: bool) -> None:
        """Fills `grad_M` if it is given; updates the tables if `trains`."""
        batch = self._batch
        for number, plan in enumerate(batch.sets):
            grads = gradients_of(plan, batch.parcel, grad)
            if plan.divisors_B is not None:
                divided_BD = grads.joined() / batch.parcel.get(plan.divisors_B)[:, None]
                grads = rows_of(divided_BD.contiguous())  # of rows that overlap they lie by columns
            weights_N = _late_weights(plan, batch)
            if grad_M is not None:
                self._add_weight_grads(plan, grads.joined(), grad_M)
            if trains:
                early = get_optional(batch.parcel, plan.bags.weights_N)
                own = early if weights_N is None else weights_N
                train_set(plan, batch.indexes[number], grads, own, batch.leases[number])

    def _add_weight_grads(
        self, plan: TableSet, grad_BD: torch.Tensor, grad_M: torch.Tensor
    ) -> None:
        """Adds the gradient of each late weight: the dot product of its bag's gradient and its row.

        Column ranges of a table share their weights, so places may come again: they are added up
        without atomic operations.
        """
        batch, store = self._batch, plan.tables[0].store
        assert plan.places_N is not None
        store.settle()
        index = batch.bag_index(plan.bags)
        if len(index.rows_N) == 0:
            return
        grads_ND = grad_BD
        if index.offsets is not None:
            grads_ND = grad_BD.index_select(0, bags_of_keys(index.offsets, len(index.rows_N)))
        dots_N1 = (batch.rows_of_keys(plan, plan.bags) * grads_ND).sum(1, keepdim=True)
        places_N = batch.parcel.get(plan.places_N)
        grad_M += sum_by_position(dots_N1, places_N, len(grad_M)).squeeze(1)

    def end(self) -> None:
        """Releases the leases: the rows' work is queued, in order."""
        pairs = zip(self._batch.sets, self._batch.leases, strict=True)
        ended = [
            leases for each, leases in pairs if not (each.accumulations and self._is_accumulated)
        ]
        release_leases([lease for leases in ended for lease in leases])
        self._batch, self._anchor = (
            _NOTHING,
            None,
        )  # the graph may live on: a loss that is kept, say
        self._is_spent = True


_NOTHING = DeviceBatch(torch.device("cpu"), Parcel(), [], [], 0, None, training=False)


def _late_weights(plan: TableSet, batch: DeviceBatch) -> torch.Tensor | None:
    if plan.places_N is None or batch.weights_M is None:
        return None
    return batch.weights_M.detach().index_select(0, batch.parcel.get(plan.places_N))


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
                own = grad if grad.stride(-1) == 1 else grad.contiguous()
                found = node.gradients(own, trains=trains, wants_weights=wants_weights)
            finally:
                node.end()
        return None, None, found
