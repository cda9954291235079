"""A sequence model on raw ids: self-attention over a `HashEmbeddingCollection`, as in SASRec.

python sasrec.py

Source of the model: Kang and McAuley, "Self-attentive sequential recommendation", ICDM 2018.
Shapes: B sequences, L items each, D width.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsdk_sharding import HashEmbeddingCollection, HashEmbeddingConfig

NUM_ITEMS, RING, WIDTH, LONGEST, BATCH, STEPS, FIRST = 240, 12, 32, 16, 64, 200, 10


class SasRec(nn.Module):
    """Attention over the items so far gives a state; an item's score is its product with it."""

    def __init__(self) -> None:
        super().__init__()
        features = ["read", "scored"]
        item = HashEmbeddingConfig(NUM_ITEMS, WIDTH, name="item", feature_names=features)
        self.tables = HashEmbeddingCollection(tables=[item])
        apply_optimizer_in_backward(torch.optim.Adagrad, self.tables.parameters(), {"lr": 0.1})
        self.places = nn.Embedding(LONGEST, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 64, dropout=0.0, batch_first=True)

    def forward(self, read: list[np.ndarray], scored: np.ndarray) -> torch.Tensor:
        """Scores (B, L, I) of the items `scored` (I,) to come after each item read."""
        lengths = torch.tensor([*map(len, read), len(scored)] + [0] * (len(read) - 1))
        values = torch.from_numpy(np.concatenate([*read, scored]))
        vectors = self.tables(KeyedJaggedTensor(["read", "scored"], values, lengths=lengths))
        items = vectors["read"].to_padded_dense()
        seen = nn.Transformer.generate_square_subsequent_mask(items.shape[1])
        states = self.layer(items + self.places.weight[: items.shape[1]], src_mask=seen)
        return states @ vectors["scored"].values().T


def sequences(rng: np.random.Generator, items: np.ndarray, count: int) -> list[np.ndarray]:
    """Walks along rings of items, of different lengths."""
    starts, lengths = rng.integers(0, NUM_ITEMS, count), rng.integers(4, LONGEST + 2, count)
    pairs = zip(starts, lengths, strict=True)
    return [items[start // RING * RING + (start + np.arange(n)) % RING] for start, n in pairs]


def main() -> None:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    items = np.sort(rng.integers(-(2**62), 2**62, NUM_ITEMS))  # raw ids
    order = rng.permutation(items)  # of the walks
    model = SasRec()
    dense = [*model.places.parameters(), *model.layer.parameters()]
    optimizer = torch.optim.Adam(dense, lr=0.005)
    for _ in range(STEPS):
        batch = sequences(rng, order, BATCH)
        scores = model([each[:-1] for each in batch], items)
        is_item = torch.arange(scores.shape[1]) < torch.tensor([len(e) - 1 for e in batch])[:, None]
        numbers = torch.from_numpy(np.searchsorted(items, np.concatenate([e[1:] for e in batch])))
        loss = nn.functional.cross_entropy(scores[is_item], numbers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    asked = sequences(rng, order, 500)
    last = torch.tensor([len(each) - 2 for each in asked])
    with torch.no_grad():
        scores = model([each[:-1] for each in asked], items)[torch.arange(500), last]
    found = items[scores.topk(FIRST).indices.numpy()] == np.array([[e[-1]] for e in asked])
    print(f"recall@10 {found.any(1).mean():.3f}, by chance {FIRST / NUM_ITEMS:.3f}")


if __name__ == "__main__":
    main()
