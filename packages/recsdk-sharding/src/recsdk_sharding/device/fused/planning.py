"""Finding the keys of each row: torch sorts and counts, the rest is one launch.

Shape letters: N keys, L distinct rows, with room for the most there can be.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from recsdk_sharding.device.fused.launching import launch
from recsdk_sharding.device.kernels import BagIndex, RowIndex, bags_of_keys, number_runs

__all__ = ["plan_rows"]

_KEYS_PER_PROGRAM = 512


def plan_rows(index: BagIndex, num_rows: int, spare_row: int) -> RowIndex:
    """As `kernels.plan_rows`; the index has where the keys of each row begin, too."""
    num_keys, offsets = len(index.rows_N), index.offsets
    narrow = torch.int32 if num_keys < 2**31 else torch.int64
    sorted_N, order_N = torch.sort(index.rows_N, stable=True)
    run_N = number_runs(sorted_N, narrow)
    rows_L = order_N.new_empty(min(num_keys, num_rows))
    begins_L = order_N.new_empty(len(rows_L) + 1, dtype=narrow)
    # Searched for by each key in the order of rows, bags take longer than the sort.
    own_N = None if offsets is None else bags_of_keys(offsets, num_keys)
    bag_N = order_N if own_N is None else torch.empty_like(own_N)
    launch(
        _find_runs,
        (triton.cdiv(num_keys + 1, _KEYS_PER_PROGRAM),),
        rows_L,
        begins_L,
        bag_N,
        sorted_N,
        order_N,
        run_N,
        own_N,
        num_keys,
        len(rows_L),
        spare_row,
        HAS_BAGS=own_N is not None,
        KEYS=_KEYS_PER_PROGRAM,
    )
    return RowIndex(rows_L, sorted_N, run_N, order_N, bag_N, begins_L)


@triton.jit(do_not_specialize=["num_keys", "num_distinct", "spare_row"])
def _find_runs(
    rows_L,
    begins_L,
    bag_N,
    sorted_N,
    order_N,
    run_N,
    own_N,
    num_keys,
    num_distinct,
    spare_row,
    HAS_BAGS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """A program has KEYS sorted keys, and as many places for rows."""
    at = tl.program_id(0).to(tl.int64) * KEYS + tl.arange(0, KEYS)
    is_key = at < num_keys
    run = tl.load(run_N + at, mask=is_key, other=0)
    before = tl.load(run_N + at - 1, mask=is_key & (at > 0), other=-1)
    is_first = is_key & (run != before)
    row = tl.load(sorted_N + at, mask=is_key, other=0).to(tl.int64)
    tl.store(rows_L + run, row, mask=is_first)
    tl.store(begins_L + run, at.to(begins_L.dtype.element_ty), mask=is_first)
    last = tl.load(run_N + num_keys - 1)
    is_behind = (at > last) & (at <= num_distinct)
    no_row = tl.zeros([KEYS], tl.int64) + spare_row
    tl.store(rows_L + at, no_row, mask=is_behind & (at < num_distinct))
    end = (tl.zeros([KEYS], tl.int64) + num_keys).to(begins_L.dtype.element_ty)
    tl.store(begins_L + at, end, mask=is_behind)
    if HAS_BAGS:
        key = tl.load(order_N + at, mask=is_key, other=0)
        bag = tl.load(own_N + key, mask=is_key, other=0)
        tl.store(bag_N + at, bag, mask=is_key)
