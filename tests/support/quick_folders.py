"""Folders for tests that save much, and not to see what a disk does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

__all__ = ["quick_folder"]

_IN_MEMORY = Path("/dev/shm")


@contextmanager
def quick_folder() -> Iterator[str]:
    """A new folder, gone afterwards; in memory where there is any, so that syncs cost nothing."""
    with TemporaryDirectory(dir=_IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None) as folder:
        yield folder
