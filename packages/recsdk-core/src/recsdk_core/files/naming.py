"""What is wrong with a file, in one line that names it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["naming_file", "reason_of"]


def reason_of(error: OSError) -> str:
    """Why the system refused, without its number and the file."""
    return error.strerror or str(error) or type(error).__name__


@contextmanager
def naming_file(location: str, doing: str) -> Iterator[None]:
    """Has an OSError of the block say what was done with which file; its kind and errno stay."""
    try:
        yield
    except OSError as error:
        kind = type(error) if type(error).__module__ == "builtins" else OSError
        told = kind(f"{location}: {doing} failed: {reason_of(error)}")
        told.errno = error.errno
        raise told from error
