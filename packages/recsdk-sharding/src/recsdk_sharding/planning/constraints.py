"""torchrec's constraints, with what a user knows of a table's rows."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

from torchrec.distributed.planner.types import ParameterConstraints

from recsdk_sharding._configs.checking import int_of, is_finite, number_of
from recsdk_sharding._configs.configs import HashTableConfig
from recsdk_sharding.planning.checking import MOST, check_instance
from recsdk_sharding.planning.planned_tables import PlannedTable

__all__ = ["HashParameterConstraints", "planned_rows"]


@dataclass
class HashParameterConstraints(ParameterConstraints):  # type: ignore[misc]
    """torchrec's `ParameterConstraints` for a table whose rows come as their ids show up.

    Memory is planned for `expected_rows * growth` rows, whatever `num_embeddings` is. Traffic is
    given as in torchrec: `pooling_factors` (ids of a sample, by feature) and `batch_sizes`.

    Raises ValueError or TypeError for a number that is out of range.

    >>> user = HashParameterConstraints(expected_rows=3_000_000, growth=1.5, pooling_factors=[20.0])
    >>> user.sharding_types is None
    True
    """

    expected_rows: int | None = None
    """Distinct ids that the table has, over all ranks; at least 0. None: `num_embeddings`."""
    growth: float = 1.0
    """The factor by which its rows may grow before it is planned anew; at least 1, by default 1."""

    def __post_init__(self) -> None:
        if self.expected_rows is not None:
            self.expected_rows = int_of("expected_rows", self.expected_rows)
            if self.expected_rows < 0:
                raise ValueError(f"expected_rows must be at least 0, got {self.expected_rows}")
        self.growth = growth = number_of("growth", self.growth)
        if not (1 <= growth <= sys.float_info.max):
            raise ValueError(f"growth must be a finite number of at least 1, got {growth}")

    def __hash__(self) -> int:
        return hash((super().__hash__(), self.expected_rows, self.growth))


def planned_rows(
    table: HashTableConfig | PlannedTable, constraints: ParameterConstraints | None
) -> int:
    """Rows of a table, over all ranks, that memory is planned for; at most its `max_rows`.

    Raises TypeError for what is no config or no constraints, ValueError for 2**63 rows and more.
    """
    if constraints is not None:
        kind = "ParameterConstraints or None"
        check_instance("constraints", constraints, ParameterConstraints, kind)
    if not isinstance(table, (HashTableConfig, PlannedTable)):
        raise TypeError(f"table must be a config of a hash table, got {type(table).__name__}")
    rows: Any = getattr(constraints, "expected_rows", None)
    expected = table.num_embeddings if rows is None else rows
    growth = getattr(constraints, "growth", 1.0)
    if not is_finite(expected) or expected * growth > MOST:
        raise ValueError(
            f"table {table.name!r}: expected_rows * growth is too large to plan for, got growth="
            f"{growth}; pass a smaller one"
        )
    planned = math.ceil(expected * growth)
    return planned if table.max_rows is None else min(planned, table.max_rows)
