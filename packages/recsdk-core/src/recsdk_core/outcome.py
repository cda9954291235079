"""What became of one key of one call, and what those read that have no row."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal, TypeAlias

from recsdk_core._internal.checks import (
    int_within,
    keep_plain_numbers,
    require_float32,
    require_one_of,
)
from recsdk_core.virtual_shards import NUM_VIRTUAL_SHARDS

__all__ = ["Default", "Outcome"]

DefaultKind: TypeAlias = Literal["constant", "initial_row", "shared_rows"]

BeginWith: TypeAlias = Literal["initial_row", "shared_row"]


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
    """The key has no row and found no room: under `max_rows`, or in the memory of a device."""
    MISSING = 3
    """The key has no row and the call does not insert."""
    OVERFLOWED = 4
    """A device cache could not hold the row of the batch; no table has such a cache yet."""
    NOT_ADMITTED = 5
    """The key has no row yet: the table's rule of admission kept it out, see `Admit`."""


@dataclass(frozen=True, kw_only=True)
class Default:
    """What a key without a row reads; `Table(default=...)` takes it.

    Such keys are those that are refused or not admitted, and in lookups and evaluation those that
    were never seen. Their outcomes say so whatever they read. Make one with `Default.zeros`,
    `Default.constant`, `Default.initial_row` or `Default.shared_rows`. Raises ValueError or
    TypeError that names a wrong setting, or one of another kind.
    """

    kind: DefaultKind = "constant"
    """Where what they read comes from."""
    value: float = 0.0
    """Of "constant": what every column reads."""
    n: int | None = None
    """Of "shared_rows": how many rows, 1 to 65,536."""
    begin_with: BeginWith = "initial_row"
    """Of "shared_rows": what a key that gets a row begins with."""

    def __post_init__(self) -> None:
        keep_plain_numbers(self)
        kinds = ("constant", "initial_row", "shared_rows")
        require_one_of("Default", kinds, kind=self.kind)
        require_float32("Default", value=self.value)
        if self.value != 0 and self.kind != "constant":
            raise ValueError(f"Default: kind={self.kind!r} takes no value, got {self.value}")
        if (self.n is not None) != (self.kind == "shared_rows"):
            raise ValueError(
                f"Default: n is for kind='shared_rows', which needs it; got kind={self.kind!r} and "
                f"n={self.n}"
            )
        require_one_of("Default", ("initial_row", "shared_row"), begin_with=self.begin_with)
        if self.begin_with != "initial_row" and self.kind != "shared_rows":
            raise ValueError(
                f"Default: begin_with={self.begin_with!r} is for kind='shared_rows', got kind="
                f"{self.kind!r}"
            )
        if self.n is not None:
            int_within("Default", 1, n=self.n)
            if self.n > NUM_VIRTUAL_SHARDS:
                raise ValueError(f"Default: n must be at most {NUM_VIRTUAL_SHARDS}, got {self.n}")

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

    @staticmethod
    def initial_row() -> Default:
        """Each reads the row that it would begin with, which is not kept; nor is a gradient.

        What it reads follows from seed, table and key, as a row's first values do. Cost: making
        that row at each read; an `init.Custom` is called by readers, and must not call the table.
        It is called by calls that insert, too: one for which it raises has counted no key.
        """
        return Default(kind="initial_row")

    @staticmethod
    def shared_rows(n: int = 1, *, begin_with: BeginWith = "initial_row") -> Default:
        """They share `n` rows, which learn from all that read them.

        A key's row is a range of its virtual shards, so which one it reads depends on the key
        alone; with n > 1 they are the hashing trick for keys without a row. Shared rows have the
        table's optimizer, and their summed gradient updates them once a backward. They are no
        keys: they never leave, and neither `len` nor `max_rows` counts them. `shared_rows()` of a
        table gives them. They are saved and loaded with the table. Where its rows are cut over
        ranks, a rank has whole ranges of shared rows, so n must be a power of two there, and at
        least the number of ranks.

        `begin_with` says what a key begins with that gets a row, also one that returns: its initial
        row, or "shared_row", the weights that its shared row then has, with the state of a new row.
        Then is when it gets its row, and in a batch with a step when that batch first reads or
        trains the row: after the update of the batch before, however far ahead a pipeline maps.

        >>> import numpy as np
        >>> from recsdk_core import Default, Table, init, optim
        >>> table = Table(
        ...     dim=2,
        ...     max_rows=0,
        ...     default=Default.shared_rows(),
        ...     optimizer=optim.SGD(lr=1.0),
        ...     initializer=init.Constant(value=0.0),
        ... )
        >>> table.apply_gradients(np.array([7, 8]), np.ones((2, 2), dtype=np.float32))
        >>> table.lookup(np.array([9]))
        array([[-2., -2.]], dtype=float32)
        """
        return Default(kind="shared_rows", n=n, begin_with=begin_with)
