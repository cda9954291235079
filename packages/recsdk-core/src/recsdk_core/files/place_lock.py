"""One writer of a place at a time: a lock on a file beside it, which ends with its process."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

__all__ = ["Held", "PlaceLock", "label_of", "lock_left_over", "lock_place"]

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_MOST_READ = 400
_MODE = 0o644
_NUM_TRIES = 50
_SECONDS_BETWEEN = 0.005
_HOLDER = re.compile("process [0-9]+ on (.*)")


class Held(Exception):
    """Another process has the lock. Its text ends a message that says what that process does."""

    def __init__(self, holder: str) -> None:
        by = f", by {holder}" if holder else ""
        super().__init__(f"{by}; wait for it, or end that process, whose lock ends with it")


class PlaceLock:
    """A lock that is held until `release`, or until the process dies. For one thread at a time."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self.descriptor = descriptor
        """Descriptor of the open file."""
        self.is_taken = False
        """Whether it is known to be this writer's."""
        _open.add(self)

    @property
    def is_valid(self) -> bool:
        """Whether its file is still there; otherwise another writer has a lock of its own."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), os.lstat(self._path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Lets the next writer in, and removes the file; never raises. Nothing if it is closed."""
        if self not in _open:
            return
        with suppress(OSError):
            if self.is_taken and self.is_valid:
                os.unlink(self._path)  # while held, so that it is not another's file
        with suppress(OSError):
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)  # a child of fork may have it open
        self.close()

    def close(self) -> None:
        """Closes the file only, once."""
        if self in _open:
            _open.remove(self)
            with suppress(OSError):
                os.close(self.descriptor)


def label_of(name: str) -> str:
    """What names of files beside a place begin with: its own name, or its hash if that is long."""
    own = os.fsencode(name)
    return name if len(own) <= 150 else hashlib.sha256(own).hexdigest()


def lock_place(path: Path, keep: Callable[[PlaceLock], None] = lambda _: None) -> PlaceLock | None:
    """Takes the lock on the file at `path`; None on a file system without locks.

    `keep` is given the lock before it is taken, so that who is interrupted can release it. Raises
    Held, naming the process, if another has it, and OSError if the file cannot be made.
    """
    while True:
        lock = PlaceLock(path, _open_file(path))
        keep(lock)
        try:
            has_locks = _lock(lock.descriptor)
            lock.is_taken = True
        except BaseException:
            lock.close()
            raise
        if not has_locks:
            lock.release()
            return None
        if not lock.is_valid:  # the writer that had it has removed the file
            lock.close()
            continue
        try:
            _name_holder(lock.descriptor)
        except BaseException:
            lock.release()
            raise
        return lock


def lock_left_over(path: Path) -> PlaceLock | None:
    """Takes the lock of a writer that was killed on this host; None if it may be another's.

    Hold it for an instant only. Where each host has locks of its own, those of others look free.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        lock = PlaceLock(path, os.open(path, flags))
    except OSError:
        return None
    try:
        holder = _HOLDER.fullmatch(_read_holder(lock.descriptor))
        if holder is not None and holder.group(1) == socket.gethostname():
            fcntl.flock(lock.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.is_taken = True
            if lock.is_valid:
                return lock
    except OSError:
        pass
    lock.close()
    return None


def _open_file(path: Path) -> int:
    """Opens the file; that of another user's can only be read, which is enough to lock it."""
    flags = os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_RDWR | os.O_CREAT, _MODE)
    except PermissionError as error:
        try:
            return os.open(path, flags | os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            raise error from None


def _lock(descriptor: int) -> bool:
    """False if the file system has no locks."""
    try:
        _take(descriptor)
    except BlockingIOError:
        raise Held(_read_holder(descriptor)) from None
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True


def _take(descriptor: int) -> None:
    """Tries for a while: one that writes beside this may have the lock, see lock_left_over.

    It has it for an instant, which is longer where a machine is busy or a file system slow.
    """
    for _ in range(_NUM_TRIES):
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_SECONDS_BETWEEN)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _read_holder(descriptor: int) -> str:
    return os.pread(descriptor, _MOST_READ, 0).decode("ascii", "replace").strip()


def _name_holder(descriptor: int) -> None:
    """Writes who holds the lock, for the message to others; another user's file stays as it is."""
    if not fcntl.fcntl(descriptor, fcntl.F_GETFL) & (os.O_WRONLY | os.O_RDWR):
        return
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())


_open: set[PlaceLock] = set()


def _close_in_child() -> None:
    """A child of fork would keep its parent's locks when the parent is killed."""
    for lock in list(_open):
        lock.close()


os.register_at_fork(after_in_child=_close_in_child)
