"""Work that may fail on one rank, before a collective that all ranks enter.

Shape letter: W ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from recsdk_core.agreement import attempt, raise_together, text_of
from recsdk_sharding.exchange.errors import PeerError, known
from recsdk_sharding.exchange.groups import gathered, group_beside

__all__ = ["Agreement", "message_of", "raise_failures"]

T = TypeVar("T")

_MAX_MESSAGE_BYTES = 4096


def message_of(text: str) -> bytes:
    """A text as it is sent."""
    return text.encode(errors="backslashreplace")[:_MAX_MESSAGE_BYTES]


def raise_failures(
    lengths: Sequence[int],
    message: bytes,
    error: BaseException | None,
    gather: Callable[[list[int]], Sequence[Sequence[int]]],
    of_peer: Callable[[int, str], BaseException],
) -> None:
    """Swaps the messages of ranks that failed, and raises on every rank: see `raise_together`.

    `lengths`: of every rank's message in bytes, 0 if it is well; `message` and `error`: this
    rank's. `gather` gives what every rank passes to it.
    """
    if not any(lengths):
        return
    messages = gather(list(message.ljust(max(lengths), b"\0")))
    pairs = zip(messages, lengths, strict=True)
    texts = [bytes(own[:n]).decode(errors="replace") if n else None for own, n in pairs]
    raise_together(None if error is None else known(error), texts, of_peer)


class Agreement:
    """Has the ranks of a host group end such work together.

    Over a gloo group of its own, since the host group is busy with batches ahead. All ranks must
    make it, and call it in the same order, from one thread.
    """

    def __init__(self, host: dist.ProcessGroup) -> None:
        """`host`: whose ranks these are; its timeout is that of the new group."""
        self._world_size = dist.get_world_size(host)
        self._group: dist.ProcessGroup | None = None
        if self._world_size > 1:
            self._group = group_beside(host)

    def together(self, call: Callable[[], T], step: int | None) -> T:
        """What a call returns, if it does so on every rank.

        Else raises, on all ranks: the call's own error where it failed, PeerError elsewhere.
        Cost: a collective of 8 bytes a rank on the host.
        """
        result, error = attempt(call)
        message = b"" if error is None else message_of(text_of(error))
        lengths = [length for [length] in self._gather([len(message)])]
        raise_failures(
            lengths, message, error, self._gather, lambda rank, text: PeerError(rank, text, step)
        )
        return result  # type: ignore[return-value]

    def _gather(self, own: list[int]) -> list[list[int]]:
        return [own] if self._group is None else gathered(own, self._group)
