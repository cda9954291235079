"""What the ranks tell each other of their work, so that they go on together or not at all.

Shape letter: W ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch.distributed as dist

from recsdk_core.agreement import attempt, raise_together, text_of
from recsdk_sharding.exchange.collectives import gathered
from recsdk_sharding.exchange.errors import PeerError
from recsdk_sharding.exchange.groups import group_beside, ranks_of

__all__ = ["Agreement", "Header", "Splits", "message_of", "raise_failures"]

T = TypeVar("T")

_MAX_MESSAGE_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class Splits:
    """How much one rank sends in one job."""

    batch_size: int = 0
    """Samples of the rank's batch."""
    counts: tuple[int, ...] = ()
    """Items that it sends to each rank, W numbers; empty: none."""
    sends_weights_late: bool = False
    """Whether the weights of its ids have to travel with the results, for their gradient."""
    combines_keys: bool = False
    """Whether it sends each key of a feature once, as a bag of its own."""
    has_one_key_each: bool = False
    """Whether each of its bags has one key, so that it sends no lengths."""
    wants_outcomes: bool = False
    """Whether it wants to know what became of its keys."""
    time: int | None = None
    """The time of its batch, for tables that evict by time; None: it has none."""
    data: int = 0
    """What comes with its keys, a bit for each thing that may."""
    look_in: int | None = None
    """Steps, 1 or more, after which its tables look at norms again; None: they do not."""
    decided: int = 0
    """What its tables that every rank holds have decided, as a number; alike on all ranks."""
    values: int = 0
    """The step of an earlier batch (31 bits), and what rows of those tables were when it was looked
    up, or how they were updated (32 bits); alike on all ranks that say it of one step. 0: nothing
    is said."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a rank says first, as int64 words."""

    has_batch: bool = True
    training: bool = False
    step: int = 0
    tag: int = 0
    depth: int = 0
    """Batches that its pipeline looks ahead."""
    num_modules: int = 0
    """How many modules were made over the group before the job was submitted."""
    message_bytes: int = 0
    """Length of the error's text; 0: no error."""
    splits: Splits = field(default_factory=Splits)

    def words(self, world_size: int) -> list[int]:
        counts = self.splits.counts or (0,) * world_size
        splits = self.splits
        return [
            int(self.has_batch),
            int(self.training),
            int(splits.sends_weights_late),
            int(splits.combines_keys),
            int(splits.has_one_key_each),
            int(splits.wants_outcomes),
            self.step,
            self.tag,
            self.depth,
            self.num_modules,
            self.message_bytes,
            splits.batch_size,
            int(splits.time is not None),
            splits.time or 0,
            splits.data,
            splits.look_in or 0,
            splits.decided,
            splits.values,
            *counts,
        ]

    @staticmethod
    def of_words(words: Sequence[int]) -> Header:
        has_batch, training, is_late, combines_keys, is_single, wants_outcomes, *rest = words
        step, tag, depth, num_modules, message_bytes, batch_size, *rest = rest
        has_time, time, data, look_in, decided, values, *counts = rest
        return Header(
            has_batch=bool(has_batch),
            training=bool(training),
            step=step,
            tag=tag,
            depth=depth,
            num_modules=num_modules,
            message_bytes=message_bytes,
            splits=Splits(
                batch_size=batch_size,
                counts=tuple(counts),
                sends_weights_late=bool(is_late),
                combines_keys=bool(combines_keys),
                has_one_key_each=bool(is_single),
                wants_outcomes=bool(wants_outcomes),
                time=time if has_time else None,
                data=data,
                look_in=look_in or None,
                decided=decided,
                values=values,
            ),
        )


def message_of(text: str) -> bytes:
    """A text as it is sent."""
    return text.encode(errors="backslashreplace")[:_MAX_MESSAGE_BYTES]


def raise_failures(
    lengths: Sequence[int],
    message: bytes,
    error: BaseException | None,
    gather: Callable[[list[int]], Sequence[Sequence[int]]],
    of_peer: Callable[[int, str], BaseException],
    ranks: Sequence[int] | None,
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
    raise_together(error, texts, of_peer, ranks)


class Agreement:
    """Runs calls on all ranks of a host group: each returns on every rank, or raises on every rank.

    It uses a gloo group of its own, since the host group is busy with batches ahead. All ranks must
    make it, and call it in the same order, from one thread.
    """

    def __init__(self, host: dist.ProcessGroup) -> None:
        """`host`: the group of these ranks; the new group has its timeout."""
        self._world_size = dist.get_world_size(host)
        self._group: dist.ProcessGroup | None = None
        if self._world_size > 1:
            self._group = group_beside(host)

    def together(self, call: Callable[[], T], step: int | None) -> T:
        """What a call returns, if it returns on every rank.

        Else all ranks raise: the call's own error where it failed, PeerError elsewhere.
        Cost: a collective of 8 bytes a rank on the host.
        """
        result, error = attempt(call)
        message = b"" if error is None else message_of(text_of(error))
        lengths = [length for [length] in self._gather([len(message)])]
        raise_failures(
            lengths,
            message,
            error,
            self._gather,
            lambda rank, text: PeerError(rank, text, step),
            ranks_of(self._group),
        )
        return result  # type: ignore[return-value]

    def _gather(self, own: list[int]) -> list[list[int]]:
        return [own] if self._group is None else gathered(own, self._group)
