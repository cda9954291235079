"""Who took which items in which order: MovieLens 100K, or a synthetic log.

The task of both retrieval examples: of each user the last item is held out; the model ranks all
other items that the user has not had yet, and recall@10 is the share of users whose held-out item
is among the first ten.

Shapes: U users, I items.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from recsdk_pipeline.data import IdBags, Share, category_keys

Int64s = npt.NDArray[np.int64]
TOP = 10


@dataclass
class IdBatch(Pipelineable):  # type: ignore[misc]
    """Ids of B samples: one bag per feature and sample."""

    ids: KeyedJaggedTensor

    @classmethod
    def of(cls, bags: dict[str, IdBags]) -> IdBatch:
        """The batch of these features."""
        values = np.concatenate([bag.values for bag in bags.values()])
        lengths = np.concatenate([bag.lengths for bag in bags.values()])
        return cls(
            KeyedJaggedTensor(
                list(bags), torch.from_numpy(values), lengths=torch.from_numpy(lengths)
            )
        )

    def to(self, device: torch.device, non_blocking: bool = False) -> IdBatch:
        """Return the batch on `device`."""
        return IdBatch(self.ids.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> IdBatch:
        """Return the batch in page-locked memory."""
        return IdBatch(self.ids.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the device's allocator that `stream` reads this batch."""
        self.ids.record_stream(stream)


@dataclass(frozen=True)
class Log:
    """The items of each user in the order in which they were taken; all ids are raw int64."""

    users: Int64s
    """(U,)"""
    items: list[Int64s]
    """Of each user, at least three."""

    def trained(self) -> list[Int64s]:
        """The items to train on: all of a user's but the last."""
        return [items[:-1] for items in self.items]

    def catalogue(self) -> Int64s:
        """(I,) the items that occur in training."""
        return np.unique(np.concatenate(self.trained()))


class InBatchLoss(torch.nn.Module):
    """Cross entropy of each sample's item among the items of the batch, its negatives.

    Popular items are negatives more often; their logits are lowered by as much as that earns them.
    Source: Yi et al., "Sampling-bias-corrected neural modeling for large corpus item
    recommendations", RecSys 2019.
    """

    def __init__(self, log: Log) -> None:
        super().__init__()
        items, counts = np.unique(np.concatenate(log.trained()), return_counts=True)
        self._items, self._log_counts = items, torch.from_numpy(np.log(counts)).float()

    def forward(self, logits: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """The mean over samples; logits (N, N) of sample by item, items (N,)."""
        places = torch.from_numpy(np.searchsorted(self._items, items.numpy()))
        same = items[:, None].eq(items) & ~torch.eye(len(items), dtype=torch.bool)
        corrected = (logits - self._log_counts[places]).masked_fill(same, -torch.inf)
        return torch.nn.functional.cross_entropy(corrected, torch.arange(len(items)))


def read_movielens_log(folder: Path) -> Log:
    """Read ml-100k.inter or u.data of a MovieLens 100K folder: every rating counts as taken."""
    typed, original = folder / "ml-100k.inter", folder / "u.data"
    if typed.is_file():
        ratings = np.loadtxt(typed, delimiter="\t", skiprows=1)
    else:
        ratings = np.loadtxt(original, delimiter="\t")
    users, items, _, seconds = ratings.astype(np.int64).T
    return log_of(users, items, seconds)


def synthetic_log(num_users: int, seed: int = 0) -> Log:
    """Items come in rings of 12; a user walks along two of them, now and then elsewhere."""
    rng = np.random.default_rng(seed)
    users, items = [], []
    for user in range(num_users):
        rings, places = rng.integers(0, 25, 2), rng.integers(0, 12, 2)
        for _ in range(30):
            which = rng.integers(2)
            places[which] = (places[which] + 1) % 12
            walk = 12 * rings[which] + places[which]
            users.append(user)
            items.append(walk if rng.random() < 0.9 else rng.integers(300))
    return log_of(np.array(users), np.array(items), np.arange(len(users)))


def log_of(users: Int64s, items: Int64s, seconds: Int64s) -> Log:
    """A log of (user, item, time) triples, of the users with three items or more."""
    order = np.lexsort((np.arange(len(users)), seconds, users))
    numbers, starts = np.unique(users[order], return_index=True)
    taken = np.split(_raw_ids("item", items[order]), starts[1:])
    kept = [number for number, items_of_user in enumerate(taken) if len(items_of_user) >= 3]
    return Log(_raw_ids("user", numbers)[kept], [taken[number] for number in kept])


def _raw_ids(feature: str, numbers: Int64s) -> Int64s:
    """Arbitrary 64-bit ids, as production logs have them."""
    distinct, which = np.unique(numbers, return_inverse=True)
    return category_keys(feature, [str(n) for n in distinct])[which]


def shuffled_batches(count: int, size: int, seed: int, share: Share) -> Iterator[Int64s]:
    """This rank's part of each step of `size` of the numbers below `count`, in a new order."""
    order = np.random.default_rng(seed).permutation(count)
    for start in range(0, count, size):
        first, last = share.bounds(start, min(start + size, count))
        yield order[first:last]


def recall(log: Log, scores: torch.Tensor, users: range) -> float:
    """Return recall@10 over all ranks.

    `scores` (len(users), I) rates the catalogue for the users of this rank. An item of the
    catalogue that the user has had is left out, unless it is the held-out one.
    """
    catalogue = log.catalogue()
    hits = torch.zeros(2, dtype=torch.float64)
    for row, user in enumerate(users):
        held_out = log.items[user][-1]
        rated = scores[row].clone()
        rated[torch.from_numpy(np.isin(catalogue, log.items[user][:-1]))] = -torch.inf
        place = np.searchsorted(catalogue, held_out)
        hits[1] += 1
        if place < len(catalogue) and catalogue[place] == held_out:
            own = scores[row][place]
            hits[0] += float(int((rated > own).sum()) < TOP)
    dist.all_reduce(hits)
    return float(hits[0] / hits[1])


def popularity_recall(log: Log, users: range) -> float:
    """recall@10 of always naming the items that most users took."""
    _, counts = np.unique(np.concatenate(log.trained()), return_counts=True)
    return recall(log, torch.from_numpy(counts).float().expand(len(users), -1), users)
