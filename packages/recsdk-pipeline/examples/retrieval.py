"""Retrieval: two towers on raw ids, and an index of faiss that finds the nearest items.

python retrieval.py        needs faiss-cpu

The ids of the items are the ids of the index: no vocabulary stands between them.
"""

from __future__ import annotations

import faiss
import numpy as np
import torch
from torch import nn

from recsdk_core.nn import HashEmbeddingBag
from recsdk_core.optim import Adagrad

NUM_USERS, NUM_ITEMS, NUM_TASTES = 500, 400, 20
WIDTH, BATCH, STEPS, FIRST = 16, 512, 300, 10


class Tower(nn.Module):
    """Unit vectors of ids, from a table and a layer above it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.table = HashEmbeddingBag(WIDTH, name=name, optimizer=Adagrad(lr=0.1))
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Vectors (N, D) of ids (N,)."""
        return nn.functional.normalize(self.layer(self.table(ids[:, None])))


def make_clicks(rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Raw ids of users and items, and the users' clicks (U, I): on items of their own taste."""
    users = rng.integers(-(2**62), 2**62, NUM_USERS)
    items = rng.integers(-(2**62), 2**62, NUM_ITEMS)
    tastes = rng.integers(0, NUM_TASTES, NUM_USERS)[:, None], np.arange(NUM_ITEMS) % NUM_TASTES
    clicks = np.equal(*tastes) & (rng.random((NUM_USERS, NUM_ITEMS)) < 0.7)
    return torch.from_numpy(users), torch.from_numpy(items), torch.from_numpy(clicks)


def train(pairs: torch.Tensor, users: torch.Tensor, items: torch.Tensor) -> tuple[Tower, Tower]:
    """Towers that tell each pair's item from the other items of the batch."""
    towers = Tower("user"), Tower("item")
    dense = [p for tower in towers for p in tower.layer.parameters()]
    optimizer = torch.optim.Adam(dense, lr=0.01)
    for _ in range(STEPS):
        user, item = pairs[torch.randint(len(pairs), (BATCH,))].T
        scores = towers[0](users[user]) @ towers[1](items[item]).T / 0.1
        other = item[:, None].ne(item) | torch.eye(BATCH, dtype=torch.bool)
        scores = scores.masked_fill(~other, -torch.inf)  # the same item is no negative
        optimizer.zero_grad()
        nn.functional.cross_entropy(scores, torch.arange(BATCH)).backward()
        optimizer.step()
    return towers


def main() -> None:
    torch.manual_seed(0)
    users, items, clicks = make_clicks(np.random.default_rng(0))
    held_out = clicks & (torch.rand(clicks.shape) < 0.2)
    user_tower, item_tower = train((clicks & ~held_out).nonzero(), users, items)
    user_tower.eval()
    item_tower.eval()  # unknown ids get no rows
    with torch.no_grad():
        index = faiss.IndexIDMap2(faiss.IndexFlatIP(WIDTH))
        index.add_with_ids(item_tower(items).numpy(), items.numpy())
        _, found = index.search(user_tower(users).numpy(), NUM_ITEMS // NUM_TASTES + FIRST)
    is_hit = [np.isin(items[held_out[u]], found[u]).mean() for u in held_out.any(1).nonzero()[:, 0]]
    print(f"held-out items found {np.mean(is_hit):.3f}, by chance {found.shape[1] / NUM_ITEMS:.3f}")


if __name__ == "__main__":
    main()
