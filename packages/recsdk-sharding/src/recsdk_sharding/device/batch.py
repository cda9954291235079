"""A mapped batch as it goes to the device: the rows of all tables' keys, bag after bag.

The host only puts arrays one behind the other; what follows from them is found on the device. The
numbers of rows come last, from the call that maps the keys. A key takes four bytes on the way,
eight in a store of 2^31 rows and more; a bag takes as many, unless each of a batch has one key.

Shape letters: N keys, B bags, F blocks of bags, D row width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from recsdk_core import Lease, Outcome, StoreNumbers
from recsdk_core.nn.accumulation import Accumulation
from recsdk_sharding.device.parcel import Item, Parcel, put_optional
from recsdk_sharding.device.set_bags import BagItems, Block, SetBags
from recsdk_sharding.device.sets import SetLayout, sets_of

if TYPE_CHECKING:
    from recsdk_sharding.device.table import DeviceTable

__all__ = ["BagItems", "Block", "PlannedBatch", "ReadBags", "TableSet"]


@dataclass(frozen=True)
class ReadBags:
    """Bags of a set that lie side by side."""

    first: int
    count: int
    first_key: int
    bags: BagItems


@dataclass(frozen=True)
class TableSet:
    """Tables of one store that are pooled as one, and trained by one update if they are alike."""

    tables: list[DeviceTable]
    accumulations: Sequence[Accumulation[Any]]
    """Of those of its tables that accumulate; a set that is trained has no others then."""
    spare_row: int
    """The last one of its tables, which takes what must not be written. Of the store."""
    bags: BagItems
    num_bags: int
    read: ReadBags | None
    """The bags that are read; None: all are."""
    blocks: list[Block]
    starts_F: Item | None
    """Where the vectors of each block begin in the matrix of results, (F,); None: that is none."""
    unit: int
    """As that of a `BagMatrix`."""
    divisors_B: Item | None
    """What sums are divided by, float32 (B,); None: by nothing."""
    places_N: Item | None
    """Where each key's weight is among those that come late, int64 (N,); None: none do."""
    begins: Sequence[tuple[DeviceTable, int]]
    """Tables whose new rows begin with shared ones, and the last call that made a row of the batch.
    """

    @property
    def dim(self) -> int:
        """Row width D."""
        return self.tables[0].dim


class PlannedBatch:
    """A batch whose keys are not mapped yet, as far as it is known."""

    def __init__(self, bags: Any, request: Any, *, training: bool) -> None:
        """`bags`, `request`: `GroupBags` and `PoolRequest` of `recsdk_sharding._rows.home`."""
        self._plan = plan = _plan_of(bags, request, training=training)
        self.parcel = parcel = plan.make_parcel()
        """Sealed."""
        self.numbers: StoreNumbers | None = None
        """Where the numbers of rows are written when keys are mapped; None: `mapped` does."""
        if plan.placing is not None:
            self.numbers = StoreNumbers([parcel.room(item) for item in plan.rooms], *plan.placing)

    def mapped(self, bags: Any) -> Sequence[TableSet]:
        """What each set of tables needs of the parcel; `bags`: `MappedBags`."""
        if bags.rows is None:  # they are in the parcel
            assert self._plan.ready is not None
            return self._plan.ready
        sets = [own.mapped(self.parcel, bags) for own in self._plan.sets]
        self.parcel.seal()
        return sets

    def leases(self, bags: Any) -> list[Sequence[Lease]]:
        """What the keys of each set's tables are under; `bags`: `MappedBags`."""
        return [own.layout.of_members(bags.leases) for own in self._plan.sets]


class _Plan:
    """What follows from bags before their keys are mapped: the same if a batch has the same."""

    def __init__(self, bags: Any, request: Any, layouts: Sequence[SetLayout]) -> None:
        parcel = Parcel()
        self.bags = bags
        self.layouts = layouts
        self.sets = [_PlannedSet(parcel, bags, layout, request) for layout in layouts]
        self.make_parcel = parcel.again()
        takes = request.pooled is None and all(layout.takes_numbers for layout in layouts)
        self.placing = self._placing(bags) if takes else None
        """What `StoreNumbers` says beside the arrays of the parcel; None: it takes no numbers."""
        self.rooms = [own.items.rows_N for own in self.sets]
        """Those arrays."""
        self.ready = [own.made(own.items, None, ()) for own in self.sets] if takes else None
        """The sets if row numbers are written to those; None: it takes no numbers."""

    def _placing(self, bags: Any) -> list[NDArray[np.int64]]:
        begins_P = np.zeros(len(bags.num_keys_P), np.int64)
        for own in self.sets:
            begins_P[own.bags.pieces_P] = own.bags.firsts_P
        stores_T, *placing = _places_of(bags.group, self.layouts)
        return [stores_T, begins_P, *placing]


