"""What a table keeps, as plain Python."""

from __future__ import annotations

from typing import Any

from recsdk_core import Table


def keys_of(*tables: Any) -> set[int]:
    """The keys that have a row in some table."""
    return {key for table in tables for batch in table.export() for key in batch.keys.tolist()}


def records_of(table: Table) -> list[list[int]]:
    """What admission keeps of keys without a row, column by column."""
    cut = table._engine.cut(False, None)
    found = [part.tolist() for part in cut.admission or ()]
    cut.finish(False)
    return found
