"""What runs on the device: torch's operators, or faster kernels registered in their place.

No size here depends on a number that only the device knows, so nothing waits for it: what is found
there, how many rows are distinct, stays there, and buffers have room for the most there can be.

Shape letters: R rows of the store, N keys, B bags, L distinct rows, with room for the most there
can be, T tables (2T: two numbers for each), D row width.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch

from recsdk_sharding.device.optimizers import State, Step

__all__ = [
    "BagIndex",
    "Operation",
    "RowIndex",
    "RowUpdate",
    "bags_of_keys",
    "fused_kernel",
    "join_gradients",
    "kernel",
    "note_kernel",
    "noting_kernels",
    "number_runs",
    "offer_kernels",
    "plan_rows",
    "pool_rows",
    "register_kernel",
    "sum_by_position",
    "sum_gradients",
]

Operation: TypeAlias = Literal[
    "pool_rows", "plan_rows", "sum_gradients", "update_rows", "pool_into", "train_rows"
]
_STEPS: Mapping[Operation, tuple[Operation, ...]] = {
    "pool_into": ("pool_rows",),
    "train_rows": ("sum_gradients", "update_rows"),
}
"""What does several things at once, and those that it does."""


@dataclass(frozen=True)
class BagIndex:
    """Which rows are pooled to which bags."""

    rows_N: torch.Tensor
    """Row numbers, int32 or int64 (N,), bag after bag."""
    offsets: torch.Tensor | None
    """Where bags begin, and N: of the type of the rows, (B + 1,). None: every key is a bag."""
    weights_N: torch.Tensor | None
    """float32 (N,), if weighted."""
    divisors_B: torch.Tensor | None = None
    """What the sums of bags are divided by, float32 (B,); None: by nothing."""

    @property
    def num_bags(self) -> int:
        """How many bags B there are."""
        return len(self.rows_N) if self.offsets is None else len(self.offsets) - 1


@dataclass(frozen=True)
class RowIndex:
    """Which bags' gradients go to which rows."""

    rows_L: torch.Tensor
    """Distinct row numbers in ascending order, int64 (L,); behind the last the spare row's."""
    sorted_N: torch.Tensor
    """The row of each key, in ascending order: (N,), of the type of the rows or int64."""
    run_N: torch.Tensor
    """Which of `rows_L` that is: int32 or int64 (N,), ascending."""
    order_N: torch.Tensor
    """Which key that is, int64 (N,); keys of a row are in the order of the batch."""
    bag_N: torch.Tensor
    """Its bag, of the type of offsets, else int64 (N,)."""
    begins_L: torch.Tensor | None = None
    """Where the keys of each row begin among the sorted, int32 or int64 (L + 1,); N behind the
    last row. None: whoever wants it has to search."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of them."""
        all_of_them = [self.rows_L, self.sorted_N, self.run_N, self.order_N, self.bag_N]
        return all_of_them if self.begins_L is None else [*all_of_them, self.begins_L]


@dataclass(frozen=True)
class RowUpdate:
    """One update of tables of a store that are alike: what it depends on, and what it writes."""

    step: Step
    store_RD: torch.Tensor
    state: State
    places_L: torch.Tensor
    """The rows of the state that belong to the distinct rows, int64 (L,)."""
    skips_nonfinite: bool
    """Whether rows whose gradient is not finite are left as they are."""
    nonfinite_2T: torch.Tensor
    """Where such rows are counted, int64: those of the tables one after the other, and behind
    each table's one that nobody reads."""
    ends_2T: torch.Tensor
    """The spare row of each table of the store, which must stay as it is, and one past it: int64,
    ascending."""
    is_updated_R: torch.Tensor | None
    """Where rows that are written get a 1, uint8; None: nowhere."""


def pool_rows(store_RD: torch.Tensor, index: BagIndex) -> torch.Tensor:
    """The sums of the rows of each bag, or means, float32 (B, D); an empty bag gives zeros."""
    sums_BD = _sums_of_bags(store_RD, index)
    return sums_BD if index.divisors_B is None else sums_BD / index.divisors_B[:, None]


def _sums_of_bags(store_RD: torch.Tensor, index: BagIndex) -> torch.Tensor:
    if index.offsets is None:
        rows_ND = store_RD.index_select(0, index.rows_N)
        return rows_ND if index.weights_N is None else rows_ND.mul_(index.weights_N[:, None])
    if len(index.rows_N) == 0:
        return store_RD.new_zeros(len(index.offsets) - 1, store_RD.shape[1])
    sums: torch.Tensor = torch.ops.aten._embedding_bag_forward_only(
        store_RD,
        index.rows_N,
        index.offsets,
        False,
        0,  # sums
        False,
        index.weights_N,
        True,  # offsets end with N
        -1,
    )[0]
    return sums


