"""Finding the keys of each row: torch sorts and counts, the rest is one launch.

Shape letters: N keys, L distinct rows, with room for the most there can be.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from recsdk_sharding.device.fused.launching import launch
from recsdk_sharding.device.kernels import BagIndex, RowIndex, number_runs

__all__ = ["plan_rows"]

_KEYS_PER_PROGRAM = 512


def plan_rows(index: BagIndex, num_rows: int, spare_row: int) -> RowIndex:
    """As `kernels.plan_rows`; the index has where the keys of each row begin, too."""
    sorted_N, order_N = torch.sort(index.rows_N, stable=True)
    run_N = number_runs(sorted_N)
    num_keys, offsets = len(order_N), index.offsets
    rows_L = order_N.new_empty(min(num_keys, num_rows))
    narrow = torch.int32 if num_keys < 2**31 else torch.int64
    begins_L = order_N.new_empty(len(rows_L) + 1, dtype=narrow)
    bag_N = order_N if offsets is None else torch.empty_like(order_N, dtype=offsets.dtype)
    launch(
        _find_runs,
        (triton.cdiv(num_keys + 1, _KEYS_PER_PROGRAM),),
        rows_L,
        begins_L,
        bag_N,
        sorted_N,
        order_N,
        run_N,
        offsets,
        num_keys,
        len(rows_L),
        spare_row,
        0 if offsets is None else len(offsets) - 1,
        HAS_OFFSETS=offsets is not None,
        KEYS=_KEYS_PER_PROGRAM,
    )
    return RowIndex(rows_L, sorted_N, run_N, order_N, bag_N, begins_L)


@triton.jit(do_not_specialize=["num_keys", "num_distinct", "spare_row", "num_bags"])
def _find_runs(
    rows_L,
    begins_L,
    bag_N,
    sorted_N,
    order_N,
    run_N,
    offsets,
    num_keys,
    num_distinct,
    spare_row,
    num_bags,
    HAS_OFFSETS: tl.constexpr,
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
    if HAS_OFFSETS:
        key = tl.load(order_N + at, mask=is_key, other=0)
        low = tl.zeros([KEYS], tl.int64)
        high = low + (num_bags - 1)
        while tl.max(high - low, axis=0) > 0:  # the last bag that begins no later than the key
            middle = (low + high + 1) // 2
            is_there = tl.load(offsets + middle, mask=is_key, other=0) <= key
            low = tl.where(is_there, middle, low)
            high = tl.where(is_there, high, middle - 1)
        tl.store(bag_N + at, low.to(bag_N.dtype.element_ty), mask=is_key)
