"""First values of new rows, written to the stores of tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from recsdk_sharding.device.host_index import NumberedRows, latest_rows
from recsdk_sharding.exchange.parts import shown

if TYPE_CHECKING:
    from recsdk_sharding.device.trained_rows import TrainedRows

__all__ = ["write_new_rows"]


@torch.no_grad()
def write_new_rows(sets: Sequence[Sequence[TrainedRows]]) -> None:
    """Writes the initial rows of all batches that tables have mapped by now.

    `sets`: tables of one store each. Those of a store are written at once. If it raises, they are
    written later.
    """
    stores: dict[int, list[TrainedRows]] = {}
    for tables in sets:
        store = tables[0].store
        store.settle()
        if store.news:  # seldom, once most ids have been seen
            stores.setdefault(id(store), []).extend(each for each in tables if each.has_news)
    for own in stores.values():
        taken = [(table, table.take_new_rows()) for table in own]
        try:
            for table, entries in taken:
                table.copy_left(entries)
            with shown("new_rows"):
                _write_to_store([(table, latest_rows(made)) for table, made in taken if made])
        except BaseException:
            for table, entries in taken:
                table.put_back(entries)
            raise


def _write_to_store(taken: Sequence[tuple[TrainedRows, Sequence[NumberedRows]]]) -> None:
    """Writes new rows of tables of one store, with fresh state; doing it again does no harm."""
    if not taken:
        return
    store = taken[0][0].store
    rows = [each.numbers_n + table.first_row for table, entries in taken for each in entries]
    values = [each.values_nD for _, entries in taken for each in entries]
    rows_n = _joined(rows).to(store.device, non_blocking=True)
    values_nD = _joined(values).to(store.device, non_blocking=True)
    store.weight_RD.index_copy_(0, rows_n, values_nD)
    _make_fresh(taken, rows_n)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor in pinned memory."""
    if len(parts) == 1:
        return parts[0] if parts[0].is_pinned() else parts[0].pin_memory()
    joined = parts[0].new_empty((sum(map(len, parts)), *parts[0].shape[1:]), pin_memory=True)
    return torch.cat(list(parts), out=joined)


def _make_fresh(
    taken: Sequence[tuple[TrainedRows, Sequence[NumberedRows]]], rows_n: torch.Tensor
) -> None:
    """Gives new rows of the store fresh state; runs of tables that begin alike are one."""
    end = 0
    alike: list[tuple[Any, int, int]] = []
    for table, entries in taken:
        begin, end = end, end + sum(len(each.numbers_n) for each in entries)
        block = table.store.block_of(table.stored)
        same = alike and alike[-1][0][0] is block and alike[-1][0][1] == table.stored.fresh
        if same:
            alike[-1] = (alike[-1][0], alike[-1][1], end)
        else:
            alike.append(((block, table.stored.fresh), begin, end))
    for (block, fresh), first, last in alike:
        places_n = block.places(rows_n.narrow(0, first, last - first))
        for name, values in block.state.items():
            values.index_fill_(0, places_n, fresh[name])
