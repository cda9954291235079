"""What the ranks of a group on the host tell each other, past gloo where they are on one host.

Shape letter: W ranks.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from recsdk_core.agreement import attempt
from recsdk_sharding._compat.private import timeout_of
from recsdk_sharding.exchange.local_sockets import LocalSockets

__all__ = ["Gathering", "all_to_all", "gathered"]

_logger = logging.getLogger(__name__)


class Gathering:
    """The numbers of all ranks of a group, equally many each, on their way.

    All ranks must make it in the same order.
    """

    def __init__(self, own: Sequence[int], group: dist.ProcessGroup) -> None:
        self._sockets = _sockets_of(group)
        if self._sockets is None:
            self._start = _start_by_gloo(own, group)
        else:
            self._number = self._sockets.start(own)

    def has_arrived(self) -> bool:
        """Whether waiting for it would return or raise at once; it may say no where it would."""
        if self._sockets is not None:
            return self._sockets.has_arrived(self._number)
        _, work = self._start
        return bool(work.is_completed())

    def wait(self) -> list[list[int]]:
        """The numbers, rank by rank. Once."""
        if self._sockets is not None:
            return self._sockets.wait(self._number)
        return _waited(*self._start)


def gathered(own: Sequence[int], group: dist.ProcessGroup) -> list[list[int]]:
    """The numbers of all ranks of a group, equally many each."""
    return [list(own)] if group.size() == 1 else Gathering(own, group).wait()


def all_to_all(
    group: dist.ProcessGroup, sent: torch.Tensor, sends: Sequence[int], receives: Sequence[int]
) -> torch.Tensor:
    """Sends a part of a tensor to each rank; what they sent, rank by rank, of the same dtype.

    `sent`: one dimension, on the host. `sends`, `receives`: items of each part, W.
    """
    if len(sends) == 1:
        return sent
    if sent.stride(0) != 1:  # `contiguous` leaves one number of many as it is
        sent = sent.clone(memory_format=torch.contiguous_format)
    received = sent.new_empty(sum(receives))
    sockets = _sockets_of(group)
    if sockets is None:
        dist.all_to_all_single(received, sent, list(receives), list(sends), group=group)
        return received
    parts, places = _parts(sent, sends), _parts(received, receives)
    sockets.exchange(parts, places)
    places[sockets.rank][:] = parts[sockets.rank]
    return received


def _parts(numbers: torch.Tensor, counts: Sequence[int]) -> list[memoryview]:
    """The bytes of so many numbers each."""
    in_bytes: Any = numbers.view(torch.uint8).numpy()
    whole, size = memoryview(in_bytes), numbers.element_size()
    ends = [size * end for end in accumulate(counts)]
    return [whole[begin:end] for begin, end in pairwise([0, *ends])]


def _start_by_gloo(own: Sequence[int], group: dist.ProcessGroup) -> tuple[NDArray[np.int64], Any]:
    numbers = torch.from_numpy(np.array(own, np.int64))  # `torch.tensor` takes five times as long
    found = np.empty((group.size(), len(own)), np.int64)
    into = [torch.from_numpy(of_rank) for of_rank in found]
    return found, dist.all_gather(into, numbers, group=group, async_op=True)


def _waited(found: NDArray[np.int64], work: Any) -> list[list[int]]:
    work.wait()
    numbers: list[list[int]] = found.tolist()
    return numbers


_sockets: weakref.WeakKeyDictionary[dist.ProcessGroup, LocalSockets | None] = (
    weakref.WeakKeyDictionary()
)


def _sockets_of(group: dist.ProcessGroup) -> LocalSockets | None:
    """Those of a group, made with all ranks when they are first asked for."""
    if group not in _sockets:
        timeout, _ = attempt(lambda: timeout_of(group))  # a backend that is not gloo has none
        made = None
        if timeout is not None:
            gather = partial(_gathered_by_gloo, group=group)
            made = LocalSockets.connect(group.rank(), gather, timeout)
        is_said = "talk through sockets of this host" if made else "talk through the process group"
        _logger.info("the %d ranks of a group %s", group.size(), is_said)
        _sockets[group] = made
    return _sockets[group]


def _gathered_by_gloo(own: Sequence[int], group: dist.ProcessGroup) -> list[list[int]]:
    """As `gathered`, whether or not the ranks are on one host."""
    return _waited(*_start_by_gloo(own, group))
