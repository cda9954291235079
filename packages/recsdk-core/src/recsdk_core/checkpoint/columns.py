"""Names, in a checkpoint, of tables that are parts of others.

Optimizers may keep state for a column range as a whole, so each range is a table of its own. So are
the rows that keys without one share.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recsdk_core.checkpoint.manifest import TableEntry

__all__ = ["base_of", "columns_of", "name_of", "shared_name", "shares_rows", "tables_of_keys"]

_PART = re.compile(r"(?s:(?P<base>.+))\.columns_(?P<first>[0-9]{1,7})_(?P<last>[0-9]{1,7})")


def name_of(base: str, columns: tuple[int, int]) -> str:
    """The name of a table's column range, from the first column up to the second."""
    return f"{base}.columns_{columns[0]}_{columns[1]}"


def shared_name(name: str) -> str:
    """The name of the rows that keys without one share, of a table or of one of its ranges."""
    return f"{name}.shared"


def shares_rows(entry: TableEntry) -> bool:
    """Whether keys of a table without a row share some, which are a table of the checkpoint."""
    return entry.default is not None and "n" in entry.default.arguments


def tables_of_keys(tables: Sequence[TableEntry]) -> list[TableEntry]:
    """Those that are no shared rows of another."""
    shared = {shared_name(entry.name) for entry in tables if shares_rows(entry)}
    return [entry for entry in tables if entry.name not in shared]


def base_of(name: str) -> str:
    """The name of the whole table; `name` itself if it names no column range."""
    part = _PART.fullmatch(name)
    return name if part is None else part["base"]


def columns_of(name: str) -> tuple[int, int] | None:
    """The columns of a range; None if the name names no column range."""
    part = _PART.fullmatch(name)
    return None if part is None else (int(part["first"]), int(part["last"]))
