"""Names of tables that were given none: drawn as torch draws the first rows of nn.Embedding.

So two such tables have different rows, and `torch.manual_seed` repeats them. The draw is in the
`state_dict`: whoever loads it goes on with the same new rows.
"""

from __future__ import annotations

import torch

from recsdk_core.nn.unused_entries import UnusedEntry
from recsdk_core.table import Table

__all__ = ["DRAWN_NAME", "draw_name", "is_drawn", "name_of", "named_since"]

DRAWN_NAME = "drawn_name"
"""The entry of a `state_dict`, an int64 number."""


def draw_name() -> int:
    """A number from torch's default generator on the cpu."""
    return int(torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu"))


def name_of(drawn: int) -> str:
    """The name that a drawn number stands for."""
    return f"unnamed_{drawn:016x}"


def is_drawn(value: object) -> bool:
    """Whether an entry can be a draw."""
    return isinstance(value, torch.Tensor) and value.dtype == torch.int64 and value.numel() == 1


def named_since(table: Table, prefix: str) -> str:
    """The name of an entry that a table with a name does not use."""
    return UnusedEntry(
        prefix + DRAWN_NAME,
        f"the table had no name when it was saved, and is {table.name!r} now, so new keys would "
        "get other rows; leave name= out, or load with strict=False",
    )
