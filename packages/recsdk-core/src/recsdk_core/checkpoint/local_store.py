"""Checkpoints on a local or mounted file system: `stores` says how one becomes complete."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from recsdk_core.checkpoint.manifest import MANIFEST_NAME
from recsdk_core.checkpoint.stores import (
    Source,
    Store,
    Target,
    naming,
    read_manifest_from,
    refuse_overtaken,
    refuse_removed,
    refuse_unless_complete,
    refuse_unless_free,
    write_all,
)
from recsdk_core.errors import CheckpointError
from recsdk_core.files.place_lock import Held, PlaceLock, label_of, lock_left_over, lock_place

__all__ = ["LocalStore"]

FILE_MODE = 0o640
FOLDER_MODE = 0o750

_TOKEN = re.compile("[0-9a-f]{32}")
_PARTIAL = re.compile(r"\.(.*)\.partial-[0-9a-f]{32}", re.DOTALL)
_LOCK = re.compile(r"\.(.*)\.recsdk-lock", re.DOTALL)
_NEW_MANIFEST = re.compile(r"\.manifest-[0-9a-f]{32}")


class LocalStore(Store):
    """A folder of a local or mounted file system."""

    def __init__(self, folder: Path) -> None:
        self.location = str(folder)
        with naming(self.location, "finding the current folder"):
            absolute = Path(os.path.abspath(folder))
        if not absolute.name:
            raise ValueError(
                f"path {self.location!r} is the root; name a folder for the checkpoint"
            )
        self.address = self.local_path = str(absolute)
        self._folder = absolute
        self._lock: PlaceLock | None = None
        self._replaced: str | None = None

    def _partial(self, token: str) -> Path:
        return self._folder.parent / f".{self._label()}.partial-{token}"

    def _label(self) -> str:
        return label_of(self._folder.name)

    def _root(self, token: str) -> Path:
        """The folder of a checkpoint under way; only one of the two places is there at a time."""
        partial = self._partial(token)
        return partial if partial.exists() else self._folder

    def _state(self) -> str:
        """ "absent", "complete" or "other"."""
        mode = _mode(self._folder)
        if mode is None:
            return "absent"
        if stat.S_ISLNK(mode):
            raise CheckpointError(
                f"{self.location}: is a symbolic link, which is refused; pass the path it leads to"
            )
        if not stat.S_ISDIR(mode):
            return "other"
        # Asked for by name: a listing may miss a file that is being replaced.
        if _mode(self._folder / MANIFEST_NAME) is not None:
            return "complete"
        return _state_of(os.listdir(self._folder))  # the manifest may have come by now

    def begin(self, token: str, overwrite: bool) -> None:
        self._check_free(overwrite)
        with naming(str(self._folder.parent), "making the folder"):
            _make_folders(self._folder.parent)
        name = f".{self._label()}.recsdk-lock"
        self._lock = self._take(self._folder.parent / name)
        state = self._check_free(overwrite)  # from here on nobody else changes it
        root = self._folder if state == "complete" else self._partial(token)
        with naming(_shown(self._folder), "making the folder"):
            self._replaced = self._identity()
            self._remove_left_overs()
            if state == "absent":
                os.mkdir(root, FOLDER_MODE)
            os.mkdir(root / token, FOLDER_MODE)

    def _take(self, lock: Path) -> PlaceLock | None:
        try:
            with naming(str(lock), "locking"):
                return lock_place(lock, self._keep)
        except Held as held:
            raise CheckpointError(
                f"{self.location}: another save to this path is under way{held}"
            ) from None

    def _keep(self, lock: PlaceLock) -> None:
        self._lock = lock

    def _check_free(self, overwrite: bool) -> str:
        with naming(self.location, "looking at it"):
            state = self._state()
        refuse_unless_free(self.location, state, overwrite)
        return state

    def _identity(self) -> str | None:
        """Identifies the manifest that is there; None if there is none.

        It is a hash of the content: on some mounts the inode number of an unchanged file changes.
        """
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(self._folder / MANIFEST_NAME, flags)
        except (FileNotFoundError, NotADirectoryError):
            return None
        digest = hashlib.sha256()
        try:
            while piece := os.read(descriptor, 2**20):
                digest.update(piece)
        finally:
            os.close(descriptor)
        return digest.hexdigest()

    def _remove_left_overs(self) -> None:
        """Removes what killed saves to this place have left; what cannot be removed stays.

        So it does with those of this host to places beside it: a job that is started anew may never
        save to them again. Without a lock a running save cannot be told from a killed one.
        """
        if self._lock is None:
            return
        names = os.listdir(self._folder.parent)
        partial: dict[str, list[str]] = {}
        for name in names:
            if found := _PARTIAL.fullmatch(name):
                partial.setdefault(found.group(1), []).append(name)
        left = partial.pop(self._label(), [])
        for name in names:
            found = _LOCK.fullmatch(name)
            if found and found.group(1) != self._label():
                lock = lock_left_over(self._folder.parent / name)
                if lock is not None:
                    left += partial.get(found.group(1), [])
                    lock.release()
        _remove_all([self._folder.parent / name for name in left])

    def join(self, token: str) -> None:
        folder = self._root(token) / token
        if not _is_folder(folder):
            raise CheckpointError(
                f"{self.location}: this process does not see the folder {str(folder)!r} that rank "
                "0 made; all ranks must write to one file system under one path"
            )

    @contextmanager
    def create(self, token: str, path: str) -> Iterator[Target]:
        root = self._root_still_there(token)
        target, name = root / path, _shown(self._folder / path)  # the name after the commit
        with naming(name, "making the file"):
            _make_folders(target.parent, synced=False)  # the commit syncs all of them
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(target, flags, FILE_MODE)
        try:
            with naming(name, "writing"):
                yield Target(descriptor, name)
                os.fsync(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        with naming(name, "closing"):
            os.close(descriptor)

    def _root_still_there(self, token: str) -> Path:
        """Where the files lie; raises if they were removed, or the commit would replace others."""
        root = self._root(token)
        if not _is_folder(root / token):
            refuse_removed(self.location)
        return root

    def commit(self, token: str, manifest: bytes) -> None:
        root = self._root_still_there(token)
        is_new = root != self._folder
        name = root / (MANIFEST_NAME if is_new else f".manifest-{token}")
        with naming(_shown(self._folder / MANIFEST_NAME), "writing"):
            _write(name, manifest)
            _sync_tree(root / token)
            _sync(root)
        with naming(self.location, "the commit"):
            left = self._left_by_the_commit(token)
            self._refuse_if_overtaken()
            if is_new:
                self._move_into_place(root)
            else:
                os.rename(name, self._folder / MANIFEST_NAME)
                _sync(self._folder)
        _remove_all(left)
        self._release()

    def _refuse_if_overtaken(self) -> None:
        """Raises if another save has committed. Locks prevent this where all hosts share them."""
        lost_its_lock = self._lock is not None and not self._lock.is_valid
        if lost_its_lock or self._identity() != self._replaced:
            refuse_overtaken(self.location)

    def _move_into_place(self, partial: Path) -> None:
        """Removes what killed saves have left there, never what another save has moved there."""
        for is_last in (False, True):
            left = os.listdir(self._folder) if self._folder.is_dir() else []
            state = _state_of(left)
            if state == "complete":
                refuse_overtaken(self.location)
            refuse_unless_free(self.location, state, overwrite=False)
            _remove_all([self._folder / name for name in left])
            try:
                os.rename(partial, self._folder)
                break
            except OSError as error:
                if is_last or error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
        _sync(self._folder.parent)

    def _left_by_the_commit(self, token: str) -> list[Path]:
        """The files of the overwritten checkpoint, and what killed saves have left.

        Without a lock other saves may be running, so only the former can be told.
        """
        if self._replaced is None:
            return []
        old = (self._folder / MANIFEST_NAME).read_bytes() if self._lock is None else None
        found = []
        for entry in self._folder.iterdir():
            is_folder = _TOKEN.fullmatch(entry.name) and not entry.is_symlink()
            is_left = is_folder or _NEW_MANIFEST.fullmatch(entry.name)
            is_ours = token in entry.name
            if is_left and not is_ours and (old is None or entry.name.encode() in old):
                found.append(entry)
        return found

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def abandon(self, token: str) -> None:
        with suppress(OSError):
            self._remove(token)
        self._release()

    def _remove(self, token: str) -> None:
        partial = self._partial(token)
        if partial.exists():
            shutil.rmtree(partial, ignore_errors=True)
        elif not self._is_committed(token):
            shutil.rmtree(self._folder / token, ignore_errors=True)
            (self._folder / f".manifest-{token}").unlink(missing_ok=True)

    def _is_committed(self, token: str) -> bool:
        """Whether the manifest may be this save's: perhaps only syncing the folder failed."""
        try:
            return token.encode() in (self._folder / MANIFEST_NAME).read_bytes()
        except FileNotFoundError:
            return False
        except OSError:
            return True  # nothing is removed that cannot be looked at

    def read_manifest(self) -> bytes:
        with naming(self.location, "looking at it"):
            state = self._state()
        refuse_unless_complete(self.location, state)
        with self.open(MANIFEST_NAME) as source:
            return read_manifest_from(source)

    @contextmanager
    def open(self, path: str) -> Iterator[Source]:
        target = self._folder / path
        with naming(str(target), "opening"):
            _refuse_links(self._folder, path)
            # A pipe in the place of a file must not be waited for.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(target, flags)
        try:
            with naming(str(target), "reading"):
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise CheckpointError(f"{target}: is no plain file")
                yield Source(descriptor, status.st_size, _shown(target))
        finally:
            os.close(descriptor)

    def has_manifest(self) -> bool:
        path = self._folder / MANIFEST_NAME
        with naming(str(path), "looking at it"):
            try:
                return stat.S_ISREG(os.stat(path).st_mode)
            except (FileNotFoundError, NotADirectoryError):
                return False

    def stamp(self) -> Any:
        path = self._folder / MANIFEST_NAME
        with naming(str(path), "looking at it"):
            try:
                found = os.stat(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
        return found.st_mtime_ns, found.st_ino, found.st_size

    def children(self) -> Sequence[Store]:
        with naming(self.location, "listing the folder"):
            return [LocalStore(self._folder / name) for name in _places_in(self._folder)]

    def siblings(self) -> Sequence[Store]:
        folder = self._folder.parent
        with naming(str(folder), "listing the folder"):
            try:
                names = _places_in(folder)
            except FileNotFoundError:  # it is still to be made
                return []
        return [LocalStore(folder / name) for name in names if name != self._folder.name]


def _state_of(names: Sequence[str]) -> str:
    """That of a folder with these names; what killed saves have left counts for nothing."""
    if MANIFEST_NAME in names:
        return "complete"
    are_left = all(_TOKEN.fullmatch(n) or _NEW_MANIFEST.fullmatch(n) for n in names)
    return "absent" if are_left else "other"


def _places_in(folder: Path) -> list[str]:
    """The names in a folder, without those of saves under way."""
    return [name for name in sorted(os.listdir(folder)) if not _PARTIAL.fullmatch(name)]


def _remove_all(left: Sequence[Path]) -> None:
    """Removes what was left over; what stays does no harm.

    A save may be committed by then, so nothing here may count as its failure.
    """
    for entry in left:
        with suppress(OSError):
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)


def _mode(path: Path) -> int | None:
    """The mode of what is at the path, without following a link; None if nothing is there."""
    try:
        return os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None


def _shown(path: Path) -> str:
    """The path for messages, of the engine too: with bytes that are no UTF-8 escaped."""
    return str(path).encode(errors="backslashreplace").decode()


def _is_folder(path: Path) -> bool:
    """Whether there is a folder, not a link to one."""
    return path.is_dir() and not path.is_symlink()


def _make_folders(folder: Path, *, synced: bool = True) -> None:
    """Makes a folder and those above it; other ranks may do so at the same time."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        try:
            os.mkdir(path, FOLDER_MODE)
        except FileExistsError:
            continue
        if synced:
            _sync(path.parent)


def _refuse_links(folder: Path, path: str) -> None:
    for part in Path(path).parents:
        if (folder / part).is_symlink():
            raise CheckpointError(f"{folder / part}: is a symbolic link, which is refused")


def _write(path: Path, content: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, FILE_MODE)
    try:
        write_all(descriptor, memoryview(content))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(folder: Path) -> None:
    for parent, _, _ in os.walk(folder):
        _sync(Path(parent))


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
