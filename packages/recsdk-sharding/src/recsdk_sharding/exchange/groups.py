"""Process groups: making this package's own, and closing all."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from recsdk_sharding._compat.private import naming_groups, process_groups, timeout_of
from recsdk_sharding.exchange.errors import PeerError
from recsdk_sharding.exchange.local_sockets import close_local_sockets

__all__ = ["close_groups", "group_beside", "has_device_groups", "is_of_groups", "ranks_of"]

_UNUSED_TAG = 2**30  # of messages that nobody sends
_AT_ONCE = timedelta(milliseconds=1)
_GLOO_SAYS = (
    "gloo/",
    "Application timeout caused pair closure",
    "Connection closed by peer",
    "failed to pass monitoredBarrier",
)


_num_made: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()
"""How many groups of these ranks were made beside others, in the world of each default group."""


def group_beside(host: dist.ProcessGroup) -> dist.ProcessGroup:
    """A gloo group of the same ranks, for calls while the host group is busy.

    It has the host group's timeout; torch would give it 30 minutes. All its ranks must make it, and
    no others; they may be in other groups, too, in how many they like.
    """
    ranks = dist.get_process_group_ranks(host)
    name = "_".join(map(str, ranks))
    world = dist.GroupMember.WORLD
    assert world is not None
    counts = _num_made.setdefault(world, Counter())
    counts[name] += 1
    with naming_groups(f"recsdk_{name}_{counts[name]}"):
        group: dist.ProcessGroup = dist.new_group(
            ranks, timeout=timeout_of(host), backend="gloo", use_local_synchronization=True
        )
    return group


def ranks_of(group: dist.ProcessGroup | None) -> tuple[int, ...] | None:
    """A group's ranks of the default group, in its order. None: all."""
    if group is None or group.size() == dist.get_world_size():
        return None
    try:
        return tuple(dist.get_process_group_ranks(group))
    except KeyError:  # of a default group that was before
        return None


def is_of_groups(error: BaseException | None) -> bool:
    """Whether an error comes, directly or not, from a process group that failed."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, dist.DistError) or (
            isinstance(error, PeerError) and error.rank is None
        ):
            return True
        if type(error) is RuntimeError and any(text in str(error) for text in _GLOO_SAYS):
            return True
        error = error.__cause__ or error.__context__
    return False


def has_device_groups() -> bool:
    """Whether this process has a group of several ranks that is not gloo's alone."""
    return any(not _is_gloo(backend) for group in _shared() for backend in _backends(group))


def close_groups(*, of_devices_only: bool = False) -> None:
    """Ends all collectives of this process, now and later, with an error.

    Ranks that wait for this one in a gloo group get an error too, at once; in a device's group each
    rank has to call it. Safe from any thread, while others are in a collective.
    """
    if not of_devices_only:
        close_local_sockets()
    for group in _shared():
        for backend in _backends(group):
            with suppress(Exception):  # it is closed already
                if not _is_gloo(backend):
                    backend.abort()
                elif not of_devices_only:
                    _close_gloo(backend)


def _shared() -> list[Any]:
    return [group for group in process_groups() if group.size() > 1]


def _backends(group: Any) -> list[Any]:
    """What runs a group's collectives; a group that is written in Python does it itself."""
    found = [_backend(group, device) for device in group._device_types]
    return list({id(backend): backend for backend in found}.values())


def _backend(group: Any, device: torch.device) -> Any:
    try:
        backend = group._get_backend(device)
    except RuntimeError:
        return group
    return getattr(backend, "wrapped_pg", backend)  # under TORCH_DISTRIBUTED_DEBUG=DETAIL


def _is_gloo(backend: Any) -> bool:
    return isinstance(backend, dist.ProcessGroupGloo)


def _close_gloo(backend: Any) -> None:
    """gloo has no abort, but closes all connections of a context in which a wait ran out.

    A wait for a rank whose connection is closed raises before that, so all are asked.
    """
    others = [rank for rank in range(backend.size()) if rank != backend.rank()]
    for context in range(len(os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))):
        for peer in others:
            with suppress(RuntimeError):
                backend.recv([torch.zeros(1)], peer, _UNUSED_TAG + context).wait(_AT_ONCE)
