"""Where a checkpoint lies, and how it becomes complete at one point.

A checkpoint is a folder with `manifest.json` and a folder of files that is named after the
checkpoint's token. Without its manifest it is absent.

On a local file system a new checkpoint is written beside its place, as `.<name>.partial-<token>`,
and moved there by one rename. Overwriting writes the files into the old checkpoint's folder, beside
the old files, and commits by renaming the new manifest over the old one. An fsspec store is always
written in the second way, the manifest by one put.

Of saves to one place at the same time one wins. On a local file system it is the first, which holds
a lock until it ends. An fsspec store has no locks: there it is the one that began last.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from recsdk_core.checkpoint.manifest import FORMAT, FROZEN_FORMAT, MANIFEST_NAME, MAX_MANIFEST_BYTES
from recsdk_core.errors import CheckpointError
from recsdk_core.files.naming import reason_of
from recsdk_core.files.paths import is_url

__all__ = [
    "Source",
    "Store",
    "Target",
    "check_path",
    "is_frozen",
    "naming",
    "open_store",
    "read_manifest_from",
    "refuse_overtaken",
    "refuse_removed",
    "refuse_unless_complete",
    "refuse_unless_free",
    "write_all",
]

MAX_PATH = 1024

_PIECE = 2**24  # bytes


@dataclass(frozen=True)
class Target:
    """A file that is open for writing."""

    write: int | Callable[[memoryview], None]
    """A file descriptor, or a function that takes bytes."""
    name: str
    """For messages."""
    sums_content: bool = False
    """Whether the summary of what is written tells its content, too, which has no order."""

    def write_all(self, content: memoryview) -> None:
        """Writes all bytes, however few the system takes at a time."""
        if isinstance(self.write, int):
            write_all(self.write, content)
        else:
            self.write(content)


@dataclass(frozen=True)
class Source:
    """A file that is open for reading."""

    read: int | Callable[[int, int], bytes]
    """A file descriptor, or a function of offset and number of bytes."""
    size: int
    """Bytes."""
    name: str
    """For messages."""

    def read_all(self) -> bytes:
        """The whole file."""
        return b"".join(self.pieces())

    def pieces(self) -> Iterator[bytes]:
        """The whole file, piece by piece."""
        offset = 0
        while piece := self._read(offset, min(self.size - offset, _PIECE)):
            yield piece
            offset += len(piece)

    def _read(self, offset: int, size: int) -> bytes:
        if isinstance(self.read, int):
            return os.pread(self.read, size, offset)
        return self.read(offset, size)


class Store(ABC):
    """One place for one checkpoint. Its methods raise CheckpointError that names the file."""

    location: str
    """The path or URL, for messages."""
    address: str
    """The absolute path or URL."""

    local_path: str | None = None
    """The absolute path, if it lies on a local file system, whatever reads it."""

    def is_place_of(self, other: Store) -> bool:
        """Whether the other is the same place, perhaps under another name."""
        if self.local_path is None or other.local_path is None:
            return self.address == other.address
        if self.local_path == other.local_path:
            return True
        try:
            return os.path.samefile(self.local_path, other.local_path)
        except OSError:  # one of them does not exist
            return False

    @abstractmethod
    def begin(self, token: str, overwrite: bool) -> None:
        """Prepares the place for a new checkpoint; called on one rank, before all others join.

        Raises if there is a checkpoint, unless `overwrite`, and if there is anything else.
        """

    @abstractmethod
    def join(self, token: str) -> None:
        """Raises unless this process sees what `begin` has made."""

    @abstractmethod
    def create(self, token: str, path: str) -> AbstractContextManager[Target]:
        """Opens a new file for writing; when it closes without an error, the file is durable."""

    @abstractmethod
    def commit(self, token: str, manifest: bytes) -> None:
        """Completes the checkpoint; called on the rank that began, when all files are written."""

    @abstractmethod
    def abandon(self, token: str) -> None:
        """Removes what was written, as far as possible; never raises."""

    @abstractmethod
    def read_manifest(self) -> bytes:
        """The manifest's bytes; raises if there is no checkpoint."""

    @abstractmethod
    def open(self, path: str) -> AbstractContextManager[Source]:
        """Opens a file of the checkpoint."""

    @abstractmethod
    def has_manifest(self) -> bool:
        """Whether there is a file of that name; raises if that cannot be told."""

    @abstractmethod
    def stamp(self) -> Any:
        """A value that differs when the manifest was replaced; None if there is none."""

    @abstractmethod
    def children(self) -> Sequence[Store]:
        """Places in this folder, with or without a checkpoint; raises if there is no folder."""

    @abstractmethod
    def siblings(self) -> Sequence[Store]:
        """Other places in the same folder, with or without a checkpoint."""


