"""Sums of gradients and the optimizer's update of all rows of a batch in one launch.

Shape letters: R rows of the store, N keys, B bags, L distinct rows with room for the most there
can be, P pieces, S spans, T tables (2T: two numbers for each), D row width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from recsdk_sharding.device import optimizers
from recsdk_sharding.device.fused.formulas import Formula, formula_of
from recsdk_sharding.device.fused.launching import PARCELLED, Tile, launch, tile_of
from recsdk_sharding.device.fused.summing import PIECE, SPAN, parts_of, sum_of_runs
from recsdk_sharding.device.kernels import RowIndex, RowUpdate
from recsdk_sharding.device.optimizers import State, Step
from recsdk_sharding.device.vectors import BagMatrix
from recsdk_sharding.device.writes import Write

__all__ = ["train_rows", "update_rows"]


def train_rows(
    update: RowUpdate, grads: BagMatrix, index: RowIndex, weights_N: torch.Tensor | None
) -> bool:
    """As "train_rows" of `kernels.register_kernel`; False where `formula_of` has no formula, and
    for rows that are too wide."""
    formula, tile = formula_of(update.step), tile_of(grads.dim)
    if formula is None or tile is None:
        return False
    parts = parts_of(grads, index, weights_N, tile)
    ends_2T = update.ends_2T
    _launch_update(
        formula,
        tile,
        update.store_RD,
        formula.state_of(update.state),
        (index.rows_L, update.places_L),
        (parts.grads, parts.vectors_N, parts.step, index.order_N, weights_N),
        (index.run_N, parts.begins_L, parts.pieces_PD, parts.spans_SD, len(index.run_N)),
        (update.is_updated_R, update.nonfinite_2T, ends_2T, len(ends_2T)),
        UNIT=parts.unit,
        HAS_SUMS=False,
        HAS_WEIGHTS=weights_N is not None,
        SKIPS=update.skips_nonfinite,
        TRACKS=update.is_updated_R is not None,
        SEARCHES=len(ends_2T).bit_length(),
    )
    return True


def update_rows(
    step: Step,
    store_RD: torch.Tensor,
    state: State,
    rows_U: torch.Tensor,
    grad_UD: torch.Tensor,
    places_U: torch.Tensor | None = None,
) -> list[Write] | None:
    """As `optimizers.update_rows`, but makes the writes itself where `formula_of` has a formula."""
    formula, tile = formula_of(step), tile_of(grad_UD.shape[1])
    if formula is None or tile is None:
        return optimizers.update_rows(step, store_RD, state, rows_U, grad_UD, places_U)
    own_UD = grad_UD if grad_UD.stride(1) == 1 else grad_UD.contiguous()
    _launch_update(
        formula,
        tile,
        store_RD,
        formula.state_of(state),
        (rows_U, rows_U if places_U is None else places_U),
        (own_UD, None, own_UD.stride(0), None, None),
        (None, None, None, None, 0),
        (None, None, None, 0),
        UNIT=1,
        HAS_SUMS=True,
        HAS_WEIGHTS=False,
        SKIPS=False,
        TRACKS=False,
        SEARCHES=0,
    )
    return None


def _launch_update(
    formula: Formula,
    tile: Tile,
    store_RD: torch.Tensor,
    state: list[torch.Tensor | None],
    rows: tuple[torch.Tensor, torch.Tensor],
    grads: tuple[torch.Tensor | int | None, ...],
    runs: tuple[torch.Tensor | int | None, ...],
    tables: tuple[torch.Tensor | int | None, ...],
    **constants: int,
) -> None:
    num_rows = len(rows[0])
    launch(
        _update,
        (triton.cdiv(num_rows, tile.rows),),
        store_RD,
        *state,
        *rows,
        *grads,
        *runs,
        *tables,
        num_rows,
        formula.rate,
        formula.eps,
        formula.decay or 0.0,
        formula.l2 or 0.0,
        formula.clip or 0.0,
        formula.rest1,
        formula.beta2,
        1.0 - formula.beta2,
        1.0 / formula.root_bias2,
        KIND=formula.kind,
        HAS_DECAY=formula.decay is not None,
        HAS_L2=formula.l2 is not None,
        HAS_CLIP=formula.clip is not None,
        **constants,
        DIM=store_RD.shape[1],
        PIECE=PIECE,
        SPAN=SPAN,
        RUNS=tile.rows,
        COLUMNS=tile.columns,
    )


@triton.jit
def _ends_up_to(ends_2T, num_ends, row, SEARCHES: tl.constexpr):
    """How many ends there are up to a row, or each of some, int32: odd for spare rows.

    `row`: int64, ascending as the ends are. SEARCHES: the bits of their number.
    """
    count = row.to(tl.int32) * 0
    for number in tl.static_range(SEARCHES):
        next = count + 2 ** (SEARCHES - 1 - number)
        end = tl.load(ends_2T + next - 1, mask=next <= num_ends, other=2**62)
        count = tl.where(end <= row, next, count)
    return count


@triton.jit
def _stepped(
    weight,
    grad,
    first_R,
    second_R,
    place,
    is_row,
    rate,
    eps,
    rest1,
    beta2,
    rest2,
    per_root_bias2,
    KIND: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The weights after the update; writes the state. Formulas: docs/concepts/optimizers.md."""
    column = tl.arange(0, COLUMNS)[None, :]
    mask = is_row[:, None] & (column < DIM)
    if KIND == "sgd":
        weight = weight - grad * rate
    elif KIND == "adagrad":
        of_total = first_R + place[:, None] * DIM + column
        total = tl.load(of_total, mask=mask, other=0.0) + grad * grad
        tl.store(of_total, total, mask=mask)
        weight = weight - rate * tl.div_rn(grad, tl.sqrt_rn(total) + eps)
    elif KIND == "rowwise_adagrad":
        mean = tl.sum(grad * grad, axis=1) / DIM
        total = tl.load(first_R + place, mask=is_row, other=0.0) + mean
        tl.debug_barrier()  # all warps that have a part of a row read this number, and one writes
        tl.store(first_R + place, total, mask=is_row)
        rate_of_row = tl.div_rn(tl.zeros_like(total) + rate, tl.sqrt_rn(total) + eps)
        weight = weight - rate_of_row[:, None] * grad
    else:
        tl.static_assert(KIND == "adam")
        of_mean = first_R + place[:, None] * DIM + column
        of_square = second_R + place[:, None] * DIM + column
        before = tl.load(of_mean, mask=mask, other=0.0)
        step = grad - before
        mean = tl.where(rest1 < 0.5, before + rest1 * step, grad - step * (1.0 - rest1))
        square = tl.load(of_square, mask=mask, other=0.0) * beta2 + grad * grad * rest2
        tl.store(of_mean, mean, mask=mask)
        tl.store(of_square, square, mask=mask)
        weight = weight - rate * tl.div_rn(mean, tl.sqrt_rn(square) * per_root_bias2 + eps)
    return weight


