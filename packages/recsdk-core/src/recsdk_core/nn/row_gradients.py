"""Gradients of a table's rows that wait for the step of a `RowOptimizer`.

Shape letters: N keys, U distinct rows, D row width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from recsdk_core.combine import CombineBlock, combine_gradients, distinct_keys
from recsdk_core.optim import Optimizer
from recsdk_core.outcome import Outcome
from recsdk_core.table import Lease, Table
from recsdk_core.tables import Bags

if TYPE_CHECKING:
    from recsdk_core.nn.function import FeatureBags

__all__ = ["RowGradients"]


class RowGradients:
    """The gradient of each row that backwards have touched, added up; not thread-safe.

    It keeps the leases of their batches, so that no other key gets a row that has a gradient here.
    Memory: D numbers and a row number for each touched row. A copy has no gradients and no
    optimizer, but waits for one if this one does.
    """

    def __init__(
        self,
        table: Table | None = None,
        *,
        is_fused: bool = False,
        waits: bool = False,
        is_told: bool = False,
    ) -> None:
        self.table = table
        self._is_told = is_told
        self._default: Optimizer | None = None
        self.is_fused = is_fused
        """Whether the module was given an optimizer of its own."""
        self.waits = waits
        """Whether backwards leave gradients here, in place of updating the rows themselves."""
        self.owner: object | None = None
        """What the optimizer that applies them holds too."""
        self.values: torch.Tensor | None = None
        """float32 (U, D), what is `weight.grad`; None: no backward has left any."""
        self._rows = torch.empty(0, dtype=torch.int64)
        self._leases: list[Lease] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return _copy_of, (self.is_fused, self.waits, self.is_told)

    def attach(self, table: Table) -> None:
        """Takes a table, whose optimizer is nobody's choice so far unless `is_told`."""
        self.table = table
        self._default = table.optimizer

    @property
    def is_told(self) -> bool:
        """Whether somebody said how the table is trained; a learning rate that is set says it."""
        if self.waits or self.is_fused or self._is_told or self.table is None:
            return True
        return self.table.optimizer is not self._default  # whoever sets one brings another object

    def check_trained(self) -> None:
        """Raises RuntimeError unless somebody said how the table is trained."""
        if self.is_told:
            return
        assert self.table is not None
        raise RuntimeError(
            f"table {self.table.name!r}: nobody said how to train it: pass optimizer= to its "
            "module, which then updates rows in backward, or make a RowOptimizer over the model, "
            "whose step the loop calls; requires_grad_(False) freezes it"
        )

    def check_owner(self) -> None:
        """Raises RuntimeError in a copy, which no optimizer would train."""
        if self.owner is None and self.table is not None:
            raise RuntimeError(
                f"table {self.table.name!r} is a copy of one that a RowOptimizer trains, and has "
                "no optimizer itself: make a RowOptimizer for the copy, or freeze it with "
                "requires_grad_(False)"
            )

    def keep(self, lease: Lease | None) -> None:
        """Keeps a batch's lease until `drop`."""
        if lease is not None:
            self._leases.append(lease)

    def add(
        self,
        feature: FeatureBags,
        mapped: Callable[[torch.Tensor], Bags],
        grad: torch.Tensor,
        column: int,
    ) -> None:
        """Adds the gradients of a feature's bags, from `column` on of each row of `grad`.

        `mapped` makes its bags with other row numbers.
        """
        assert self.table is not None
        has_row = feature.outcomes <= Outcome.INSERTED
        rows, which = distinct_keys(feature.rows[has_row])
        made = torch.zeros(len(rows), self.table.dim)
        if len(rows):
            which_N = torch.zeros_like(feature.rows)
            which_N[has_row] = which
            block = CombineBlock(
                bags=mapped(which_N),
                column=column,
                width=self.table.dim,
                start=0,
                num_sums=len(rows),
            )
            combine_gradients([block], grad, made.view(-1))
        self._merge(rows, made)

    def _merge(self, rows: torch.Tensor, made: torch.Tensor) -> None:
        if self.values is None:
            self._rows, self.values = rows, made
            return
        old = len(self._rows)
        self._rows, which = distinct_keys(torch.cat([self._rows, rows]))
        # Distinct rows come in order of first occurrence, so those from before stay in front.
        merged = made.new_zeros(len(self._rows), made.shape[1])
        merged[:old] = self.values
        self.values = merged.index_add_(0, which[old:], made)

    def replace(self, values: torch.Tensor) -> None:
        """Sets the gradients of the same rows; raises ValueError for another shape or dtype."""
        shape = None if self.values is None else self.values.shape
        if values.shape != shape or values.dtype != torch.float32 or values.is_sparse:
            raise ValueError(
                f"weight.grad of a table takes None, or float32 of the shape that it has, {shape}; "
                f"got {values.dtype} {tuple(values.shape)}"
            )
        self.values = values.detach()

    def bags(self) -> Bags:
        """The rows of `values`, each a bag of one key."""
        outcomes = torch.full(self._rows.shape, int(Outcome.FOUND), dtype=torch.uint8)
        return Bags(self._rows, outcomes, None, None, "sum")

    def drop(self) -> None:
        """Forgets the gradients and releases the leases."""
        for lease in self._leases:
            lease.release()
        self.values, self._leases = None, []
        self._rows = self._rows.new_empty(0)


def _copy_of(is_fused: bool, waits: bool, is_told: bool) -> RowGradients:
    return RowGradients(is_fused=is_fused, waits=waits, is_told=is_told)
