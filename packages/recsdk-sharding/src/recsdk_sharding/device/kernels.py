"""What runs on the device: torch's operators, or faster kernels registered in their place.

Shape letters: R rows of the store, N keys, B bags, U distinct rows or bags, D row width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch

from recsdk_sharding.device.runs import Runs

__all__ = [
    "BagIndex",
    "GradientIndex",
    "Operation",
    "kernel",
    "pool_rows",
    "register_kernel",
    "run_sums",
    "sum_gradients",
]

Operation: TypeAlias = Literal["pool_rows", "sum_gradients", "update_rows"]


@dataclass(frozen=True)
class BagIndex:
    """Which rows are pooled to which bags."""

    rows_N: torch.Tensor
    """Row numbers, int64 (N,), bag after bag."""
    weights_N: torch.Tensor | None
    """float32 (N,), if weighted."""
    runs: Runs[torch.Tensor]
    """The bags that have keys."""
    filled_U: torch.Tensor | None
    """The numbers of those bags, int64 (U,); None: every bag has keys."""
    num_bags: int
    """B."""


@dataclass(frozen=True)
class GradientIndex:
    """Which bags' gradients go to which rows."""

    rows_U: torch.Tensor
    """Distinct row numbers, int64 (U,)."""
    bags_N: torch.Tensor
    """The bag of each key, int64 (N,), row after row; keys of a row in the order of the batch."""
    weights_N: torch.Tensor | None
    """float32 (N,), if weighted."""
    runs: Runs[torch.Tensor]
    """The rows."""


def pool_rows(store_RD: torch.Tensor, index: BagIndex) -> torch.Tensor:
    """The sums of the rows of each bag, float32 (B, D); an empty bag gives zeros."""
    sums_UD = run_sums(store_RD.index_select(0, index.rows_N), index.weights_N, index.runs)
    if index.filled_U is None:
        return sums_UD
    pooled_BD = store_RD.new_zeros(index.num_bags, store_RD.shape[1])
    return pooled_BD.index_copy_(0, index.filled_U, sums_UD)


def sum_gradients(grad_BD: torch.Tensor, index: GradientIndex) -> torch.Tensor:
    """The gradient of each distinct row, float32 (U, D), from the gradients of bags (B, D)."""
    return run_sums(grad_BD.index_select(0, index.bags_N), index.weights_N, index.runs)


def run_sums(
    items_ND: torch.Tensor, weights_N: torch.Tensor | None, runs: Runs[torch.Tensor]
) -> torch.Tensor:
    """The sums of runs of items times their weights, float32 (U, D); writes to `items_ND`."""
    if weights_N is not None:
        items_ND.mul_(weights_N[:, None])
    for targets_P, sources_P in runs.steps:
        items_ND.index_add_(0, targets_P, items_ND.index_select(0, sources_P))
    return items_ND if runs.firsts is None else items_ND.index_select(0, runs.firsts)


_registered: dict[tuple[str, Operation], Callable[..., Any]] = {}


def register_kernel(
    device_type: str, operation: Operation, function: Callable[..., Any] | None
) -> None:
    """Makes tables on a type of device run an operation with the caller's kernel.

    `function` takes and returns what this module's function of that name does ("update_rows":
    `recsdk_sharding.device.optimizers.update_rows`, with any of the engine's optimizers); it may
    call that function for what it does not handle. "update_rows" returns the writes that make the
    update, or makes them itself and returns None; if it raises it must have written nothing. None
    as `function` restores torch's operators. The next run of the operation uses it, also for a
    batch in flight. Raises ValueError for an unknown operation.
    """
    if operation not in get_args(Operation):
        raise ValueError(f"operation must be one of {get_args(Operation)}, got {operation!r}")
    if function is None:
        _registered.pop((device_type, operation), None)
    else:
        _registered[device_type, operation] = function


def kernel(
    device_type: str, operation: Operation, default: Callable[..., Any]
) -> Callable[..., Any]:
    """The kernel registered for an operation on a type of device, else `default`."""
    return _registered.get((device_type, operation), default)
