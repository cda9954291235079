"""Whether the ranks of a group are on one host, and may talk there past the process group."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from recsdk_core.agreement import attempt, known
from recsdk_sharding.exchange.errors import PeerError

__all__ = ["SETTING", "Gather", "are_on_one_host"]

SETTING = "RECSDK_SHARED_MEMORY"

Gather: TypeAlias = Callable[[Sequence[int]], list[list[int]]]
"""Gives the numbers of all ranks, which are equally many, rank by rank."""


class _Host(NamedTuple):
    """What ranks on one host, which see each other's processes, have in common."""

    boot: int
    more_of_boot: int
    processes: int

    @classmethod
    def own(cls) -> _Host:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = int(file.read().strip().replace("-", ""), 16)
        half = 1 << 63
        return cls(boot % half, boot // half % half, os.stat("/proc/self/ns/pid").st_ino)


def _is_wanted() -> bool:
    """Whether the user wants it on this rank. Raises ValueError for a setting that says neither."""
    asked = os.environ.get(SETTING)
    if asked not in (None, "0", "1"):
        raise ValueError(f"{SETTING} must be 0 or 1, got {asked!r}; or unset it")
    return asked != "0"


def are_on_one_host(gather: Gather) -> tuple[bool, BaseException | None]:
    """Whether all ranks are, and want it; with what went wrong on this one. The same on all.

    Raises, on every rank, if the setting of one says neither: ValueError there, else PeerError.
    """
    is_wanted, wrong = attempt(_is_wanted)
    host, error = attempt(_Host.own) if is_wanted else (None, None)
    hosts = gather([int(host is not None), *(host or (0, 0, 0)), int(wrong is not None)])
    if wrong is not None:
        raise known(wrong)
    for rank, (*_, is_wrong) in enumerate(hosts):
        if is_wrong:
            raise PeerError(rank, f"{SETTING} must be 0 or 1 there; or unset it")
    return all(each[0] and each == hosts[0] for each in hosts), error
