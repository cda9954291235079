"""How often tables on a device were updated: tables that are trained together count together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from recsdk_sharding.device.optimizers import Step

if TYPE_CHECKING:
    from recsdk_sharding.device.table import DeviceTable
    from recsdk_sharding.device.trained_rows import TrainedRows

__all__ = ["UpdateClock", "alike"]


class UpdateClock:
    """The updates of some tables so far, the same for all of them.

    So an update of many tables counts once, whatever their number. A table whose count is set, or
    that is trained without the others, takes another clock.
    """

    __slots__ = ("count", "last", "log_decay", "num_tables", "settings")

    def __init__(self, count: int = 0, log_decay: float = 0.0) -> None:
        self.count = count
        """Optimizer updates, empty ones included."""
        self.log_decay = log_decay
        """As `recsdk_core.Table.log_decay`."""
        self.num_tables = 0
        """How many tables have it."""
        self.settings: Sequence[Any] = ()
        """Of these, when they were last seen to be the same."""
        self.last: tuple[Step, tuple[str, ...]] | None = None
        """The last update, and the kernels that made it; None: there was none."""

    def take(self, step: Step, kernels: Sequence[str] = ()) -> None:
        """Notes that an update was made; noting it twice is as good as once."""
        self.count, self.log_decay = step.count, step.next_log_decay()
        self.last = step, tuple(kernels)

    def give_to(self, tables: Sequence[TrainedRows]) -> None:
        """Makes it theirs, in place of those that they had."""
        for table in tables:
            table.clock.num_tables -= 1
            table.clock = self
        self.num_tables += len(tables)


def alike(tables: Sequence[DeviceTable]) -> list[list[DeviceTable]]:
    """Those tables of a store that one update can be made of; they have one clock afterwards."""
    clock = tables[0].clock
    settings = [each.settings for each in tables]
    clocks = [each.clock for each in tables]
    is_joint = clock.num_tables == len(tables) == clocks.count(clock)
    # Seldom other objects than in the update before; equal ones if a scheduler made them.
    if is_joint and (settings == clock.settings or settings.count(settings[0]) == len(settings)):
        clock.settings = settings
        return [list(tables)]
    found: dict[Any, list[DeviceTable]] = {}
    for table in tables:
        place = table.settings, table.clock.count, table.clock.log_decay
        found.setdefault((id(table.store.block_of(table.stored)), place), []).append(table)
    for own in found.values():
        clock = UpdateClock(own[0].clock.count, own[0].clock.log_decay)
        clock.give_to(own)
        clock.settings = [each.settings for each in own]
    return list(found.values())
