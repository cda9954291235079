"""Makes all ranks raise when one of them does, wherever in a step that is.

The host exchange tells what goes wrong with a batch on its way to the tables. For the rest, a rank
writes its failure into torch's store and closes its process groups. Ranks that wait for it in a
collective then raise at once, close theirs, and read in the store what it was.

Shape letter: W ranks.
"""

from __future__ import annotations

import signal
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from traceback import walk_tb
from types import TracebackType
from typing import Any, NamedTuple

import torch.distributed as dist

from recsdk_core.agreement import forget, known
from recsdk_sharding._compat.private import default_store
from recsdk_sharding.exchange.errors import EndOfData, PeerError, is_known
from recsdk_sharding.exchange.failure_store import Failure, FailureStore
from recsdk_sharding.exchange.groups import (
    close_groups,
    has_device_groups,
    is_of_groups,
    ranks_of,
)
from recsdk_sharding.exchange.watcher import Watcher

__all__ = ["failing_together", "failure_of_peer", "tell"]

_SECONDS_FOR_OTHERS = 3.0
"""How long a rank that failed looks whether all have failed at the same place."""
_SECONDS_FOR_OTHERS_TO_BE_INTERRUPTED = 0.3
"""The same after a signal, which all ranks get at once, or this one alone."""


def failing_together(group: dist.ProcessGroup | None = None) -> AbstractContextManager[None]:
    """Inside, an exception on one rank ends the work of all ranks within seconds.

    For loops of one's own and for torchrec's pipelines, around a step or the whole loop, on every
    rank; recsdk's pipelines do it by themselves::

        with failing_together():
            for batch in batches:
                optimizer.zero_grad()
                loss, _ = model(batch)
                loss.backward()
                optimizer.step()

    The rank that fails raises its own exception, within 3 seconds, or a third of one where a signal
    to it raised that. The others raise `PeerError` with that rank of the default process group and
    its message, as soon as they are in a collective, whichever group it is of. By then **all
    process groups of these processes are closed**: restart the ranks, and go on from a checkpoint.
    Where all ranks raise the same type at the same line within that time, each raises its own, and
    the groups stay as they are; so they do after what the host exchange tells by itself, such as a
    bad batch. `group` has the ranks that do what is inside, and none others; without it all ranks
    do. KeyboardInterrupt counts as a failure. StopIteration, GeneratorExit, and SystemExit without
    a status, do not.

    May be nested, and used again. Costs no communication until something fails, and nothing where
    there is one rank. A rank that hangs, in a debugger say, tells nothing: the others wait for the
    groups' timeout. So do ranks that are just making a process group with the one that failed.

    Raises TypeError for what is no group that has this rank.
    """
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group must be a process group that has this rank, or None for all, got {group!r}"
        )
    return _Guard(group)


def failure_of_peer() -> PeerError | None:
    """What another rank has said of its failure, once a group has failed; None: nothing.

    Closes this process's groups if there is something.
    """
    world = _world()
    return None if world is None else world.failure_of_peer()


def tell(error: BaseException, group: dist.ProcessGroup) -> None:
    """Tells the ranks of a group of an error of this one, in the middle of what they do together.

    It closes the process groups, as `failing_together` does.
    """
    world = _world()
    if world is not None:
        ranks = ranks_of(group)
        if not is_known(error, ranks):
            world.settle(error, ranks)


class _Depth(threading.local):
    """How many guards this thread is in."""

    value = 0


_depth = _Depth()


class _Guard(AbstractContextManager[None]):
    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def __enter__(self) -> None:
        world = _world()
        if world is not None:
            world.check_open()
        _depth.value += 1

    def __exit__(self, _: Any, error: BaseException | None, __: TracebackType | None) -> None:
        _depth.value -= 1
        world = _world()
        if world is None:
            return
        if error is None:
            world.check_open()
        elif not _is_ending(error):
            self._tell(world, error)

    def _tell(self, world: _World, error: BaseException) -> None:
        """Tells the others of an error, and the guards around this one that they know."""
        ranks = ranks_of(self._group)
        if not is_known(error, ranks):
            told = world.settle(error, ranks)
            if told is not None:
                raise told from error
        if _depth.value:
            known(error, ranks)
        else:
            forget(error)


