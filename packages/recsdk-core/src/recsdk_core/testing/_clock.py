"""The steps that a table with eviction or admission has seen, in plain Python."""

from __future__ import annotations

__all__ = ["Clock"]


class Clock:
    """Where it stands: a call without a step is a step of its own, after the latest."""

    def __init__(self) -> None:
        self.step = 0
        self._lease_step: int | None = None
        self._is_begun = False
        self._had_leases = False

    def step_of(self, lease_step: int | None) -> int:
        """The step of a call, under a lease with a step or none; ValueError if it is past."""
        goes_on = self._is_begun or self._had_leases
        if lease_step is None or (self._lease_step is None and goes_on):
            return min(self.step + 1, 2**63 - 1)
        if self._lease_step is None:
            return lease_step
        if lease_step < self._lease_step:
            raise ValueError(f"step {lease_step} is mapped after {self._lease_step}")
        return min(self.step + lease_step - self._lease_step, 2**63 - 1)

    def decided(self, step: int, lease_step: int | None) -> None:
        """A call has decided."""
        self.step, self._lease_step, self._is_begun = step, lease_step, True

    def is_due(self, step: int, every: int) -> bool:
        """Whether this step is, or has passed, a multiple that the latest has not."""
        return self._is_begun and step // every != self.step // every

    def forget_lease(self, *, had_leases: bool) -> None:
        """A table that was loaded takes the next lease, whatever its step, as one step later.

        `had_leases`: the table before; of one that had none the first says where the clock begins.
        """
        self._lease_step = None
        self._had_leases = had_leases
