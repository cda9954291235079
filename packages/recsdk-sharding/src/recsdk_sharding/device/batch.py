"""A mapped batch as it goes to the device: the rows of all tables' keys, bag after bag.

The host only puts arrays one behind the other; what follows from them is found on the device. A key
takes four bytes on the way, eight in a store of 2^31 rows and more; a bag takes as many, unless
each of a batch has one key.

Shape letters: N keys, B bags, F blocks of bags, D row width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from recsdk_core import Lease, Outcome
from recsdk_core.nn.accumulation import Accumulation
from recsdk_sharding.device.parcel import Item, Parcel, put_optional
from recsdk_sharding.device.set_bags import BagItems, Block, SetBags
from recsdk_sharding.device.sets import SetLayout, sets_of

if TYPE_CHECKING:
    from recsdk_sharding.device.table import DeviceTable

__all__ = ["BagItems", "Block", "ReadBags", "TableSet", "plan_batch"]


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
    leases: Sequence[Lease]
    """What the keys of each are under."""
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


def plan_batch(bags: Any, request: Any, *, training: bool) -> tuple[Parcel, list[TableSet]]:
    """A sealed parcel, and what of it each set of tables needs.

    `bags`, `request`: `GroupBags` and `PoolRequest` of `recsdk_sharding._rows.home`.
    """
    parcel = Parcel()
    layouts = sets_of(bags.group, training=training)
    plans = [_plan_set(parcel, bags, layout, request) for layout in layouts]
    parcel.seal()
    return parcel, plans


def _plan_set(parcel: Parcel, bags: Any, layout: SetLayout, request: Any) -> TableSet:
    own = SetBags(bags, layout, layout.order_of(bags.num_pieces_T, bags.starts_P))
    items = own.put(parcel)
    read = None
    if request.pooled is not None:
        part, first, first_key = own.within(request.pooled)
        read = ReadBags(first, part.num_bags, first_key, part.put(parcel))
    blocks = own.blocks(is_matrix=request.shape is not None)
    starts = None
    if request.shape is not None:
        starts = np.array([start for _, _, start in blocks], layout.number)
    return TableSet(
        tables=layout.tables,
        leases=layout.of_members(bags.leases),
        accumulations=layout.accumulations,
        spare_row=layout.spare_row,
        bags=items,
        num_bags=own.num_bags,
        read=read,
        blocks=blocks,
        starts_F=put_optional(parcel, starts),
        divisors_B=put_optional(parcel, own.divisors()),
        places_N=put_optional(parcel, own.places_in(request.weight_starts_P)),
        begins=_begins_of(bags, layout) if layout.with_shared else (),
    )


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
