"""How a new row gets its first values: always a pure function of (seed, table, key, column).

Shape letters: N keys, D row width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recsdk_core._internal.checks import keep_plain_numbers, require_above_0, require_float32

__all__ = [
    "Constant",
    "Custom",
    "Initializer",
    "Normal",
    "RowFunction",
    "TruncatedNormal",
    "Uniform",
]

RowFunction: TypeAlias = Callable[[NDArray[np.int64], NDArray[np.float32]], Any]
"""Fills values (N, D) with the rows of keys (N,); a row may depend on its key only."""


@dataclass(frozen=True, kw_only=True)
class Constant:
    """Every column of a new row is `value`."""

    value: float = 0.0
    """The value."""

    def __post_init__(self) -> None:
        keep_plain_numbers(self)
        require_float32("Constant", value=self.value)


@dataclass(frozen=True, kw_only=True)
class Uniform:
    """New rows are uniform over [low, high).

    Raises ValueError unless both are finite in single precision, and low at most high.
    """

    low: float
    """Smallest value."""
    high: float
    """Upper bound, at least `low`."""

    def __post_init__(self) -> None:
        keep_plain_numbers(self)
        require_float32("Uniform", low=self.low, high=self.high)
        if self.low > self.high:
            raise ValueError(
                f"Uniform: low must be at most high, got low={self.low}, high={self.high}"
            )


@dataclass(frozen=True, kw_only=True)
class Normal:
    """New rows are normally distributed.

    Raises ValueError unless both are finite in single precision, and stddev is 0 or more.
    """

    mean: float = 0.0
    """Mean."""
    stddev: float = 1.0
    """Standard deviation, at least 0."""

    def __post_init__(self) -> None:
        keep_plain_numbers(self)
        require_float32("Normal", mean=self.mean, stddev=self.stddev)
        if self.stddev < 0:
            raise ValueError(f"Normal: stddev must be at least 0, got {self.stddev}")


@dataclass(frozen=True, kw_only=True)
class TruncatedNormal:
    """New rows are normally distributed; a value outside [low, high] is drawn again.

    Raises ValueError unless all are finite in single precision, stddev is above 0, and low is below
    high.
    """

    mean: float = 0.0
    """Mean of the untruncated distribution."""
    stddev: float = 1.0
    """Standard deviation of the untruncated distribution, greater than 0."""
    low: float = -2.0
    """Smallest value, in the units of the values (not in standard deviations)."""
    high: float = 2.0
    """Largest value, greater than `low`."""

    def __post_init__(self) -> None:
        keep_plain_numbers(self)
        require_float32(
            "TruncatedNormal", mean=self.mean, stddev=self.stddev, low=self.low, high=self.high
        )
        require_above_0("TruncatedNormal", stddev=self.stddev)
        if self.low >= self.high:
            raise ValueError(
                f"TruncatedNormal: low must be below high, got low={self.low}, high={self.high}"
            )


@dataclass(frozen=True, kw_only=True)
class Custom:
    """New rows are made by a Python function.

    The function gets `keys` int64 (N,) and `values` float32 (N, D), and fills `values` in place;
    what it returns is ignored. It must be a pure function of each key, whatever the other keys of
    the call are. It runs with the GIL under the table's lock and must not call the table. If it
    raises, the inserting call raises the same exception and has changed nothing.

    Cost: one Python call for each batch that has new keys.

    >>> import numpy as np
    >>> from recsdk_core import Table
    >>> def ones(keys, values):
    ...     values[:] = 1.0
    >>> Table(dim=2, initializer=Custom(fn=ones)).find_or_insert(np.array([5]))
    array([[1., 1.]], dtype=float32)
    """

    fn: RowFunction
    """The function."""

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise TypeError(f"Custom: fn must be callable, got {type(self.fn).__name__}")


Initializer: TypeAlias = Constant | Uniform | Normal | TruncatedNormal | Custom
"""Any of the initializers above."""
