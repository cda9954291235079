"""How kernels are launched, and what part of a matrix each of their programs has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime import driver

from recsdk_sharding.device.vectors import BagMatrix

__all__ = [
    "MOST_BAGS",
    "PARCELLED",
    "NotCompiled",
    "Places",
    "Tile",
    "divider",
    "launch",
    "places_of",
    "spread_mask",
    "tile_of",
    "vector_begins",
]

MOST_BAGS = 2**30
"""That kernels number with 32 bits, the places of a last program too."""

PARCELLED = ("starts_F", "rows_N", "offsets", "weights_N", "divisors_B")
"""Arguments that lie in the middle of a `Parcel`, in each batch at another place: kernels must not
be compiled for those that begin at 16 bytes, and for others, or a batch now and then waits."""

_NUMBERS_PER_PROGRAM = 1024
_WIDEST = 4096
"""The widest row that one program holds; each thread has 32 numbers of each matrix then."""


@dataclass(frozen=True)
class Tile:
    """Rows and columns of a matrix, powers of two."""

    rows: int
    columns: int


def tile_of(dim: int) -> Tile | None:
    """Whole rows of this width for one program; None: it is too wide."""
    if dim > _WIDEST:
        return None
    columns = max(2, triton.next_power_of_2(dim))  # of one, Triton compiles no update by Adagrad
    return Tile(max(1, min(64, _NUMBERS_PER_PROGRAM // columns)), columns)


class NotCompiled(Exception):
    """A kernel cannot be compiled here for what it was to be launched with; nothing ran."""


_not_compiled: dict[tuple[Any, ...], str] = {}
"""Why, by what was to be compiled: another try would take as long in each step."""


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Runs a kernel on the device of its first argument, and that device's current stream.

    Raises NotCompiled if Triton does not compile it for such arguments.
    """
    if 0 in grid:
        return
    if _not_compiled and (why := _not_compiled.get(_form_of(kernel, args, constants))):
        raise NotCompiled(why)
    with torch.cuda.device_of(args[0]):
        try:
            kernel[grid](*args, **constants)
        except Exception as error:
            cause = _why_not_compiled(error, kernel, grid, args, constants)
            if cause is None:
                raise
            name, shape = kernel.fn.__name__, ", ".join(f"{k}={v}" for k, v in constants.items())
            why = f"Triton does not compile its kernel {name} here, for {shape}: {_said(cause)}"
            _not_compiled[_form_of(kernel, args, constants)] = why
            raise NotCompiled(why) from cause


def _form_of(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Any, ...]:
    dtypes = [each.dtype if isinstance(each, torch.Tensor) else None for each in args]
    return kernel.fn, args[0].device, *dtypes, *constants.items()


def _said(cause: Exception) -> str:
    """What it says, without the source of a kernel before."""
    text = str(cause)
    return f"{type(cause).__name__}: {text if len(text) < 400 else '... ' + text[-400:]}"


def _why_not_compiled(
    error: Exception,
    kernel: Any,
    grid: tuple[int, ...],
    args: tuple[Any, ...],
    constants: dict[str, Any],
) -> Exception | None:
    """What compiling raises, of the kernel or of what starts it, if a launch failed by that."""
    is_too_large: bool = isinstance(error, triton.OutOfResources)  # compiled, but not for here
    if is_too_large:
        return error
    try:
        compiled = kernel.warmup(*args, grid=grid, **constants)
        if compiled is not None:  # Triton 3.6 has a C compiler build what starts it
            driver.active.launcher_cls(compiled.src, compiled.metadata)
    except Exception as cause:
        return cause
    return None


@triton.jit
def spread_mask(mask):
    """A mask of rows, (R,), for whole rows: (R, 1), by way of numbers.

    Spread by itself, a mask that is also that of loads of one dimension is more than Triton 3.6
    compiles in a loop, for rows of 4, 8, 16 or 32 numbers.
    """
    return mask.to(tl.int32)[:, None] > 0


# ---- where vectors are --------------------------------------------------------------------------


@dataclass(frozen=True)
class Places:
    """What `vector_begins` takes of a `BagMatrix`."""

    args: tuple[torch.Tensor | None, int, int, int, int]
    """Those from `starts_F` to `stride`."""
    constants: dict[str, Any]


def places_of(matrix: BagMatrix) -> Places:
    """Where the vectors of a matrix lie, of no more than MOST_BAGS bags if it has starts."""
    starts_F, stride = matrix.starts_F, matrix.values_SC.stride(0)
    num_samples = max(1, len(matrix.values_SC))
    constants = {"HAS_STARTS": starts_F is not None, "UNIT": 1 if stride % 4 else matrix.unit}
    return Places((starts_F, num_samples, *divider(num_samples), stride), constants)


def divider(number: int) -> tuple[int, int]:
    """A factor below 2 ** 31, and a shift: n * factor >> 30 + shift is n // number for n < 2 ** 30.

    For rounded up, the factor is (2 ** (30 + shift) + e) / number, with e < number <= 2 ** shift.
    So n * e < 2 ** (30 + shift): the quotient grows by less than 1 / number, and reaches no next
    integer.
    """
    shift = (number - 1).bit_length()
    return -(-(1 << 30 + shift) // number), shift


@triton.jit
def vector_begins(
    bag,
    starts_F,
    num_samples,
    factor,
    shift,
    stride,
    HAS_STARTS: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Where the vectors of bags begin in a `BagMatrix`, int64.

    `factor`, `shift`: as `divider` gives them; a division would take long. `stride`: from row to
    row. UNIT: a divisor of what is returned.
    """
    if HAS_STARTS:
        high = tl.umulhi(bag.to(tl.uint32) << 2, factor.to(tl.uint32))  # bag * factor >> 30
        feature = (high >> shift).to(tl.int32)
        sample = (bag.to(tl.int32) - feature * num_samples).to(tl.int64)
        begins = sample * stride + tl.load(starts_F + feature).to(tl.int64)
    else:
        begins = bag.to(tl.int64) * stride
    if UNIT > 1:
        begins = tl.multiple_of(begins, UNIT)
    return begins
