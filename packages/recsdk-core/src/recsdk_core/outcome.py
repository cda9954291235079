"""What became of one key of one call, and what those read that have no row."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal, TypeAlias

from recsdk_core._internal.checks import require_finite, require_one_of

__all__ = ["Default", "Outcome"]

DefaultKind: TypeAlias = Literal["constant"]


class Outcome(enum.IntEnum):
    """What became of one key of one call; outcome arrays are uint8 and hold these values.

    >>> import numpy as np
    >>> from recsdk_core import Table
    >>> _, outcomes = Table(dim=4).find_or_insert(np.array([7, 7]), return_outcomes=True)
    >>> [Outcome(outcome).name for outcome in outcomes]
    ['INSERTED', 'FOUND']
    """

    FOUND = 0
    """The key had a row."""
    INSERTED = 1
    """The call gave the key a row."""
    REFUSED = 2
    """The key has no row and found no room: the table holds `max_rows` keys."""
    MISSING = 3
    """The key has no row and the call does not insert."""
    OVERFLOWED = 4
    """The key has no row because a device cache could not hold the batch."""
    NOT_ADMITTED = 5
    """The key has no row yet: the table's rule of admission kept it out, see `Admit`."""


@dataclass(frozen=True, kw_only=True)
class Default:
    """What a key without a row reads; `Table(default=...)` takes it.

    Such keys are those that are refused or not admitted, and in lookups and evaluation those that
    were never seen. Their outcomes say so whatever they read. Make one with `Default.zeros` or
    `Default.constant`.
    """

    kind: DefaultKind = "constant"
    """Where what they read comes from."""
    value: float = 0.0
    """Of "constant": what every column reads."""

    def __post_init__(self) -> None:
        require_one_of("Default", ("constant",), kind=self.kind)
        require_finite("Default", value=self.value)

    @staticmethod
    def zeros() -> Default:
        """They read zeros, and no gradient is kept."""
        return Default()

    @staticmethod
    def constant(value: float) -> Default:
        """Every column reads `value`, a finite number, and no gradient is kept.

        >>> import numpy as np
        >>> from recsdk_core import Default, Table
        >>> Table(dim=2, default=Default.constant(0.5)).lookup(np.array([7]))
        array([[0.5, 0.5]], dtype=float32)
        """
        return Default(value=value)
