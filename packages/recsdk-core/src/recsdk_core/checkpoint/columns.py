"""Names, in a checkpoint, of tables that are parts of others.

Optimizers may keep state for a column range as a whole, so each range is a table of its own. So are
the rows that keys without one share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recsdk_core.checkpoint.manifest import TableEntry

__all__ = [
    "WholeTable",
    "all_tables",
    "name_of",
    "shared_name",
    "shares_rows",
    "tables_of_keys",
    "whole_tables",
]


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


@dataclass(frozen=True)
class WholeTable:
    """A table as a model has it, whatever ranges of its columns are tables of a checkpoint."""

    name: str
    """That of the model."""
    parts: tuple[TableEntry, ...]
    """It alone, or its ranges in the order of columns. What they say of keys is the same in all."""

    @property
    def dim(self) -> int:
        """Row width."""
        return sum(part.dim for part in self.parts)


def whole_tables(tables: Sequence[TableEntry]) -> list[WholeTable]:
    """The tables of keys; those that are together all columns of one table are that table."""
    by_name: dict[str, list[TableEntry]] = {}
    for entry in tables_of_keys(tables):
        by_name.setdefault(entry.whole_name, []).append(entry)
    found = []
    for name, entries in by_name.items():
        parts = sorted(entries, key=lambda entry: entry.columns.first if entry.columns else 0)
        if _are_one_table(parts):
            found.append(WholeTable(name, tuple(parts)))
        else:
            found += [WholeTable(entry.name, (entry,)) for entry in entries]
    return found


def all_tables(tables: Sequence[TableEntry]) -> list[WholeTable]:
    """Those of keys, then the rows that keys without one share, of all columns as well."""
    by_name = {entry.name: entry for entry in tables}
    of_keys = whole_tables(tables)
    shared = []
    for table in of_keys:
        names = [shared_name(part.name) for part in table.parts if shares_rows(part)]
        parts = tuple(by_name[name] for name in names if name in by_name)
        if parts:
            shared.append(WholeTable(shared_name(table.name), parts))
    return of_keys + shared


def _are_one_table(parts: Sequence[TableEntry]) -> bool:
    """Whether they follow one another from the first column on, and are alike but for that."""
    end = 0
    for part in parts:
        if part.columns is None or part.columns.first != end or _kind(part) != _kind(parts[0]):
            return False
        end += part.dim
    return len(parts) > 1


def _kind(part: TableEntry) -> tuple[object, ...]:
    return part.default, part.default_value, [(field.name, field.dtype) for field in part.fields]
