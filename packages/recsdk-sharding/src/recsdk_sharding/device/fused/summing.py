"""Adding up the gradients of each row, in a fixed order also where a row has a great many.

The keys of a row, a run, lie side by side in the order of the batch. From its beginning a run is
cut into spans of 2048 keys, what is left into pieces of 32, and what is left then, the tail, is
single keys. Programs of their own add up spans and pieces; who wants the sum of a run adds its
spans, then its pieces, then its tail. So the sum of a row depends on its own gradients alone, and
no program has long to do.

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
    Tile,
    launch,
    tile_of,
    vector_begins,
)
from recsdk_sharding.device.kernels import RowIndex
from recsdk_sharding.device.vectors import BagMatrix, rows_of

__all__ = ["PIECE", "SPAN", "Parts", "begins_of", "parts_of", "sum_gradients", "sum_of_runs"]

PIECE = 32
_PIECES_PER_SPAN = 64
SPAN = PIECE * _PIECES_PER_SPAN
_MOST_COLUMNS = 128
"""Of a program that adds up a piece or a span, which holds all of its items."""


@dataclass(frozen=True)
class Parts:
    """What sums of runs are made of."""

    grads: BagMatrix
    """Gradients of bags."""
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
        own_BD,
        None,
        index.bag_N,
        index.order_N,
        weights_N,
        parts.begins_L,
        parts.pieces_PD,
        parts.spans_SD,
        num_rows,
        len(own_BD),
        own_BD.stride(0),
        dim,
        HAS_STARTS=False,
        HAS_WEIGHTS=weights_N is not None,
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
    values_SC, num_keys, dim = grads.values_SC, len(index.order_N), grads.dim
    begins_L = begins_of(index)
    pieces_PD = values_SC.new_empty(num_keys // PIECE, dim)
    spans_SD = values_SC.new_empty(num_keys // SPAN, dim)
    columns = min(tile.columns, _MOST_COLUMNS)
    num_parts = triton.cdiv(dim, columns)
    launch(
        _sum_pieces,
        (len(pieces_PD), num_parts),
        pieces_PD,
        values_SC,
        grads.starts_F,
        index.bag_N,
        index.order_N,
        weights_N,
        index.run_N,
        begins_L,
        len(values_SC),
        values_SC.stride(0),
        dim,
        HAS_STARTS=grads.starts_F is not None,
        HAS_WEIGHTS=weights_N is not None,
        PIECE=PIECE,
        COLUMNS=columns,
    )
    launch(
        _sum_spans,
        (len(spans_SD), num_parts),
        spans_SD,
        pieces_PD,
        index.run_N,
        begins_L,
        dim,
        PIECE=PIECE,
        PIECES=_PIECES_PER_SPAN,
        COLUMNS=columns,
    )
    return Parts(grads, begins_L, pieces_PD, spans_SD)


def begins_of(index: RowIndex) -> torch.Tensor:
    """Where the keys of each row begin among the sorted, and N behind the last: (L + 1,)."""
    if index.begins_L is not None:
        return index.begins_L
    every_L = torch.arange(len(index.rows_L) + 1, device=index.run_N.device)
    return torch.searchsorted(index.run_N, every_L)


@triton.jit
def _first_of_place(run_N, begins_L, place, LENGTH: tl.constexpr):
    """The part of LENGTH keys that begins in the place: its first key, and whether it is there."""
    last = (place + 1) * LENGTH - 1
    run = tl.load(run_N + last)
    begin = tl.load(begins_L + run).to(tl.int64)
    end = tl.load(begins_L + run + 1).to(tl.int64)
    first = begin + (last - begin) // LENGTH * LENGTH
    return first, first + LENGTH <= end


@triton.jit(do_not_specialize=["num_samples"])
def _sum_pieces(
    pieces_PD,
    grads_SC,
    starts_F,
    bag_N,
    order_N,
    weights_N,
    run_N,
    begins_L,
    num_samples,
    stride,
    dim,
    HAS_STARTS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    PIECE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program has some columns of one place for a piece."""
    place = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < dim
    first, is_there = _first_of_place(run_N, begins_L, place, PIECE)
    if is_there:
        at = first + tl.arange(0, PIECE)
        begins = vector_begins(tl.load(bag_N + at), starts_F, num_samples, stride, HAS_STARTS)
        item = grads_SC + begins[:, None] + column[None, :]
        value = tl.load(item, mask=is_column[None, :], other=0.0)
        if HAS_WEIGHTS:
            weight = tl.load(weights_N + tl.load(order_N + at))
            value = value * weight[:, None]
        tl.store(pieces_PD + place * dim + column, tl.sum(value, axis=0), mask=is_column)


