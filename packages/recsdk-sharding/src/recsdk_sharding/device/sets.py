"""Which tables of a group are pooled as one, and trained by one update if they are alike.

Most of it is the same in every batch of a group. So it is found once and kept with the group; what
a batch may change is looked at.

Shape letters: P pieces of a set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from recsdk_sharding.device.table import DeviceTable

__all__ = ["PieceOrder", "SetLayout", "sets_of"]


@dataclass(frozen=True)
class PieceOrder:
    """The pieces of a set, in the order of their vectors."""

    num_pieces_T: NDArray[np.int64]
    """Of each of the group's shards, as the batch had it for which this was found."""
    pieces_P: NDArray[np.int64]
    """Which of the group's they are."""
    tables_P: NDArray[np.int64]
    """Which of the set's tables each one's is."""

    def at(self, places: NDArray[np.int64]) -> PieceOrder:
        """Some of them."""
        return PieceOrder(self.num_pieces_T, self.pieces_P[places], self.tables_P[places])

    def fits(self, num_pieces_T: NDArray[np.int64], starts_P: NDArray[np.int64]) -> bool:
        """Whether it is that of a batch, too, whose vectors begin there."""
        is_same = self.num_pieces_T is num_pieces_T or np.array_equal(
            self.num_pieces_T, num_pieces_T
        )
        if not is_same:
            return False
        own_P = starts_P[self.pieces_P]
        return bool((own_P[1:] >= own_P[:-1]).all())


class SetLayout:
    """Tables of one store that are a set."""

    def __init__(self, group: Any, members: list[int]) -> None:
        """`members`: which of the shards of `group`, a `ShardGroup` of `_rows.home`."""
        self.members = members
        self.tables: list[DeviceTable] = [group.tables[number] for number in members]
        accumulations = [group.accumulations[number] for number in members]
        self.accumulations = [each for each in accumulations if each is not None]
        """Of those of its tables that accumulate."""
        self.store = self.tables[0].store
        self.number = np.dtype(np.int32 if len(self.store.weight_RD) < 2**31 else np.int64)
        """The type of its row numbers."""
        self.spare_row = max(each.spare_row_of_store for each in self.tables)
        """The last one of its tables, which takes what must not be written."""
        self.with_shared = [n for n, each in enumerate(self.tables) if each.begins_with_shared]
        """Which of its tables' new rows begin with shared ones."""
        self.with_initial = [n for n, each in enumerate(self.tables) if each.reads_initial_rows]
        """Whose keys without a row read their initial rows."""
        self.members_T = np.array(members, np.int64)
        """The same, as an array."""
        self.placing_3T = np.array([each.placing for each in self.tables], np.int64).T
        """As `StoreNumbers` takes it: the first row of each table, its default row, and how many
        shared rows it has."""
        self._num_shards = len(group.tables)
        self._order: PieceOrder | None = None

    def of_members(self, values: Sequence[Any]) -> Sequence[Any]:
        """What its shards have, of what each of the group's has."""
        if len(self.members) == self._num_shards:
            return values
        return [values[number] for number in self.members]

    def order_of(self, num_pieces_T: NDArray[np.int64], starts_P: NDArray[np.int64]) -> PieceOrder:
        """The order of its pieces, of those of the group, whose vectors begin there."""
        if self._order is None or not self._order.fits(num_pieces_T, starts_P):
            self._order = self._find_order(num_pieces_T, starts_P)
        return self._order

    def _find_order(
        self, num_pieces_T: NDArray[np.int64], starts_P: NDArray[np.int64]
    ) -> PieceOrder:
        table_of = np.full(self._num_shards, -1)
        table_of[self.members] = np.arange(len(self.members))
        tables_P = np.repeat(table_of, num_pieces_T)
        own_P = np.flatnonzero(tables_P >= 0)
        pieces_P = own_P[np.argsort(starts_P[own_P], kind="stable")]
        return PieceOrder(num_pieces_T, pieces_P, tables_P[pieces_P])

    @property
    def takes_numbers(self) -> bool:
        """Whether it needs no row numbers of its tables but those of the store."""
        return not self.with_shared and not self.with_initial

    def placing_of(self, tables_P: NDArray[np.int64]) -> NDArray[np.int64]:
        """The same of each piece's table, (3, P), as `join_rows` takes it."""
        placing_3P: NDArray[np.int64] = self.placing_3T.take(tables_P, axis=1)
        return placing_3P


def sets_of(group: Any, *, training: bool) -> list[SetLayout]:
    """The sets of a group's shards: those of one store are one.

    In training they are of equal settings, too, and a table that accumulates is alone.
    """
    settings = [table.settings for table in group.tables] if training else []
    found: tuple[list[Any], list[SetLayout]] | None = group.kept.get(training)
    # Settings are seldom other objects than in the batch before, which is quickly seen.
    if found is None or found[0] != settings:
        found = settings, [SetLayout(group, each) for each in _members_of(group, settings)]
        group.kept[training] = found
    return found[1]


def _members_of(group: Any, settings: Sequence[Any]) -> list[list[int]]:
    """Which shards each set has; `settings`: of their tables, none if these are not trained."""
    sets: dict[Any, list[tuple[Any, list[int]]]] = {}
    for number, table in enumerate(group.tables):
        own = settings[number] if settings else ()
        is_alone = bool(settings) and group.accumulations[number] is not None
        of_store = sets.setdefault(table if is_alone else table.store, [])
        for common, members in of_store:  # comparing costs less than hashing, and most are equal
            if common == own:
                members.append(number)
                break
        else:
            of_store.append((own, [number]))
    return [members for of_store in sets.values() for _, members in of_store]
