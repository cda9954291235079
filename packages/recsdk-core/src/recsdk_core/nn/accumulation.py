"""Gradients of several backwards, applied to a table as one update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from recsdk_core._internal.interruptions import held_back
from recsdk_core.table import Lease
from recsdk_core.tables import release_leases

__all__ = ["Accumulation"]

T = TypeVar("T")


class Accumulation(Generic[T]):
    """The gradients that the backwards of one table have left so far.

    It also keeps the leases of their batches. So no other key gets a row that has a gradient here,
    and readers see the rows that these batches made once they are updated. Not thread-safe.
    """

    def __init__(self, num_backwards: int) -> None:
        """Collects the gradients of `num_backwards` backwards, at least 1."""
        self.num_backwards = num_backwards
        self._num_added = 0
        self._pass: int | None = None
        self._parts: list[T] = []
        self._leases: list[Lease] = []

    def add(self, parts: list[T], lease: Lease | None) -> list[T] | None:
        """Adds the gradients of a backward; returns all gradients if the update is due, else None.

        After the update call `drop`.
        """
        self._keep(parts, lease, 1)
        return self._parts if self._num_added >= self.num_backwards else None

    def add_in_pass(
        self, number: int, parts: list[T], lease: Lease | None, update: Callable[[list[T]], None]
    ) -> None:
        """Adds gradients of one lookup, of which a backward pass may have many.

        `number` is torch's of the running pass. If it is the last of `num_backwards` passes, it
        ends with `update` of all gradients, and then `drop`.
        """
        is_first = number != self._pass

        def end() -> None:
            with held_back():  # else they would be applied again
                try:
                    if self._parts:  # unless other rows were loaded meanwhile
                        update(self._parts)
                finally:
                    self.drop()

        if is_first and self._num_added + 1 >= self.num_backwards:
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(end)
        self._keep(parts, lease, is_first)
        self._pass = number

    def _keep(self, parts: list[T], lease: Lease | None, num_added: int) -> None:
        self._num_added += num_added
        self._parts += parts
        self._leases += [] if lease is None else [lease]

    def drop(self) -> None:
        """Forgets the gradients and releases the leases."""
        self._num_added, self._pass, self._parts = 0, None, []
        release_leases(self._leases)
        self._leases = []
