"""Gradients of several backwards, applied to a table as one update."""

from __future__ import annotations

from typing import Generic, TypeVar

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
        self._parts: list[T] = []
        self._leases: list[Lease] = []

    def add(self, parts: list[T], lease: Lease | None) -> list[T] | None:
        """Adds the gradients of a backward; returns all gradients if the update is due, else None.

        After the update call `drop`.
        """
        self._num_added += 1
        self._parts += parts
        if lease is not None:
            self._leases.append(lease)
        return self._parts if self._num_added == self.num_backwards else None

    def drop(self) -> None:
        """Forgets the gradients and releases the leases."""
        release_leases(self._leases)
        self._num_added, self._parts, self._leases = 0, [], []