@triton.jit
def _sum_spans(
    spans_SD,
    pieces_PD,
    run_N,
    begins_L,
    dim,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program has some columns of one place for a span."""
    place = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < dim
    first, is_there = _first_of_place(run_N, begins_L, place, PIECE * PIECES)
    if is_there:
        piece = first // PIECE + tl.arange(0, PIECES)
        item = pieces_PD + piece[:, None] * dim + column[None, :]
        value = tl.load(item, mask=is_column[None, :], other=0.0)
        tl.store(spans_SD + place * dim + column, tl.sum(value, axis=0), mask=is_column)


@triton.jit
def sum_of_runs(
    grads_SC,
    starts_F,
    bag_N,
    order_N,
    weights_N,
    pieces_PD,
    spans_SD,
    begin,
    end,
    num_samples,
    stride,
    dim,
    HAS_STARTS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    PIECE: tl.constexpr,
    SPAN: tl.constexpr,
    RUNS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The sums of RUNS runs, whole rows; `begin`, `end`: their keys, int64 (RUNS,)."""
    column = tl.arange(0, COLUMNS)[None, :]
    is_column = column < dim
    sum = tl.zeros([RUNS, COLUMNS], tl.float32)
    num_spans = (end - begin) // SPAN
    for number in range(tl.max(num_spans, axis=0)):
        place = (begin // SPAN + number)[:, None]
        mask = (number < num_spans)[:, None] & is_column
        sum += tl.load(spans_SD + place * dim + column, mask=mask, other=0.0)
    at = begin + num_spans * SPAN
    num_pieces = (end - at) // PIECE
    for number in range(tl.max(num_pieces, axis=0)):
        place = (at // PIECE + number)[:, None]
        mask = (number < num_pieces)[:, None] & is_column
        sum += tl.load(pieces_PD + place * dim + column, mask=mask, other=0.0)
    at += num_pieces * PIECE
    for number in tl.range(0, tl.max(end - at, axis=0), loop_unroll_factor=4):
        is_key = at + number < end
        bag = tl.load(bag_N + at + number, mask=is_key, other=0)
        begins = vector_begins(bag, starts_F, num_samples, stride, HAS_STARTS)
        mask = is_key[:, None] & is_column
        value = tl.load(grads_SC + begins[:, None] + column, mask=mask, other=0.0)
        if HAS_WEIGHTS:
            key = tl.load(order_N + at + number, mask=is_key, other=0)
            weight = tl.load(weights_N + key, mask=is_key, other=0.0)
            value = value * weight[:, None]
        sum += value
    return sum


@triton.jit(do_not_specialize=["num_rows", "num_samples"])
def _sum_all(
    sums_LD,
    grads_SC,
    starts_F,
    bag_N,
    order_N,
    weights_N,
    begins_L,
    pieces_PD,
    spans_SD,
    num_rows,
    num_samples,
    stride,
    dim,
    HAS_STARTS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    PIECE: tl.constexpr,
    SPAN: tl.constexpr,
    RUNS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program has RUNS runs."""
    run = tl.program_id(0).to(tl.int64) * RUNS + tl.arange(0, RUNS)
    is_run = run < num_rows
    begin = tl.load(begins_L + run, mask=is_run, other=0).to(tl.int64)
    end = tl.load(begins_L + run + 1, mask=is_run, other=0).to(tl.int64)
    sum = sum_of_runs(
        grads_SC,
        starts_F,
        bag_N,
        order_N,
        weights_N,
        pieces_PD,
        spans_SD,
        begin,
        end,
        num_samples,
        stride,
        dim,
        HAS_STARTS,
        HAS_WEIGHTS,
        PIECE,
        SPAN,
        RUNS,
        COLUMNS,
    )
    column = tl.arange(0, COLUMNS)[None, :]
    mask = is_run[:, None] & (column < dim)
    tl.store(sums_LD + run[:, None] * dim + column, sum, mask=mask)
