"""Writes to the tensors of a table that belong together: all of them happen, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

__all__ = ["Write", "Writes"]

Write: TypeAlias = Callable[[], object]
"""Writes one tensor in place, of values that are computed; doing it twice is as good as once."""


class Writes:
    """Makes writes in order; those that a failure left are made before anybody reads.

    In the middle of an update the memory of a device may run out, or an operator fail. Then the
    new values are at hand and the old ones are not, so the update is completed, not undone.
    """

    def __init__(self) -> None:
        self._left: list[Write] = []

    def commit(self, writes: Sequence[Write], *, has_begun: bool = False) -> None:
        """Makes the writes in order. Raises what the first raises; then nothing has been written.

        If a later one raises, it is left for `finish`, with those after it. `has_begun`: something
        that belongs to them is written already, so the first counts as a later one.
        """
        self.finish()
        self._left = list(writes)
        try:
            self.finish()
        except Exception:
            if not has_begun and len(self._left) == len(writes):
                self._left = []
                raise

    @torch.no_grad()
    def finish(self) -> None:
        """Makes the writes that are left; call it before the tensors are read or written.

        Raises what a write raises, and keeps that write for the next call.
        """
        while self._left:
            self._left[0]()
            del self._left[0]
