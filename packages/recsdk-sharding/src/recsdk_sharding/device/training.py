"""One optimizer update of the tables of a set, with the gradients of their bags.

A kernel may do all of it at once; else gradients are summed, looked at, and the rows updated.

Shape letters: N keys, B bags, L distinct rows with room for the most there can be, T tables (2T:
two numbers for each), D row width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from recsdk_core import Lease, NonFiniteError
from recsdk_sharding.device.batch import TableSet
from recsdk_sharding.device.clocks import alike
from recsdk_sharding.device.kernels import (
    RowIndex,
    RowUpdate,
    fused_kernel,
    join_gradients,
    kernel,
    noting_kernels,
    sum_gradients,
)
from recsdk_sharding.device.optimizers import update_rows
from recsdk_sharding.device.vectors import BagMatrix
from recsdk_sharding.device.writes import Write

if TYPE_CHECKING:
    from recsdk_sharding.device.table import DeviceTable

__all__ = ["train_set"]


def train_set(
    plan: TableSet,
    index: RowIndex | None,
    grads: BagMatrix,
    weights_N: torch.Tensor | None,
    leases: Sequence[Lease],
) -> None:
    """One update, or its share if the set's table accumulates; `index`: None without keys.

    `leases`: what the keys of each table are under.

    If it raises, no row, state or count of the tables has changed.
    """
    with noting_kernels() as kernels:
        _train(plan, index, grads, weights_N, leases, kernels)


def _train(
    plan: TableSet,
    index: RowIndex | None,
    grads: BagMatrix,
    weights_N: torch.Tensor | None,
    leases: Sequence[Lease],
    kernels: Sequence[str],
) -> None:
    """As `train_set`; `kernels`: the names of those that are chosen meanwhile."""
    store = plan.tables[0].store
    store.settle()
    accumulation = plan.accumulations[0] if plan.accumulations else None
    found = None
    if index is not None:
        if accumulation is None and _train_at_once(plan, grads, index, weights_N, kernels):
            return
        sums = kernel(store.device.type, "sum_gradients", sum_gradients)
        found = index.rows_L, sums(grads.joined(), index, weights_N)
    if accumulation is None:
        _update(plan, found, kernels)
        return
    [lease] = leases  # a table that accumulates is alone
    parts = accumulation.add([] if found is None else [found], lease)
    if parts is None:
        return
    try:
        if len(parts) > 1:
            rows, sums_of = zip(*parts, strict=True)
            found = join_gradients(list(rows), list(sums_of), len(store.weight_RD), plan.spare_row)
        else:
            found = parts[0] if parts else None
        _update(plan, found, kernels)
    finally:
        accumulation.drop()


def _train_at_once(
    plan: TableSet,
    grads: BagMatrix,
    index: RowIndex,
    weights_N: torch.Tensor | None,
    kernels: Sequence[str],
) -> bool:
    """Has one kernel make the whole update; false, and nothing done, if none does."""
    first = plan.tables[0]
    store = first.store
    run = fused_kernel(store.device.type, "train_rows")
    if run is None or first.on_nonfinite == "raise" or len(alike(plan.tables)) > 1:
        return False
    step, block = first.next_step(), store.block_of(first.stored)
    update = RowUpdate(
        step=step,
        store_RD=store.weight_RD,
        state=block.state,
        places_L=block.places(index.rows_L),
        skips_nonfinite=first.on_nonfinite == "skip",
        nonfinite_2T=store.counts(),
        ends_2T=store.ends(),
        is_updated_R=store.is_updated_R,
    )
    if not run(update, grads, index, weights_N):
        return False
    store.writes.commit([partial(first.clock.take, step, kernels)], has_begun=True)
    return True


def _update(
    plan: TableSet, found: tuple[torch.Tensor, torch.Tensor] | None, kernels: Sequence[str]
) -> None:
    """Updates tables that are alike at once."""
    for tables in alike(plan.tables):
        if found is None:
            tables[0].clock.take(tables[0].next_step())
        else:
            _update_alike(plan, tables, *found, kernels)


def _update_alike(
    plan: TableSet,
    tables: Sequence[DeviceTable],
    rows_L: torch.Tensor,
    grad_LD: torch.Tensor,
    kernels: Sequence[str],
) -> None:
    """One update of some of a set's tables. The spare row takes what must not be written."""
    first = tables[0]
    store, step, how = first.store, first.next_step(), first.on_nonfinite
    spare_row = plan.spare_row
    places_L = store.places_of(rows_L)
    # The largest number of a row's gradient is none if one of them is none.
    is_bad_L = (torch.linalg.vector_norm(grad_LD, torch.inf, dim=1) < torch.inf).logical_not_()
    written_L = rows_L
    if len(tables) < len(plan.tables):
        spare_row = max(table.spare_row_of_store for table in tables)
        is_other_2T = store.of_others([table.stored for table in tables])
        is_other_L = is_other_2T.index_select(0, places_L)
        is_bad_L &= is_other_L.logical_not()
        written_L = torch.where(is_other_L | (rows_L == plan.spare_row), spare_row, written_L)
    counts_2T = store.counts_with(places_L, is_bad_L)
    if how == "raise":
        _require_finite(tables, counts_2T, store.counts())
    if how == "skip":
        written_L = torch.where(is_bad_L, spare_row, written_L)
    block = store.block_of(first.stored)
    run = kernel(store.device.type, "update_rows", update_rows)
    writes = run(step, store.weight_RD, block.state, written_L, grad_LD, block.places(written_L))
    along: list[Write] = [
        partial(first.clock.take, step, kernels),
        partial(setattr, store, "nonfinite_2T", counts_2T),
    ]
    if store.is_updated_R is not None:
        along.append(partial(store.is_updated_R.index_fill_, 0, written_L, 1))
    along.append(store.restore_spare_rows)
    if writes is None:  # a kernel that has made them
        store.writes.commit(along, has_begun=True)
    else:
        store.writes.commit([*writes[:1], *along, *writes[1:]])


def _require_finite(
    tables: Sequence[DeviceTable], counts_2T: torch.Tensor, before_2T: torch.Tensor
) -> None:
    """Raises NonFiniteError for gradients that came on top; waits for the device."""
    counts = (counts_2T - before_2T).tolist()
    for table in tables:
        number = counts[2 * table.store.tables.index(table.stored)]
        if number:
            raise NonFiniteError(
                f"table {table.name!r}: the gradient of {number} rows is infinite or not a number; "
                "lower the learning rate, clip gradients, or set on_nonfinite to skip"
            )
