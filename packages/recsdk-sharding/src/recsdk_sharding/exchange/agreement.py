"""Work of a model's forward that may fail on one rank, before a collective that all ranks enter.

Shape letter: W ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from recsdk_sharding.exchange.attempt import attempt, message_of, text_of
from recsdk_sharding.exchange.errors import PeerError, known
from recsdk_sharding.exchange.groups import group_beside

__all__ = ["Agreement"]

T = TypeVar("T")


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
        lengths = [int(part) for part in self._gather(torch.tensor([len(message)]))]
        failed = [rank for rank, length in enumerate(lengths) if length]
        if failed:
            padded = torch.tensor(list(message.ljust(max(lengths), b"\0")), dtype=torch.uint8)
            texts = self._gather(padded)
            rank = failed[0]
            text = bytes(texts[rank][: lengths[rank]].tolist()).decode(errors="replace")
            raise PeerError(rank, text, step) if error is None else known(error)
        return result  # type: ignore[return-value]

    def _gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        if self._group is None:
            return [own]
        parts = [torch.empty_like(own) for _ in range(self._world_size)]
        dist.all_gather(parts, own, group=self._group)
        return parts
