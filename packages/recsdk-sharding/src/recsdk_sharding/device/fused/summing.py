"""Adding up the gradients of each row, in a fixed order also where a row has a great many.

The keys of a row, a run, lie side by side in the order of the batch. From its beginning a run is
cut into spans of 2048 keys, what is left into pieces of 32, and what is left then, the tail, is
single keys. Programs of their own add up spans and pieces, from the first key or piece to the last;
who wants the sum of a run adds its spans, then its pieces, then its tail, each from the first on.
So the sum of a row depends on its own gradients alone, its bits too, and no program has long to do.

The sum of the piece that begins at key k lies at k // 32 of a buffer. No two pieces share a place,
for each is 32 long. So the program of a place finds its piece, if there is one, without a search:
it is in the run of the place's last key. Spans likewise.

Shape letters: N keys, B bags, L distinct rows with room for the most there can be, P pieces, S
spans, D row width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from recsdk_sharding.device import kernels
from recsdk_sharding.device.fused.launching import (
    MOST_BAGS,
    PARCELLED,
    Tile,
    launch,
    places_of,
    spread_mask,
    tile_of,
    vector_begins,
)
from recsdk_sharding.device.kernels import RowIndex
from recsdk_sharding.device.vectors import BagMatrix, rows_of

__all__ = ["PIECE", "SPAN", "Parts", "begins_of", "parts_of", "sum_gradients", "sum_of_runs"]

PIECE = 32
_PIECES_PER_SPAN = 64
SPAN = PIECE * _PIECES_PER_SPAN
_AT_ONCE = 8
"""How many items of a sum are read before the first is added: reading takes long."""


@dataclass(frozen=True)
class Parts:
    """What sums of runs are made of."""

    grads: torch.Tensor
    """A matrix that has the gradients of bags."""
    vectors_N: torch.Tensor
    """Where that of each sorted key begins, in steps, int32 or int64."""
    step: int
    """Of how many units of numbers."""
    unit: int
    """How many numbers are one."""
    begins_L: torch.Tensor
    """Where runs begin, and N behind the last: (L + 1,)."""
    pieces_PD: torch.Tensor
    spans_SD: torch.Tensor


def sum_gradients(
    grad_BD: torch.Tensor, index: RowIndex, weights_N: torch.Tensor | None
) -> torch.Tensor:
    """As `kernels.sum_gradients`; behind the last row are zeros."""
    tile = tile_of(grad_BD.shape[1])
    if tile is None:
        return kernels.sum_gradients(grad_BD, index, weights_N)
    own_BD = grad_BD if grad_BD.stride(1) == 1 else grad_BD.contiguous()
    parts = parts_of(rows_of(own_BD), index, weights_N, tile)
    num_rows, dim = len(index.rows_L), grad_BD.shape[1]
    sums_LD = own_BD.new_empty(num_rows, dim)
    launch(
        _sum_all,
        (triton.cdiv(num_rows, tile.rows),),
        sums_LD,
        parts.grads,
        parts.vectors_N,
        parts.step,
        index.order_N,
        weights_N,
        parts.begins_L,
        parts.pieces_PD,
        parts.spans_SD,
        num_rows,
        UNIT=parts.unit,
        HAS_WEIGHTS=weights_N is not None,
        DIM=dim,
        PIECE=PIECE,
        SPAN=SPAN,
        RUNS=tile.rows,
        COLUMNS=tile.columns,
    )
    return sums_LD


def parts_of(
    grads: BagMatrix, index: RowIndex, weights_N: torch.Tensor | None, tile: Tile
) -> Parts:
    """Adds up the pieces and spans of all runs."""
    if grads.starts_F is not None and grads.num_bags > MOST_BAGS:
        grads = rows_of(grads.joined())
    values_SC, dim, places = grads.values_SC, grads.dim, places_of(grads)
    num_keys, begins_L = len(index.order_N), begins_of(index)
    pieces_PD = values_SC.new_empty(num_keys // PIECE, dim)
    spans_SD = values_SC.new_empty(num_keys // SPAN, dim)
    unit = places.constants["UNIT"]
    vectors_N, step = index.bag_N, values_SC.stride(0) // unit
    if grads.starts_F is not None:  # found once, not by each thread that has some of a vector
        is_wide = len(values_SC) * step >= 2**31
        vectors_N = begins_L.new_empty(num_keys, dtype=torch.int64 if is_wide else torch.int32)
        step = 1
    launch(
        _sum_pieces,
        (triton.cdiv(num_keys, tile.rows * PIECE),),
        pieces_PD,
        vectors_N,
        values_SC,
        *places.args,
        index.bag_N,
        index.order_N,
        weights_N,
        index.run_N,
        begins_L,
        num_keys,
        **places.constants,
        HAS_WEIGHTS=weights_N is not None,
        DIM=dim,
        PIECE=PIECE,
        PLACES=tile.rows,
        COLUMNS=tile.columns,
        AT_ONCE=_AT_ONCE,
    )
    launch(
        _sum_spans,
        (triton.cdiv(len(spans_SD), tile.rows),),
        spans_SD,
        pieces_PD,
        index.run_N,
        begins_L,
        len(spans_SD),
        DIM=dim,
        PIECE=PIECE,
        PIECES=_PIECES_PER_SPAN,
        PLACES=tile.rows,
        COLUMNS=tile.columns,
        AT_ONCE=_AT_ONCE,
    )
    return Parts(values_SC, vectors_N, step, unit, begins_L, pieces_PD, spans_SD)


def begins_of(index: RowIndex) -> torch.Tensor:
    """Where the keys of each row begin among the sorted, and N behind the last: (L + 1,)."""
    if index.begins_L is not None:
        return index.begins_L
    every_L = torch.arange(len(index.rows_L) + 1, device=index.run_N.device)
    return torch.searchsorted(index.run_N, every_L)


@triton.jit
def _first_of_place(run_N, begins_L, place, num_places, LENGTH: tl.constexpr):
    """The part of LENGTH keys that begins in each place: its first key, and whether it is there."""
    is_place = place < num_places
    last = (place + 1) * LENGTH - 1
    run = tl.load(run_N + last, mask=is_place, other=0)
    begin = tl.load(begins_L + run, mask=is_place, other=0)
    end = tl.load(begins_L + run + 1, mask=is_place, other=0)
    first = begin + (last.to(begin.dtype) - begin) // LENGTH * LENGTH
    return first, is_place & (end - first >= LENGTH)  # a sum could pass 2 ** 31


@triton.jit(
    do_not_specialize=["num_samples", "factor", "shift", "num_keys"],
    do_not_specialize_on_alignment=PARCELLED,
)
def _sum_pieces(
    pieces_PD,
    vectors_N,
    grads_SC,
    starts_F,
    num_samples,
    factor,
    shift,
    stride,
    bag_N,
    order_N,
    weights_N,
    run_N,
    begins_L,
    num_keys,
    HAS_STARTS: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    DIM: tl.constexpr,
    PIECE: tl.constexpr,
    PLACES: tl.constexpr,
    COLUMNS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """A program has PLACES places for pieces, and with starts the vectors of the keys there."""
    begin = tl.program_id(0).to(tl.int64) * PLACES
    if HAS_STARTS:
        at = begin * PIECE + tl.arange(0, PLACES * PIECE)
        is_key = at < num_keys
        own = tl.load(bag_N + at, mask=is_key, other=0)
        begins = vector_begins(own, starts_F, num_samples, factor, shift, stride, HAS_STARTS, UNIT)
        tl.store(vectors_N + at, (begins // UNIT).to(vectors_N.dtype.element_ty), mask=is_key)
    place = begin + tl.arange(0, PLACES)
    first, is_there = _first_of_place(run_N, begins_L, place, num_keys // PIECE, PIECE)
    if tl.max(is_there.to(tl.int32), axis=0) > 0:
        column = tl.arange(0, COLUMNS)[None, :]
        mask = is_there[:, None] & (column < DIM)
        sum = tl.zeros([PLACES, COLUMNS], tl.float32)
        for number in tl.range(0, PIECE, loop_unroll_factor=AT_ONCE):
            bag = tl.load(bag_N + first + number, mask=is_there, other=0)
            vector = vector_begins(
                bag, starts_F, num_samples, factor, shift, stride, HAS_STARTS, UNIT
            )
            value = tl.load(grads_SC + vector[:, None] + column, mask=mask, other=0.0)
            if HAS_WEIGHTS:
                key = tl.load(order_N + first + number, mask=is_there, other=0)
                weight = tl.load(weights_N + key, mask=is_there, other=0.0)
                value = value * weight[:, None]
            sum += value
        tl.store(pieces_PD + place[:, None] * DIM + column, sum, mask=mask)


@triton.jit(do_not_specialize=["num_spans"])
def _sum_spans(
    spans_SD,
    pieces_PD,
    run_N,
    begins_L,
    num_spans,
    DIM: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    PLACES: tl.constexpr,
    COLUMNS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """A program has PLACES places for spans."""
    place = tl.program_id(0).to(tl.int64) * PLACES + tl.arange(0, PLACES)
    first, is_there = _first_of_place(run_N, begins_L, place, num_spans, PIECE * PIECES)
    if tl.max(is_there.to(tl.int32), axis=0) > 0:
        column = tl.arange(0, COLUMNS)[None, :]
        mask = is_there[:, None] & (column < DIM)
        item = pieces_PD + (first // PIECE).to(tl.int64)[:, None] * DIM + column
        sum = tl.zeros([PLACES, COLUMNS], tl.float32)
        for number in tl.range(0, PIECES, loop_unroll_factor=AT_ONCE):
            sum += tl.load(item + number * DIM, mask=mask, other=0.0)
        tl.store(spans_SD + place[:, None] * DIM + column, sum, mask=mask)


@triton.jit
def _plus_places(sum, sums_QD, place, count, DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """`sum` and what `count` places have from each `place` on."""
    column = tl.arange(0, COLUMNS)[None, :]
    item = sums_QD + place.to(tl.int64)[:, None] * DIM + column
    for number in range(tl.max(count, axis=0)):
        mask = (number < count)[:, None] & (column < DIM)
        sum += tl.load(item + number * DIM, mask=mask, other=0.0)
    return sum


@triton.jit
def sum_of_runs(
    grads,
    vectors_N,
    step,
    order_N,
    weights_N,
    pieces_PD,
    spans_SD,
    begin,
    end,
    UNIT: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    DIM: tl.constexpr,
    PIECE: tl.constexpr,
    SPAN: tl.constexpr,
    RUNS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The sums of RUNS runs, whole rows; `begin`, `end`: their keys, (RUNS,)."""
    column = tl.arange(0, COLUMNS)[None, :]
    sum = tl.zeros([RUNS, COLUMNS], tl.float32)
    at = begin
    longest = tl.max(end - begin, axis=0)
    if longest >= PIECE:
        num_spans = (end - at) // SPAN
        sum = _plus_places(sum, spans_SD, at // SPAN, num_spans, DIM, COLUMNS)
        at += num_spans * SPAN
        num_pieces = (end - at) // PIECE
        sum = _plus_places(sum, pieces_PD, at // PIECE, num_pieces, DIM, COLUMNS)
        at += num_pieces * PIECE
        longest = tl.max(end - at, axis=0)
    count = end - at
    for number in range(0, longest, 2):
        for more in tl.static_range(2):  # most tails are short: a pair is read at once
            key = at + number + more
            is_key = number + more < count  # behind the last `key` may pass 2 ** 31
            vector = tl.load(vectors_N + key, mask=is_key, other=0).to(tl.int64) * step * UNIT
            mask = spread_mask(is_key) & (column < DIM)
            value = tl.load(grads + vector[:, None] + column, mask=mask, other=0.0)
            if HAS_WEIGHTS:
                own = tl.load(order_N + key, mask=is_key, other=0)
                weight = tl.load(weights_N + own, mask=is_key, other=0.0)
                value = value * weight[:, None]
            sum += value
    return sum


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=PARCELLED)
def _sum_all(
    sums_LD,
    grads,
    vectors_N,
    step,
    order_N,
    weights_N,
    begins_L,
    pieces_PD,
    spans_SD,
    num_rows,
    UNIT: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    DIM: tl.constexpr,
    PIECE: tl.constexpr,
    SPAN: tl.constexpr,
    RUNS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program has RUNS runs."""
    run = tl.program_id(0).to(tl.int64) * RUNS + tl.arange(0, RUNS)
    is_run = run < num_rows
    begin = tl.load(begins_L + run, mask=is_run, other=0)
    end = tl.load(begins_L + run + 1, mask=is_run, other=0)
    sum = sum_of_runs(
        grads,
        vectors_N,
        step,
        order_N,
        weights_N,
        pieces_PD,
        spans_SD,
        begin,
        end,
        UNIT,
        HAS_WEIGHTS,
        DIM,
        PIECE,
        SPAN,
        RUNS,
        COLUMNS,
    )
    column = tl.arange(0, COLUMNS)[None, :]
    mask = is_run[:, None] & (column < DIM)
    tl.store(sums_LD + run[:, None] * DIM + column, sum, mask=mask)
