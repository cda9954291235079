"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from recsdk_core.files.naming import naming_file
from recsdk_core.files.place_lock import Held, PlaceLock, label_of, lock_place

__all__ = ["refuse_taken", "written_anew", "written_whole"]


@contextmanager
def written_whole(
    path: Path, *, overwrite: bool = False, advice: str = "remove it"
) -> Iterator[Path]:
    """Gives a path beside `path` to write to; the file gets its name when the block is left.

    If the block raises, `path` is as it was. A file that is replaced leaves its permissions; of a
    link it is the file that the link leads to. Raises
    FileExistsError, with `advice`, if it is there already and `overwrite` is False, and always for
    what is no plain file; BlockingIOError if another process is writing it, another OSError that
    names it if it cannot be written. On a file system without locks the first of two to end wins.
    """
    refuse_taken(path, overwrite, advice)
    if overwrite:
        path = Path(os.path.realpath(path))
    with naming_file(str(path), "writing"):
        os.stat(path.parent / "..")  # says so itself if there is no folder
        with suppress(FileNotFoundError):
            os.lstat(path)  # or if the name is too long
    label = label_of(path.name)
    partial = path.with_name(f".{label}.partial-{secrets.token_hex(16)}")
    locks: list[PlaceLock] = []
    try:
        lock = _lock(path, label, locks.append)
        refuse_taken(path, overwrite, advice)  # while it has the lock, no other makes it
        if lock is not None:
            with naming_file(str(path), "writing"):
                _remove_left_overs(path.parent, label)
        yield partial
        with naming_file(str(path), "writing"):
            _sync(partial)
        _move(partial, path, overwrite, advice)
    finally:
        with suppress(OSError):
            partial.unlink()
        for each in locks:  # a list, since Ctrl-C may come before `lock` is set
            each.release()


@contextmanager
def written_anew(path: Path) -> Iterator[Path]:
    """Gives a path to write a report to, which takes the place of `path` when it is whole.

    What is no plain file, such as a pipe, or lies in a folder that cannot be written to, is written
    as it stands. An OSError of the block names `path`. Raises as `written_whole` does.
    """
    is_plain = _is_plain(path)
    target = Path(os.path.realpath(path)) if is_plain else path
    whole = is_plain and os.access(target.parent, os.W_OK)
    with (
        written_whole(target, overwrite=True) if whole else nullcontext(target) as to_write,
        naming_file(str(path), "writing"),
    ):
        yield to_write


def refuse_taken(path: Path, overwrite: bool, advice: str) -> None:
    """Raises FileExistsError as `written_whole` does; ask before long work."""
    if not _is_plain(path):
        raise FileExistsError(f"{path} is a folder, pipe or device; choose another path")
    if not overwrite and os.path.lexists(path):
        raise _taken(path, advice)


def _lock(path: Path, label: str, keep: Callable[[PlaceLock], None]) -> PlaceLock | None:
    try:
        with naming_file(str(path), "writing"):
            return lock_place(path.with_name(f".{label}.recsdk-lock"), keep)
    except Held as held:
        raise BlockingIOError(f"{path}: another write to this file is under way{held}") from None


def _is_plain(path: Path) -> bool:
    # /dev/stdout is a file where the shell redirects it, which then holds more than this.
    is_device = path.parts[:2] == ("/", "dev") and path.parts[2:3] != ("shm",)
    return (os.path.isfile(path) and not is_device) or not os.path.exists(path)


def _taken(path: Path, advice: str) -> FileExistsError:
    return FileExistsError(f"{path} exists already; choose another path or {advice}")


def _remove_left_overs(folder: Path, label: str) -> None:
    """Removes what killed processes have left. Without a lock one may be running."""
    name = re.compile(re.escape(f".{label}.partial-") + "[0-9a-f]{32}")
    with suppress(PermissionError):  # a folder may be written to and not listed
        for entry in os.listdir(folder):
            if name.fullmatch(entry):
                with suppress(OSError):
                    os.unlink(folder / entry)


def _sync(path: Path) -> None:
    """Some file systems tell only now that they are full."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _move(partial: Path, path: Path, overwrite: bool, advice: str) -> None:
    """Gives a file its name. Unless it may, it takes it from none that another has made meanwhile,
    as a rename would."""
    is_taken = False
    with naming_file(str(path), "writing"):
        try:
            if overwrite:
                _give_mode(partial, path)
                os.replace(partial, path)
            else:
                os.link(partial, path)
        except FileExistsError:
            is_taken = not _is_same(partial, path)
        except OSError:  # a file system without links
            if overwrite:
                raise
            is_taken = os.path.lexists(path)
            if not is_taken:
                os.rename(partial, path)
        if not is_taken:
            with suppress(PermissionError):  # a folder may be written to and not read
                _sync(path.parent)
    if is_taken:
        raise _taken(path, advice)


def _give_mode(partial: Path, path: Path) -> None:
    """Gives a file the permissions of the one whose place it takes, if there is one."""
    with suppress(FileNotFoundError):
        mode = stat.S_IMODE(os.stat(path).st_mode)
        with suppress(PermissionError):  # some file systems have none
            os.chmod(partial, mode)


def _is_same(partial: Path, path: Path) -> bool:
    """Whether the link was made: over a network one may be asked for twice, its answer lost."""
    try:
        return os.path.samestat(os.lstat(partial), os.lstat(path))
    except FileNotFoundError:
        return False
