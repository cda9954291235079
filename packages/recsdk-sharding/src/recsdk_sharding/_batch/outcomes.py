"""What became of each id of a batch: found, inserted, refused or missing.

Each id's outcome is known where its row is, and travels back to the rank that has the id in its
batch, if that rank wants it.

Shape letters: N keys, U keys that are sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from recsdk_core import Outcome, distinct_keys
from recsdk_sharding._batch.features import Features
from recsdk_sharding._configs.checking import check_switch

__all__ = ["KeepsOutcomes", "highest", "of_repeated", "outcomes_of_features"]


class KeepsOutcomes:
    """Mixed into the collections of hash tables, sharded or not."""

    _keeps_outcomes = False
    _outcomes: dict[str, torch.Tensor] | None = None

    def keep_outcomes(self, is_kept: bool = True) -> None:
        """Makes `outcomes` tell what became of each id, from the next batch on.

        Off by default. Sharded, it costs a byte for each id over the host group; pipelines that
        look ahead tell it of batches that they begin afterwards. Ranks may differ in it.
        """
        check_switch("is_kept", is_kept)
        self._keeps_outcomes = is_kept
        self._outcomes = None

    def outcomes(self) -> dict[str, torch.Tensor]:
        """What became of each id of the batch that was looked up last, by name of the embedding.

        Tensors uint8 (N,) on the host with values of `recsdk_core.Outcome`, in the order of the
        feature's ids in this rank's batch (of a sequence: of its vectors). Of equal new ids the
        first in the batch is INSERTED, the rest FOUND, also where samples share bags; the lowest
        rank comes first. For a table that is cut by columns, the highest of its shards' outcomes.
        Raises RuntimeError if none were kept.
        """
        if self._outcomes is None:
            raise RuntimeError(
                f"this {type(self).__name__} has kept no outcomes of its last batch: call "
                "keep_outcomes() before the batch"
            )
        return self._outcomes

    def _note_outcomes(self, names: Sequence[str], outcomes: Sequence[torch.Tensor] | None) -> None:
        """Takes the outcomes of the features, if they were kept."""
        self._outcomes = None if outcomes is None else dict(zip(names, outcomes, strict=True))


def highest(before: torch.Tensor | None, outcomes_N: torch.Tensor) -> torch.Tensor:
    """The higher of two outcomes of each key; `before` may be none yet."""
    return outcomes_N if before is None else torch.maximum(before, outcomes_N)


def outcomes_of_features(
    sent: Features, positions: torch.Tensor, outcomes: torch.Tensor, *, is_sequence: bool
) -> list[torch.Tensor]:
    """The outcomes uint8 (N,) of each feature's keys, from those of keys at positions of `sent`.

    Of a sequence, `bag_of_sample` says which of the keys that were sent each key is.
    """
    counts = sent.num_bags if is_sequence else sent.counts
    outcomes_N = torch.zeros(sum(counts), dtype=torch.uint8)
    pieces = outcomes_N.scatter_reduce_(0, positions, outcomes, "amax").split_with_sizes(counts)
    if not is_sequence or sent.bag_of_sample is None:
        return list(pieces)
    keys = sent.keys_N.split_with_sizes(counts)
    return list(map(of_repeated, pieces, keys, sent.bag_of_sample))


def of_repeated(
    outcomes_U: torch.Tensor, keys_U: torch.Tensor, which_N: torch.Tensor
) -> torch.Tensor:
    """The outcomes uint8 (N,) of N keys; `which_N`: which of the U sent keys each is.

    Of equal keys the first of the N is INSERTED if one of those that were sent was, whether keys
    are sent once or as often as bags have them.
    """
    same_U = distinct_keys(keys_U)[1]
    outcomes_U = torch.zeros_like(outcomes_U).scatter_reduce_(0, same_U, outcomes_U, "amax")
    same_N = same_U[which_N]
    order_N = torch.arange(len(which_N))
    first_U = torch.full((len(outcomes_U),), len(which_N))
    first_U.scatter_reduce_(0, same_N, order_N, "amin")
    outcomes_N = outcomes_U[same_N]
    is_later_N = first_U[same_N] != order_N
    return outcomes_N.masked_fill(is_later_N & (outcomes_N == Outcome.INSERTED), Outcome.FOUND)
