"""What became of one key of one call."""

from __future__ import annotations

import enum

__all__ = ["Outcome"]


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
