"""Checkpoints on any store that fsspec has a file system for; the only import of fsspec."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from recsdk_core._internal.extras import require
from recsdk_core.checkpoint.local_store import LocalStore
from recsdk_core.checkpoint.manifest import MANIFEST_NAME
from recsdk_core.checkpoint.stores import (
    Source,
    Store,
    Target,
    check_manifest_size,
    refuse_removed,
    refuse_unless_complete,
    refuse_unless_free,
)
from recsdk_core.errors import CheckpointError, RecsdkError

require("fsspec", extra="fsspec", user="a checkpoint at a URL")

import fsspec  # noqa: E402
from fsspec.implementations.cached import CachingFileSystem  # noqa: E402
from fsspec.implementations.local import LocalFileSystem  # noqa: E402

__all__ = ["FsspecStore", "open_url"]

_TOKEN = re.compile("[0-9a-f]{32}")
_MARK = "store"


def open_url(url: str) -> Store:
    """The store of a URL; one of a local path is that of the path."""
    try:
        file_system, path = fsspec.core.url_to_fs(url)
    except Exception as error:  # each protocol's library raises kinds of its own
        raise CheckpointError(f"{url}: no store of fsspec: {_text(error)}") from error
    if isinstance(file_system, LocalFileSystem):
        from pathlib import Path

        return LocalStore(Path(path))
    return FsspecStore(file_system, path, url)


class FsspecStore(Store):
    """A folder of an fsspec file system; the manifest's presence is the commit."""

    def __init__(self, file_system: Any, path: str, url: str) -> None:
        self.location = self.address = url
        self._path = path.rstrip("/")
        if not self._path:
            raise ValueError(f"path {url!r} is the root; name a folder for the checkpoint")
        self._files = file_system
        # Data files never change, so they may be cached; the manifest may be replaced.
        is_cache = isinstance(file_system, CachingFileSystem)
        self._uncached = file_system.fs if is_cache else file_system

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
            return "absent" if all(_TOKEN.fullmatch(name) for name in names) else "other"

    def _names(self) -> list[str]:
        """What lies in the folder, but for the folder itself."""
        try:
            found = self._uncached.ls(self._path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return ["(a file)"] if self._uncached.isfile(self._path) else []
        paths = [entry["name"].rstrip("/") for entry in found]
        own = self._path.strip("/")
        return [path.rpartition("/")[2] for path in paths if path.strip("/") != own]

    def begin(self, token: str, overwrite: bool) -> None:
        refuse_unless_free(self.location, self._state(), overwrite)
        with self._naming(f"{token}/{_MARK}", "writing"):
            self._uncached.makedirs(self._at(token), exist_ok=True)
            self._uncached.pipe_file(self._at(f"{token}/{_MARK}"), token.encode())

    def join(self, token: str) -> None:
        if not self._has_mark(token):
            raise CheckpointError(
                f"{self.location}: this process does not see the file {token}/{_MARK} that rank 0 "
                "wrote; all ranks must write to one store under one URL"
            )

    def _has_mark(self, token: str) -> bool:
        mark = f"{token}/{_MARK}"
        with self._naming(mark, "reading"):
            self._uncached.invalidate_cache()
            try:
                found: bytes = self._uncached.cat_file(self._at(mark))
            except FileNotFoundError:
                return False
        return found == token.encode()

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
        if not self._has_mark(token):
            refuse_removed(self.location)
        with self._naming(MANIFEST_NAME, "writing"):
            self._uncached.pipe_file(self._at(MANIFEST_NAME), manifest)
        # Complete from here on: what cannot be removed is no harm.
        with suppress(Exception):
            self._uncached.invalidate_cache()
            self._uncached.rm_file(self._at(f"{token}/{_MARK}"))
            for name in self._names():
                if _TOKEN.fullmatch(name) and name != token:
                    self._uncached.rm(self._at(name), recursive=True)

    def abandon(self, token: str) -> None:
        with suppress(Exception):
            if not self._is_committed(token):
                self._uncached.rm(self._at(token), recursive=True)

    def _is_committed(self, token: str) -> bool:
        """Whether the manifest is this save's already, as when the answer to the put got lost."""
        try:
            self._uncached.invalidate_cache()
            return token.encode() in self._uncached.cat_file(self._at(MANIFEST_NAME))
        except FileNotFoundError:
            return False

    def read_manifest(self) -> bytes:
        refuse_unless_complete(self.location, self._state())
        with self._open(self._uncached, MANIFEST_NAME) as source:
            check_manifest_size(source)
            return source.read_all()

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

    def siblings(self) -> Sequence[Store]:
        above, slash, own = self._path.rpartition("/")
        with self._naming("", "listing the folder above it"):
            try:
                found = self._uncached.ls(above, detail=True)
            except FileNotFoundError:  # it is still to be made
                return []
            folders = [e["name"].rstrip("/") for e in found if e["type"] == "directory"]
        names = sorted({path.rpartition("/")[2] for path in folders} - {own, ""})
        urls = [_url_beside(self.location, name) for name in names]
        return [
            FsspecStore(self._files, f"{above}{slash}{name}", url)
            for name, url in zip(names, urls, strict=True)
        ]


def _url_beside(url: str, name: str) -> str:
    """The URL with another last name in its path, which of a chain of URLs the first has."""
    links = url.split("::")
    at = next((n for n, link in enumerate(links) if "://" in link), len(links) - 1)
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


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
