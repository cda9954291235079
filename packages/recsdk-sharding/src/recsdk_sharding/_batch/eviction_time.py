"""The time of batches, for tables that evict by time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from recsdk_core import Evict

__all__ = ["evicts_by_time", "require_time", "set_time", "tables_with_time"]

_INT64 = 2**63


def evicts_by_time(rule: Evict | None) -> bool:
    """Whether a rule goes by the time of batches."""
    return rule is not None and rule.by == "time"


def require_time(time: object) -> int:
    """The time, if it is one; raises TypeError or ValueError for anything else."""
    if isinstance(time, bool) or not isinstance(time, int):
        raise TypeError(f"set_time: the time must be an int, got {time!r}")
    if not -_INT64 <= time < _INT64:
        raise ValueError(f"set_time: the time must be in [-2**63, 2**63), got {time}")
    return time


def tables_with_time(tables: Iterable[Any]) -> list[Any]:
    """Those of some tables that evict by time."""
    return [table for table in tables if evicts_by_time(getattr(table, "eviction", None))]


def set_time(tables: Iterable[Any], time: int | None) -> None:
    """Sets the time of tables that evict by time; None: it stays.

    Raises ValueError if one never had any.
    """
    for table in tables:
        if time is not None:
            table.time = time
        elif table.time is None:
            raise ValueError(
                f"table {table.name!r}: Evict.lru(by='time') needs the time of a batch; call "
                "set_time(...) of its collection before the first one"
            )