def _is_ending(error: BaseException) -> bool:
    """Whether a loop ends with it in good order."""
    is_status = isinstance(error, SystemExit) and not error.code
    return is_status or isinstance(error, (StopIteration, GeneratorExit, EndOfData))


def _is_of_a_signal(error: BaseException) -> bool:
    """Whether a signal to this process raised it, by Python's own handler or the user's."""
    if isinstance(error, KeyboardInterrupt):
        return True
    handlers = (signal.getsignal(each) for each in signal.valid_signals())
    codes = {code for each in handlers if (code := getattr(each, "__code__", None)) is not None}
    return any(frame.f_code in codes for frame, _ in walk_tb(error.__traceback__))


class _World:
    """What this process knows of the failures of the ranks of a default process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self._rank = dist.get_rank()
        self._store = FailureStore(self._find_store, dist.get_world_size())
        self._lock = threading.RLock()
        self._failure: PeerError | None = None
        self._watcher: Watcher | None = None
        if has_device_groups():
            self._watcher = Watcher(
                self._store.is_apart, partial(self._close, of_devices_only=True)
            )

    def check_open(self) -> None:
        """Raises PeerError if a rank failed before."""
        if self._watcher is not None and self._watcher.has_found and self._failure is None:
            self.failure_of_peer()
        if self._failure is not None:
            raise self._copy()

    def settle(
        self, error: BaseException, ranks: tuple[int, ...] | None = None
    ) -> PeerError | None:
        """Tells the other ranks of an error; the one to raise in its place if theirs caused it.

        `ranks` do together what failed; None: all do.
        """
        if is_of_groups(error):
            found = self.failure_of_peer()
            if found is None:
                self._close()
            return found
        with self._lock:
            if self._failure is None:
                seconds = _SECONDS_FOR_OTHERS
                if _is_of_a_signal(error):
                    seconds = _SECONDS_FOR_OTHERS_TO_BE_INTERRUPTED
                self._tell(Failure.of(self._rank, error), seconds, ranks)
        return None

    def failure_of_peer(self) -> PeerError | None:
        """What another rank has said; closes the groups if there is something."""
        with self._lock:
            if self._failure is None:
                first: Failure | None = None
                with suppress(Exception):  # the store went with the rank that had it
                    first = self._store.first()
                if first is None or first.rank == self._rank:
                    return None
                self._fail(first)
            return self._copy()

    def _tell(self, own: Failure, seconds: float, ranks: tuple[int, ...] | None) -> None:
        is_together = False
        try:
            with suppress(Exception):  # without a store others learn only that groups close
                is_together = self._store.tell(own, seconds, ranks)
        finally:  # also if the user interrupts
            if not is_together:
                self._fail(own)

    def _fail(self, failure: Failure) -> None:
        self._close()  # first: who sees the failure may make new groups at once
        self._failure = PeerError(failure.rank, failure.text, is_final=True)
        with suppress(Exception):
            self._store.acknowledge()
            self._store.keep_until_seen(self._rank)

    def _close(self, *, of_devices_only: bool = False) -> None:
        """Closes the groups, unless others have taken their place."""
        group = self._group()
        if group is not None and group is dist.GroupMember.WORLD:
            close_groups(of_devices_only=of_devices_only)

    def _copy(self) -> PeerError:
        assert self._failure is not None
        return PeerError(self._failure.rank, self._failure.message, is_final=True)

    def _find_store(self) -> Any:
        group = self._group()
        if group is None or group is not dist.GroupMember.WORLD:
            raise RuntimeError("the process group was destroyed")
        return default_store("recsdk_failures")


class _Current(NamedTuple):
    """What was found last, since every step asks several times."""

    group: Callable[[], dist.ProcessGroup | None]
    world: _World | None


_current = _Current(lambda: None, None)
_current_lock = threading.Lock()


def _world() -> _World | None:
    """Of the default process group; None if this rank is alone."""
    global _current
    group = dist.GroupMember.WORLD
    if group is None:
        return None
    found = _current
    if found.group() is not group:
        with _current_lock:
            if _current.group() is not group:
                is_alone = dist.get_world_size() == 1
                world = None if is_alone else _World(group)
                _current = _Current(weakref.ref(group), world)
            found = _current
    return found.world
