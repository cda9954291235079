"""Checkpoints on any store that fsspec has a file system for; the only import of fsspec."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from recsdk_core._internal.extras import require
from recsdk_core.checkpoint.local_store import LocalStore
from recsdk_core.checkpoint.manifest import MANIFEST_NAME, Manifest
from recsdk_core.checkpoint.stores import (
    Source,
    Store,
    Target,
    read_manifest_from,
    refuse_overtaken,
    refuse_unless_complete,
    refuse_unless_free,
)
from recsdk_core.errors import CheckpointError, RecsdkError

require("fsspec", extra="fsspec", user="a checkpoint at a URL")

import fsspec  # noqa: E402
from fsspec.implementations.cached import CachingFileSystem  # noqa: E402
from fsspec.implementations.dirfs import DirFileSystem  # noqa: E402
from fsspec.implementations.local import LocalFileSystem  # noqa: E402

__all__ = ["FsspecStore", "open_url"]

_TOKEN = re.compile("[0-9a-f]{32}")
_MARK = "store"
_COMMITTING = "committing"
_OWNER = "owner"
_MOST_PUTS = 10


def open_url(url: str) -> Store:
    """The store of a URL; for a URL of a local path, the store of that path."""
    try:
        file_system, path = fsspec.core.url_to_fs(url)
    except Exception as error:  # each protocol's library raises kinds of its own
        raise CheckpointError(f"{url}: no store of fsspec: {_text(error)}") from error
    if isinstance(file_system, LocalFileSystem):
        from pathlib import Path

        return LocalStore(Path(path))
    return FsspecStore(file_system, path, url)


class FsspecStore(Store):
    """A folder of an fsspec file system; the manifest's presence is the commit.

    There are no locks, so the save that began last wins. Each save first puts its token into
    `owner`, and succeeds only if it finds it there after putting its manifest. A manifest that is
    put after another save has begun may stay, though its save fails. So a save that is about to put
    its manifest has the object `committing`, and others do not remove its files. A save that finds
    no such object after it became the owner knows that the other will see the new owner before it
    puts a manifest.
    """

    def __init__(self, file_system: Any, path: str, url: str) -> None:
        self.location = self.address = url
        self._path = path.rstrip("/")
        if not self._path:
            raise ValueError(f"path {url!r} is the root; name a folder for the checkpoint")
        self._files = file_system
        # Data files never change, so they may be cached; the manifest may be replaced.
        is_cache = isinstance(file_system, CachingFileSystem)
        self._uncached = file_system.fs if is_cache else file_system
        self._removable: list[str] = []
        self.local_path = _local_path(self._uncached, self._path)

    @contextmanager
    def _naming(self, path: str, doing: str) -> Iterator[None]:
        """Turns every error of the store into CheckpointError that names the file."""
        try:
            yield
        except (RecsdkError, MemoryError):
            raise
        except Exception as error:  # each protocol's library raises kinds of its own
            name = f"{self.location}/{path}" if path else self.location
            raise CheckpointError(f"{name}: {doing} failed: {_text(error)}") from error

    def _at(self, path: str) -> str:
        return f"{self._path}/{path}"

    def _state(self) -> str:
        """ "absent", "complete" or "other"."""
        if self.has_manifest():
            return "complete"
        with self._naming("", "looking at it"):
            names = self._names()
            if MANIFEST_NAME in names:  # it came meanwhile
                return "complete"
            is_left = [name == _OWNER or _TOKEN.fullmatch(name) for name in names]
            return "absent" if all(is_left) else "other"

    def _names(self) -> list[str]:
        """The names in the folder, without the folder's own."""
        try:
            found = self._uncached.ls(self._path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return ["(a file)"] if self._uncached.isfile(self._path) else []
        paths = [entry["name"].rstrip("/") for entry in found]
        own = self._path.strip("/")
        return [path.rpartition("/")[2] for path in paths if path.strip("/") != own]

    def is_place_of(self, other: Store) -> bool:
        if self.local_path is not None or not isinstance(other, FsspecStore):
            return super().is_place_of(other)
        has_one_path = self._path.strip("/") == other._path.strip("/")
        return has_one_path and bool(self._uncached == other._uncached)

    def begin(self, token: str, overwrite: bool) -> None:
        refuse_unless_free(self.location, self._state(), overwrite)
        with self._naming(_OWNER, "writing"):
            self._uncached.makedirs(self._path, exist_ok=True)
            self._uncached.pipe_file(self._at(_OWNER), token.encode())
        refuse_unless_free(self.location, self._state(), overwrite)
        with self._naming("", "looking at what saves before have left"):
            self._removable = self._left_by_others(token)
        self._check_owner(token)  # so that all of those saves began before this one
        with self._naming(f"{token}/{_MARK}", "writing"):
            self._uncached.makedirs(self._at(token), exist_ok=True)
            self._uncached.pipe_file(self._at(f"{token}/{_MARK}"), token.encode())

    def _left_by_others(self, token: str) -> list[str]:
        """Saves that will put no manifest any more: they have, or will find another owner."""
        replaced = self._read(MANIFEST_NAME)
        known = None if replaced is None else _token_of(replaced)
        others = [name for name in self._names() if _TOKEN.fullmatch(name) and name != token]
        return [
            name for name in others if name == known or self._read(f"{name}/{_COMMITTING}") is None
        ]

    def _check_owner(self, token: str) -> None:
        with self._naming(_OWNER, "reading"):
            if self._read(_OWNER) != token.encode():
                refuse_overtaken(self.location)

    def _read(self, path: str) -> bytes | None:
        """A small object as it is now; None if it is not there."""
        self._uncached.invalidate_cache()
        try:
            found: bytes = self._uncached.cat_file(self._at(path))
        except FileNotFoundError:
            return None
        return found

    def join(self, token: str) -> None:
        mark = f"{token}/{_MARK}"
        with self._naming(mark, "reading"):
            found = self._read(mark)
        if found != token.encode():
            raise CheckpointError(
                f"{self.location}: this process does not see the file {mark} that rank 0 wrote; "
                "all ranks must write to one store under one URL, and another save to this path "
                "that begins removes it: let one job save to a path at a time"
            )

    @contextmanager
    def create(self, token: str, path: str) -> Iterator[Target]:
        with self._naming(path, "writing"):
            self._uncached.makedirs(self._at(path).rpartition("/")[0], exist_ok=True)
            file = self._uncached.open(self._at(path), "wb")
            try:
                yield Target(_write_to(file), f"{self.location}/{path}")
            except BaseException:
                with suppress(Exception):  # the first error is the one to tell
                    file.discard() if hasattr(file, "discard") else file.close()
                raise
            file.close()

    def commit(self, token: str, manifest: bytes) -> None:
        with self._naming(f"{token}/{_COMMITTING}", "writing"):
            self._uncached.pipe_file(self._at(f"{token}/{_COMMITTING}"), token.encode())
        self._check_owner(token)
        self._put_manifest(token, manifest)
        # Complete from here on: what cannot be removed is no harm.
        with suppress(Exception):
            for name in self._removable:
                self._uncached.rm(self._at(name), recursive=True)
        with suppress(Exception):
            for name in (_MARK, _COMMITTING):
                self._uncached.rm_file(self._at(f"{token}/{name}"))
        self._disown(token)

    def _put_manifest(self, token: str, manifest: bytes) -> None:
        """Puts it again if an earlier save has put its own meanwhile, which each may do once.

        The owner is read last. A save that has seen this manifest, and so may remove this save's
        files later, became the owner before; then this save does not put the manifest again.
        """
        for _ in range(_MOST_PUTS):
            with self._naming(MANIFEST_NAME, "writing"):
                self._uncached.pipe_file(self._at(MANIFEST_NAME), manifest)
            try:
                found, owner = self._read(MANIFEST_NAME), self._read(_OWNER)
            except Exception:  # the save is complete; another one cannot be seen
                return
            if owner != token.encode():
                refuse_overtaken(self.location)
            if found == manifest:
                return
        raise CheckpointError(
            f"{self.location}/{MANIFEST_NAME}: does not read back as it was written"
        )

    def _disown(self, token: str) -> None:
        with suppress(Exception):
            if self._read(_OWNER) == token.encode():
                self._uncached.rm_file(self._at(_OWNER))

    def abandon(self, token: str) -> None:
        with suppress(Exception):
            if self._read(f"{token}/{_COMMITTING}") is not None:
                self._uncached.rm_file(self._at(f"{token}/{_COMMITTING}"))
        with suppress(Exception):
            if not self._is_committed(token):
                self._uncached.rm(self._at(token), recursive=True)
        self._disown(token)

    def _is_committed(self, token: str) -> bool:
        """Whether the manifest is already this save's: the answer to the put may have got lost."""
        return token.encode() in (self._read(MANIFEST_NAME) or b"")

    def read_manifest(self) -> bytes:
        refuse_unless_complete(self.location, self._state())
        with self._open(self._uncached, MANIFEST_NAME) as source:
            return read_manifest_from(source)

    @contextmanager
    def open(self, path: str) -> Iterator[Source]:
        with self._open(self._files, path) as source:
            yield source

    @contextmanager
    def _open(self, files: Any, path: str) -> Iterator[Source]:
        name = f"{self.location}/{path}"
        with self._naming(path, "opening"):
            size = int(self._uncached.size(self._at(path)))
            file = files.open(self._at(path), "rb")
        try:
            with self._naming(path, "reading"):
                yield Source(_read_from(file), size, name)
        finally:
            with suppress(Exception):  # what was read is verified, whatever closing says
                file.close()

    def has_manifest(self) -> bool:
        with self._naming("", "looking at it"):
            self._uncached.invalidate_cache()
            return bool(self._uncached.exists(self._at(MANIFEST_NAME)))

    def stamp(self) -> Any:
        with self._naming("", "looking at it"):
            self._uncached.invalidate_cache()
            try:
                return self._uncached.ukey(self._at(MANIFEST_NAME))
            except FileNotFoundError:
                return None

    def children(self) -> Sequence[Store]:
        with self._naming("", "listing the folder"):
            names = self._folders_in(self._path)
        return [self._other(f"{self._path}/{name}", _url_below(self.location, name))
                for name in names]  # fmt: skip

    def siblings(self) -> Sequence[Store]:
        above, slash, own = self._path.rpartition("/")
        with self._naming("", "listing the folder above it"):
            try:
                names = self._folders_in(above)
            except FileNotFoundError:  # it is still to be made
                return []
        others = [name for name in names if name != own]
        return [self._other(f"{above}{slash}{name}", _url_beside(self.location, name))
                for name in others]  # fmt: skip

    def _folders_in(self, folder: str) -> list[str]:
        found = self._uncached.ls(folder, detail=True)
        folders = [e["name"].rstrip("/") for e in found if e["type"] == "directory"]
        return sorted({path.rpartition("/")[2] for path in folders} - {""})

    def _other(self, path: str, url: str) -> FsspecStore:
        return FsspecStore(self._files, path, url)


def _local_path(file_system: Any, path: str) -> str | None:
    """Where a path lies if the file system is, within others, that of this host; else None."""
    while not isinstance(file_system, LocalFileSystem):
        if isinstance(file_system, DirFileSystem):
            path = file_system._join(path)
        elif not isinstance(file_system, CachingFileSystem):
            return None
        file_system = file_system.fs
    return str(os.path.abspath(file_system._strip_protocol(path)))


def _url_below(url: str, name: str) -> str:
    """The URL of a folder in that of another."""
    links, at = _links(url)
    links[at] = f"{links[at].rstrip('/')}/{name}"
    return "::".join(links)


def _links(url: str) -> tuple[list[str], int]:
    """The parts of a chain of URLs, and which has the path: the first that can."""
    links = url.split("::")
    return links, next((n for n, link in enumerate(links) if "://" in link), len(links) - 1)


def _url_beside(url: str, name: str) -> str:
    """The URL with another last name in its path."""
    links, at = _links(url)
    links[at] = f"{links[at].rstrip('/').rpartition('/')[0]}/{name}"
    return "::".join(links)


def _write_to(file: Any) -> Callable[[memoryview], None]:
    def write(content: memoryview) -> None:
        while content:
            written = file.write(content)
            if written is None:  # some files take all and do not say so
                return
            content = content[written:]

    return write


def _read_from(file: Any) -> Callable[[int, int], bytes]:
    def read(offset: int, size: int) -> bytes:
        file.seek(offset)
        parts = []
        while size > 0 and (part := file.read(size)):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    return read


def _token_of(manifest: bytes) -> str | None:
    """The token in a manifest; None if it is none."""
    with suppress(CheckpointError):
        return Manifest.from_bytes(manifest, MANIFEST_NAME).token
    return None


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
