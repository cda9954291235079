"""What a rank says of a job before it begins, as numbers.

Shape letter: W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Header", "Splits"]


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
    wants_outcomes: bool = False
    """Whether it wants to know what became of its keys."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a rank says first, as int64 words."""

    has_batch: bool = True
    training: bool = False
    step: int = 0
    tag: int = 0
    depth: int = 0
    """Batches that its pipeline looks ahead."""
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
            int(splits.wants_outcomes),
            self.step,
            self.tag,
            self.depth,
            self.message_bytes,
            splits.batch_size,
            *counts,
        ]

    @staticmethod
    def of_words(words: Sequence[int]) -> Header:
        has_batch, training, is_late, combines_keys, wants_outcomes, *rest = words
        step, tag, depth, message_bytes, batch_size, *counts = rest
        return Header(
            has_batch=bool(has_batch),
            training=bool(training),
            step=step,
            tag=tag,
            depth=depth,
            message_bytes=message_bytes,
            splits=Splits(
                batch_size=batch_size,
                counts=tuple(counts),
                sends_weights_late=bool(is_late),
                combines_keys=bool(combines_keys),
                wants_outcomes=bool(wants_outcomes),
            ),
        )