_FROZEN_MARK = f'"format":"{FROZEN_FORMAT}"'.encode()
"""Stands in each manifest of frozen tables, whose JSON is canonical."""
_OTHER_MARK = f'"format":"{FORMAT}"'.encode()
"""Stands in no such manifest. Other checkpoints may have both: they hold what users saved."""


def is_frozen(store: Store) -> bool:
    """Whether a frozen checkpoint is there, of which the manifest may be damaged."""
    try:
        raw = store.read_manifest()
    except CheckpointError:
        return False
    return _FROZEN_MARK in raw and _OTHER_MARK not in raw


def check_path(path: Any) -> str:
    """The path or URL as a string; TypeError or ValueError for what cannot be one."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(text, str):
        raise TypeError(
            f"path must be a string or os.PathLike of one, got {type(text).__name__}"
            + ("; give os.fsdecode of it" if isinstance(text, bytes) else "")
        )
    if not 1 <= len(text) <= MAX_PATH:
        raise ValueError(f"path must have 1 to {MAX_PATH} characters, got {len(text)}")
    if "\0" in text:
        raise ValueError(f"path must not have a zero character, got {text!r}")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(
            f"path must have characters of UTF-8 only, got {text!r}, which is how Python shows "
            "other bytes; rename the folder"
        )
    return text


def open_store(path: Any) -> Store:
    """The store of a path or an fsspec URL; does not look at it yet.

    Raises ImportError, with the line to install, for a URL without fsspec.
    """
    text = check_path(path)
    if not is_url(text):
        from recsdk_core.checkpoint.local_store import LocalStore

        return LocalStore(Path(text))
    from recsdk_core.checkpoint.fsspec_store import open_url

    return open_url(text)


@contextmanager
def naming(location: str, doing: str) -> Iterator[None]:
    """Turns errors of the operating system into CheckpointError that names the file."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{location}: {doing} failed: {reason_of(error)}") from error


def refuse_unless_free(location: str, state: str, overwrite: bool) -> None:
    """Raises if a checkpoint must not be written there."""
    if state == "other":
        raise CheckpointError(
            f"{location}: there is something that is no checkpoint; remove it or choose another "
            "path (overwrite=True replaces checkpoints only)"
        )
    if state == "complete" and not overwrite:
        raise CheckpointError(
            f"{location}: there is a checkpoint already; choose another path or pass overwrite=True"
        )


def refuse_unless_complete(location: str, state: str) -> None:
    """Raises if there is no checkpoint to read."""
    if state == "other":
        raise CheckpointError(
            f"{location}: is no checkpoint: it has no {MANIFEST_NAME}; pass the folder that has one"
        )
    if state == "absent":
        raise CheckpointError(
            f"{location}: there is no checkpoint (a save whose process died leaves none); look at "
            "the path for mistakes"
        )


def refuse_removed(location: str) -> NoReturn:
    """Raises because files of a checkpoint were removed before its commit."""
    raise CheckpointError(
        f"{location}: its files were removed during the save; let one process save to a path at "
        "a time, and remove nothing there meanwhile"
    )


def refuse_overtaken(location: str) -> NoReturn:
    """Raises because another save came to the same place meanwhile."""
    raise CheckpointError(
        f"{location}: another save to this path has begun or committed meanwhile, so this one "
        "has failed; let one process save to a path at a time"
    )


def read_manifest_from(source: Source) -> bytes:
    """All bytes; raises for more than a manifest may have, and for the zeros of sparse files."""
    if source.size > MAX_MANIFEST_BYTES:
        raise CheckpointError(
            f"{source.name}: has {source.size} bytes, more than a manifest may, "
            f"{MAX_MANIFEST_BYTES}"
        )
    parts = []
    for piece in source.pieces():
        if b"\0" in piece:
            raise CheckpointError(f"{source.name}: has zero bytes, so it is no manifest")
        parts.append(piece)
    return b"".join(parts)


def write_all(descriptor: int, content: memoryview) -> None:
    """Writes all bytes, however few the system takes at a time."""
    while content:
        content = content[os.write(descriptor, content) :]
