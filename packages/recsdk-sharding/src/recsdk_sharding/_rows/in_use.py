"""What each batch asks of the tables of a group, found without a walk through each of them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_

import torch

from recsdk_sharding._rows.rows import APPLIED, TableRows, anchor_of

__all__ = ["TablesInUse"]

_applied = attrgetter(APPLIED)


class TablesInUse:
    """The tables of a group, once all of them have an optimizer: what may change later is looked at
    in each batch, all else once.

    Copies and pickles begin anew.
    """

    def __init__(self, rows: Sequence[TableRows]) -> None:
        self._rows = list(rows)
        self._parameters: list[dict[str, torch.nn.Parameter]] | None = None
        self._seen: list[torch.nn.Parameter] | None = None
        """The parameters whose lists of optimizers are known; None: none yet."""
        self._applied: list[list[type]] = []
        """Those lists, to which torch adds: looking for them takes longer than their lengths."""

    def __getstate__(self) -> list[TableRows]:
        return self._rows

    def __setstate__(self, rows: list[TableRows]) -> None:
        self._rows, self._parameters, self._seen, self._applied = rows, None, None, []

    def check_trainable(self) -> None:
        """As that of each table, which also makes tables at their first use."""
        if self._weights() is None:
            for each in self._rows:
                each.check_trainable()
            self._settle()

    def anchor(self) -> torch.Tensor:
        """As `anchor_of` the tables."""
        weights = self._weights()
        if weights:
            with torch._C.DisableTorchFunctionSubclass():
                if all([each.requires_grad for each in weights]):  # noqa: C419, a list is faster
                    return weights[0]
        found = anchor_of(self._rows)
        self._settle()
        return found

    def _settle(self) -> None:
        if all(each.optimizer is not None for each in self._rows):
            self._parameters = [each.__dict__["_parameters"] for each in self._rows]

    def _weights(self) -> list[torch.nn.Parameter] | None:
        """The parameters, if each table has the one optimizer that was applied to it; else None."""
        if self._parameters is None:
            return None
        weights = [own["weight"] for own in self._parameters]
        if self._seen is None or not all(map(is_, weights, self._seen)):
            try:
                self._applied = list(map(_applied, weights))
            except AttributeError:  # of a new parameter
                return None
            self._seen = weights
        counts = list(map(len, self._applied))
        return weights if counts.count(1) == len(counts) else None
