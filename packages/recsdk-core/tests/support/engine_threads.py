"""Another number of the engine's threads, for as long as a block runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from recsdk_core import num_threads, set_num_threads

__all__ = ["engine_threads"]


@contextmanager
def engine_threads(count: int) -> Iterator[None]:
    """Inside, calls run on so many threads."""
    before = num_threads()
    set_num_threads(count)
    try:
        yield
    finally:
        set_num_threads(before)
