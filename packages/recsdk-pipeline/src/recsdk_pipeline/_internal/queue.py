"""The batches in flight of one iterator."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

from recsdk_pipeline._internal.slot import Slot
from recsdk_pipeline._internal.streams import SideStream

END: Final = object()
"""What `next_batch` returns after the last batch."""


class Queue:
    """The batches in flight of one iterator, and how far it has been read."""

    def __init__(self, iterator: Iterator[Any], *, is_training: bool) -> None:
        is_iterator = hasattr(type(iterator), "__next__")
        self._refused_kind = None if is_iterator else type(iterator).__name__
        self.is_training = is_training
        """Whether the iterator was first used in training mode."""
        self.slots: deque[Slot] = deque()
        self.is_exhausted = False
        self.has_ended = False
        try:
            self.iterator: Callable[[], Iterator[Any] | None] = weakref.ref(iterator)
        except TypeError:  # such as a list's iterator: then it is kept alive
            self.iterator = lambda: iterator

    def next_batch(self) -> Any:
        """Return the next batch, or `END`. Raises TypeError for what is no batch or iterator."""
        if self._refused_kind is not None:
            raise TypeError(
                f"dataloader_iter must be an iterator, got {self._refused_kind}; pass iter(data)"
            )
        iterator = self.iterator()
        batch = END if iterator is None else next(iterator, END)
        if batch is not END and not callable(getattr(batch, "to", None)):
            raise TypeError(
                "the iterator must yield batches with a method to(device, non_blocking=...), as "
                f"torchrec's Pipelineable, got {None if batch is None else type(batch).__name__}"
            )
        return batch

    def wait_for_host(self, stream: SideStream) -> Exception | None:
        """Wait for the host work of all batches; return the first error, in batch order."""
        for slot in self.slots:
            slot.wait_for_host(stream)
        return next((slot.error for slot in self.slots if slot.error is not None), None)

    def keep(self, *, failed: int) -> None:
        """Keep the batches before the first failed one, and a number of the failed ones.

        The others are abandoned: their errors' tracebacks keep them.
        """
        errors = [slot.error is not None for slot in self.slots]
        num_good = errors.index(True) if True in errors else len(errors)
        while len(self.slots) > num_good + failed:
            self.slots.pop().abandon()