@triton.jit(
    do_not_specialize=["num_keys", "num_ends", "num_rows"],
    do_not_specialize_on_alignment=PARCELLED,
)
def _update(
    store_RD,
    first_R,
    second_R,
    rows_L,
    places_L,
    grads,
    vectors_N,
    step,
    order_N,
    weights_N,
    run_N,
    begins_L,
    pieces_PD,
    spans_SD,
    num_keys,
    is_updated_R,
    nonfinite_2T,
    ends_2T,
    num_ends,
    num_rows,
    rate,
    eps,
    decay,
    l2,
    clip,
    rest1,
    beta2,
    rest2,
    per_root_bias2,
    KIND: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    HAS_L2: tl.constexpr,
    HAS_CLIP: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    SKIPS: tl.constexpr,
    TRACKS: tl.constexpr,
    SEARCHES: tl.constexpr,
    DIM: tl.constexpr,
    PIECE: tl.constexpr,
    SPAN: tl.constexpr,
    RUNS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program has RUNS distinct rows, with all of their columns."""
    if not HAS_SUMS:
        last = tl.load(run_N + num_keys - 1)
        if tl.program_id(0).to(tl.int64) * RUNS > last:  # as most are, if rows come often
            return
    run = tl.program_id(0).to(tl.int64) * RUNS + tl.arange(0, RUNS)
    is_row = run < num_rows
    column = tl.arange(0, COLUMNS)[None, :]
    row = tl.load(rows_L + run, mask=is_row, other=0)
    if HAS_SUMS:
        mask = is_row[:, None] & (column < DIM)
        grad = tl.load(grads + run[:, None] * (step * UNIT) + column, mask=mask, other=0.0)
    else:
        first = tl.program_id(0).to(tl.int64) * RUNS
        last = tl.minimum(first + RUNS, num_rows) - 1
        before = _ends_up_to(ends_2T, num_ends, tl.load(rows_L + first), SEARCHES)
        table = tl.zeros([RUNS], tl.int32) + before
        next_end = tl.load(ends_2T + before, mask=before < num_ends, other=2**62)
        if next_end <= tl.load(rows_L + last):  # else all are of one table, as most often
            table = _ends_up_to(ends_2T, num_ends, row, SEARCHES)
        is_row = is_row & (table % 2 == 0)
        begin = tl.load(begins_L + run, mask=is_row, other=0)
        end = tl.load(begins_L + run + 1, mask=is_row, other=0)
        grad = sum_of_runs(
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
        is_bad = is_row & (tl.sum((tl.abs(grad) < float("inf")).to(tl.int32), axis=1) < COLUMNS)
        tl.atomic_add(nonfinite_2T + table, tl.full([RUNS], 1, tl.int64), mask=is_bad)
        if SKIPS:
            is_row = is_row & (is_bad == 0)
    place = tl.load(places_L + run, mask=is_row, other=0)
    mask = is_row[:, None] & (column < DIM)
    at = store_RD + row[:, None] * DIM + column
    weight = tl.load(at, mask=mask, other=0.0)
    if HAS_CLIP:  # written so that what is no number stays none
        grad = tl.where(grad > clip, clip, tl.where(grad < -clip, -clip, grad))
    if HAS_DECAY:
        weight = weight * decay
    if HAS_L2:
        grad = grad + weight * l2
    grad = tl.where(mask, grad, 0.0)
    weight = _stepped(
        weight,
        grad,
        first_R,
        second_R,
        place,
        is_row,
        rate,
        eps,
        rest1,
        beta2,
        rest2,
        per_root_bias2,
        KIND,
        DIM,
        COLUMNS,
    )
    tl.store(at, weight, mask=mask)
    if TRACKS:
        tl.store(is_updated_R + row, tl.full([RUNS], 1, tl.uint8), mask=is_row)