def _places_of(group: Any, layouts: Sequence[SetLayout]) -> list[NDArray[np.int64]]:
    """Of each shard, int64 (T,): which store has it, and what `StoreNumbers` says of its place."""
    kept = group.kept.get(_places_of)
    if kept is None or kept[0] is not layouts:
        found = np.zeros((4, len(group.tables)), np.int64)
        for number, layout in enumerate(layouts):
            found[0, layout.members_T] = number
            found[1:, layout.members_T] = layout.placing_3T
        kept = group.kept[_places_of] = layouts, list(found)
    places: list[NDArray[np.int64]] = kept[1]
    return places


def _plan_of(bags: Any, request: Any, *, training: bool) -> _Plan:
    """That of the batch before if its bags were these; bags with arrays of their own are new."""
    layouts, kept = sets_of(bags.group, training=training), bags.group.kept
    if request.shape is None or bags.offsets is not None or bags.weights is not None:
        return _Plan(bags, request, layouts)
    plan: _Plan | None = kept.get((_Plan, training))
    if plan is None or plan.bags is not bags or plan.layouts is not layouts:
        plan = kept[_Plan, training] = _Plan(bags, request, layouts)
    return plan


class _PlannedSet:
    def __init__(self, parcel: Parcel, bags: Any, layout: SetLayout, request: Any) -> None:
        self.layout = layout
        self.bags = own = SetBags(bags, layout, layout.order_of(bags.num_pieces_T, bags.starts_P))
        self.items = own.put(parcel)
        self._num_bags = own.num_bags
        self._blocks = own.blocks(is_matrix=request.shape is not None)
        starts, self._unit = None, 1
        if request.shape is not None:
            starts = np.array([start for _, _, start in self._blocks], layout.number)
            self._unit = 1 if (starts % 4).any() else 4
        self._starts_F = put_optional(parcel, starts)
        self._divisors_B = put_optional(parcel, own.divisors())
        self._places_N = put_optional(parcel, own.places_in(request.weight_starts_P))
        self._read: tuple[SetBags, ReadBags] | None = None
        if request.pooled is not None:
            part, first, first_key = own.within(request.pooled)
            self._read = part, ReadBags(first, part.num_bags, first_key, part.put(parcel))

    def mapped(self, parcel: Parcel, bags: Any) -> TableSet:
        layout, read = self.layout, None
        if self._read is not None:
            part, read = self._read
            read = replace(read, bags=_mapped_items(parcel, part, read.bags, bags))
        items = _mapped_items(parcel, self.bags, self.items, bags)
        return self.made(items, read, _begins_of(bags, layout) if layout.with_shared else ())

    def made(
        self, items: BagItems, read: ReadBags | None, begins: Sequence[tuple[DeviceTable, int]]
    ) -> TableSet:
        """Its tables with these bags."""
        layout = self.layout
        return TableSet(
            tables=layout.tables,
            accumulations=layout.accumulations,
            spare_row=layout.spare_row,
            bags=items,
            num_bags=self._num_bags,
            read=read,
            blocks=self._blocks,
            starts_F=self._starts_F,
            unit=self._unit,
            divisors_B=self._divisors_B,
            places_N=self._places_N,
            begins=begins,
        )


def _mapped_items(parcel: Parcel, own: SetBags, items: BagItems, mapped: Any) -> BagItems:
    if mapped.rows is None:
        return items
    own.write_rows(mapped, parcel.room(items.rows_N))
    return replace(items, initial=own.put_initial(parcel, mapped))


def _begins_of(bags: Any, layout: SetLayout) -> list[tuple[DeviceTable, int]]:
    ends_P = np.append(0, bags.num_keys_P.cumsum())
    ends = ends_P[np.append(0, bags.num_pieces_T.cumsum())].tolist()
    rows_N, outcomes_N = bags.rows_N.numpy(), bags.outcomes_N.numpy()
    found = []
    for place in layout.with_shared:
        table, number = layout.tables[place], layout.members[place]
        own = slice(ends[number], ends[number + 1])
        has_row = outcomes_N[own] <= Outcome.INSERTED
        found.append((table, table.last_call_of(rows_N[own][has_row])))
    return found