def plan_rows(index: BagIndex, num_rows: int, spare_row: int) -> RowIndex:
    """Sorts the keys of a batch by row.

    `num_rows`: of the store; `spare_row`: no lower than any row of the batch.
    """
    sorted_N, order_N = torch.sort(index.rows_N, stable=True)
    rows_L, sorted_N, run_N = _runs_of(sorted_N, num_rows, spare_row)
    bag_N = order_N
    if index.offsets is not None:
        bag_N = bags_of_keys(index.offsets, len(order_N)).index_select(0, order_N)
    return RowIndex(rows_L, sorted_N, run_N, order_N, bag_N)


def _runs_of(
    sorted_N: torch.Tensor, num_rows: int, spare_row: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The distinct rows (L,) among sorted ones, those as int64, and which each is, (N,)."""
    run_N = number_runs(sorted_N)
    shape = (min(len(sorted_N), num_rows),)
    rows_L = torch.full(shape, spare_row, dtype=torch.int64, device=sorted_N.device)
    wide_N = sorted_N.to(torch.int64)
    return rows_L.scatter_(0, run_N, wide_N), wide_N, run_N


def number_runs(sorted_N: torch.Tensor, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Which of the distinct numbers each of sorted ones is, of the type (N,)."""
    is_next_N = torch.zeros(len(sorted_N), dtype=dtype, device=sorted_N.device)
    torch.ne(sorted_N[1:], sorted_N[:-1], out=is_next_N[1:])
    return is_next_N.cumsum(0, dtype=dtype)


def bags_of_keys(offsets: torch.Tensor, num_keys: int) -> torch.Tensor:
    """The bag of each key, of the type of `offsets` (B + 1,), where bags begin: (N,)."""
    return torch.repeat_interleave(offsets.diff(), output_size=num_keys)


def sum_gradients(
    grad_BD: torch.Tensor, index: RowIndex, weights_N: torch.Tensor | None
) -> torch.Tensor:
    """The gradient of each distinct row, float32 (L, D), from those of bags (B, D).

    `weights_N`: of the keys, in the order of the batch. Behind the last row they are zeros, or the
    last is the spare row's.
    """
    own_N = None if weights_N is None else weights_N.index_select(0, index.order_N)
    return _sums_of_runs(grad_BD, index.bag_N, own_N, (index.rows_L, index.sorted_N, index.run_N))


def join_gradients(
    rows: list[torch.Tensor], grads: list[torch.Tensor], num_rows: int, spare_row: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds up the gradients of several batches' rows: distinct rows (L,), gradients (L, D)."""
    sorted_N, order_N = torch.sort(torch.cat(rows), stable=True)
    runs = _runs_of(sorted_N, num_rows, spare_row)
    return runs[0], _sums_of_runs(torch.cat(grads), order_N, None, runs)


def _sums_of_runs(
    items_MD: torch.Tensor,
    which_N: torch.Tensor,
    weights_N: torch.Tensor | None,
    runs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """The sums of runs of items, (L, D); `which_N`: the items, `runs`: as of `_runs_of`."""
    rows_L, sorted_N, run_N = runs
    if items_MD.device.type not in _SORTING_DEVICES:
        return _sums_of_sorted(items_MD, which_N, weights_N, sorted_N, rows_L)
    items_ND = items_MD.index_select(0, which_N)
    if weights_N is not None:
        items_ND.mul_(weights_N[:, None])
    return sum_by_position(items_ND, run_N, len(rows_L))


_SORTING_DEVICES = ("cpu", "cuda")
"""Where torch's own sums by position sort, and do not add atomically."""


def sum_by_position(
    items_ND: torch.Tensor, position_N: torch.Tensor, num_positions: int
) -> torch.Tensor:
    """The sums of the items of each position, (num_positions, D); zeros where there are none.

    The result is the same every time: nothing is added atomically.
    """
    if items_ND.device.type not in _SORTING_DEVICES and len(items_ND):
        sorted_N, order_N = torch.sort(position_N, stable=True)
        every_P = torch.arange(num_positions, dtype=sorted_N.dtype, device=sorted_N.device)
        return _sums_of_sorted(items_ND, order_N, None, sorted_N, every_P)
    sums: torch.Tensor = torch.ops.aten.embedding_dense_backward(
        items_ND, position_N, num_positions, -1, False
    )
    return sums


def _sums_of_sorted(
    items_MD: torch.Tensor,
    which_N: torch.Tensor,
    weights_N: torch.Tensor | None,
    sorted_N: torch.Tensor,
    positions_L: torch.Tensor,
) -> torch.Tensor:
    """The sums of the items of each position, (L, D), by a forward that adds each by itself.

    `which_N`: the items, in the order of their positions `sorted_N`. `positions_L` ascend; of equal
    ones the last has the sum.
    """
    is_narrow = which_N.dtype == torch.int32
    begins_L = torch.searchsorted(sorted_N, positions_L, out_int32=is_narrow)
    sums: torch.Tensor = torch.ops.aten._embedding_bag_forward_only(
        items_MD, which_N, begins_L, False, 0, False, weights_N, False, -1
    )[0]
    return sums


# ---- the registry -------------------------------------------------------------------------------


_registered: dict[tuple[str, Operation], Callable[..., Any]] = {}
_offered: dict[tuple[str, Operation], Callable[..., Any]] = {}


def register_kernel(
    device_type: str, operation: Operation, function: Callable[..., Any] | None
) -> None:
    """Makes tables on a type of device run an operation with the caller's kernel.

    `function` takes and returns what this module's function of that name does ("update_rows":
    `recsdk_sharding.device.optimizers.update_rows`, with any of the engine's optimizers), for all
    tables of a store at once; it may call that function for what it does not handle. "update_rows"
    returns the writes that make the update, or makes them itself and returns None; if it raises it
    must have written nothing.

    "pool_into" pools rows and puts the vectors beside those of other tables, at once:
    `function(store_RD, index, matrix)`, with what `pool_rows` takes and a
    `recsdk_sharding.device.vectors.BagMatrix`. It returns whether it has written the vectors of
    all bags; False: "pool_rows" makes them.

    "train_rows" sums gradients and updates rows at once, which torch's operators do one after the
    other: `function(update, grads, index, weights_N)`, with a `RowUpdate`, the gradients of bags as
    a `BagMatrix`, and what else `sum_gradients` takes. It returns whether it has made the update;
    False: it has written nothing, and the update goes by steps, as it does if it has to be known
    beforehand whether gradients are finite (`on_nonfinite="raise"`), with `accumulate_steps`, and
    for tables of a store whose learning rates or update counts differ. If it raises it must have
    written nothing.

    None as `function` restores what is there without the caller's: torch's operators, on cuda
    Triton's kernels if they are in use. The next run of the operation uses it, also for a batch in
    flight. Raises ValueError for an unknown operation.
    """
    if operation not in get_args(Operation):
        raise ValueError(f"operation must be one of {get_args(Operation)}, got {operation!r}")
    if function is None:
        _registered.pop((device_type, operation), None)
    else:
        _registered[device_type, operation] = function


def offer_kernels(device_type: str, functions: Mapping[Operation, Callable[..., Any]]) -> None:
    """Has tables on a type of device run these kernels in place of torch's operators, and no
    other but those that callers register."""
    for key in [key for key in _offered if key[0] == device_type]:
        del _offered[key]
    _offered.update({(device_type, operation): each for operation, each in functions.items()})


def kernel(
    device_type: str, operation: Operation, default: Callable[..., Any]
) -> Callable[..., Any]:
    """The kernel of an operation on a type of device: the caller's, ours, else `default`."""
    key = device_type, operation
    found = _registered.get(key) or _offered.get(key, default)
    note_kernel(found)
    return found


def fused_kernel(
    device_type: str, operation: Literal["pool_into", "train_rows"]
) -> Callable[..., bool] | None:
    """The kernel that does several things at once: the caller's, else ours unless it would pass
    over a caller's of one of them."""
    found = _registered.get((device_type, operation))
    if found is None and not any((device_type, each) in _registered for each in _STEPS[operation]):
        found = _offered.get((device_type, operation))
    note_kernel(found)
    return found


class _Noted(threading.local):
    names: list[str] | None = None


_noted = _Noted()


@contextmanager
def noting_kernels() -> Iterator[list[str]]:
    """Gives the names of the kernels that are chosen inside, on this thread."""
    before, _noted.names = _noted.names, []
    try:
        yield _noted.names
    finally:
        _noted.names = before


def note_kernel(function: Callable[..., Any] | None) -> None:
    """Notes a kernel, or what runs in its place, for `noting_kernels`."""
    if _noted.names is not None and function is not None:
        kind: Any = function if hasattr(function, "__qualname__") else type(function)
        _noted.names.append(f"{kind.__module__}.{kind.__qualname__}")
