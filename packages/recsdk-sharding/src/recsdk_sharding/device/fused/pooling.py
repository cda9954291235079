"""Pooling rows to bags in one launch.

Shape letters: R rows of the store, N keys, B bags, S samples, F features, C columns, D row width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from recsdk_sharding.device import kernels
from recsdk_sharding.device.fused.launching import (
    MOST_BAGS,
    PARCELLED,
    launch,
    places_of,
    spread_mask,
    tile_of,
    vector_begins,
)
from recsdk_sharding.device.kernels import BagIndex
from recsdk_sharding.device.vectors import BagMatrix, rows_of

__all__ = ["pool_into", "pool_rows"]


def pool_rows(store_RD: torch.Tensor, index: BagIndex) -> torch.Tensor:
    """As `kernels.pool_rows`; the store may have rows of 16 bits."""
    dim, num_bags = store_RD.shape[1], index.num_bags
    pooled_BD = torch.empty(num_bags, dim, dtype=torch.float32, device=store_RD.device)
    if pool_into(store_RD, index, rows_of(pooled_BD)):
        return pooled_BD
    return kernels.pool_rows(store_RD, index)


def pool_into(store_RD: torch.Tensor, index: BagIndex, matrix: BagMatrix) -> bool:
    """As "pool_into" of `kernels.register_kernel`; False for rows that are too wide."""
    dim, num_bags = store_RD.shape[1], index.num_bags
    tile = tile_of(dim)
    if tile is None or not store_RD.is_contiguous() or num_bags > MOST_BAGS:
        return False
    places = places_of(matrix)
    launch(
        _pool,
        (triton.cdiv(num_bags, tile.rows),),
        matrix.values_SC,
        *places.args,
        store_RD,
        index.rows_N,
        index.offsets,
        index.weights_N,
        index.divisors_B,
        num_bags,
        **places.constants,
        HAS_OFFSETS=index.offsets is not None,
        HAS_WEIGHTS=index.weights_N is not None,
        HAS_DIVISORS=index.divisors_B is not None,
        DIM=dim,
        BAGS=tile.rows,
        COLUMNS=tile.columns,
    )
    return True


@triton.jit(
    do_not_specialize=["num_bags", "num_samples", "factor", "shift"],
    do_not_specialize_on_alignment=PARCELLED,
)
def _pool(
    values_SC,
    starts_F,
    num_samples,
    factor,
    shift,
    stride,
    store_RD,
    rows_N,
    offsets,
    weights_N,
    divisors_B,
    num_bags,
    HAS_STARTS: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_DIVISORS: tl.constexpr,
    DIM: tl.constexpr,
    BAGS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program has BAGS bags; their keys are added in order."""
    bag = tl.program_id(0) * BAGS + tl.arange(0, BAGS)
    column = tl.arange(0, COLUMNS)
    is_bag = bag < num_bags
    is_column = column[None, :] < DIM
    if HAS_OFFSETS:
        begin = tl.load(offsets + bag, mask=is_bag, other=0).to(tl.int64)
        length = tl.load(offsets + bag + 1, mask=is_bag, other=0).to(tl.int64) - begin
    else:
        begin = bag.to(tl.int64)
        length = is_bag.to(tl.int64)
    sum = tl.zeros([BAGS, COLUMNS], tl.float32)
    for number in tl.range(0, tl.max(length, axis=0), loop_unroll_factor=4):
        is_key = number < length
        row = tl.load(rows_N + begin + number, mask=is_key, other=0).to(tl.int64)
        mask = spread_mask(is_key) & is_column
        value = tl.load(store_RD + row[:, None] * DIM + column[None, :], mask=mask, other=0.0)
        value = value.to(tl.float32)
        if HAS_WEIGHTS:
            weight = tl.load(weights_N + begin + number, mask=is_key, other=0.0)
            value = value * weight[:, None]
        sum += value
    if HAS_DIVISORS:
        divisor = tl.load(divisors_B + bag, mask=is_bag, other=1.0)
        sum = tl.div_rn(sum, tl.broadcast_to(divisor[:, None], [BAGS, COLUMNS]))
    own = tl.where(is_bag, bag, 0)
    begins = vector_begins(own, starts_F, num_samples, factor, shift, stride, HAS_STARTS, UNIT)
    place = begins[:, None] + column[None, :]
    tl.store(values_SC + place, sum, mask=is_bag[:, None] & is_column)
