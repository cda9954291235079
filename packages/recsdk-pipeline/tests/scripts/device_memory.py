"""Trains a table in the memory of one NPU, without sharding: means, and an init_fn of its own.

python device_memory.py
"""

from __future__ import annotations

import torch
import torch_npu  # noqa: F401
from torch import nn
from torchrec.modules.embedding_configs import PoolingType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsdk_sharding import HashEmbeddingBagCollection, HashEmbeddingBagConfig

WIDTH = 8
NUM_STEPS = 200


def small_values(row: torch.Tensor) -> None:
    """First values of a new row (1, WIDTH)."""
    row.uniform_(-0.1, 0.1).add_(0.01)


def main() -> None:
    device = torch.device("npu")
    torch.manual_seed(0)
    table = HashEmbeddingBagConfig(
        name="tags",
        embedding_dim=WIDTH,
        num_embeddings=500,
        feature_names=["tags"],
        pooling=PoolingType.MEAN,
        init_fn=small_values,
    )
    ebc = HashEmbeddingBagCollection(tables=[table], device=device)
    apply_optimizer_in_backward(torch.optim.Adagrad, ebc.parameters(), {"lr": 0.2})
    over = nn.Linear(WIDTH, 1).to(device)
    dense = torch.optim.Adagrad(over.parameters(), lr=0.2)

    generator = torch.Generator().manual_seed(1)
    for step in range(NUM_STEPS):
        numbers = torch.randint(0, 200, (64,), generator=generator)
        # Each sample has the tags n and n + 1000, and is liked if n is even.
        ids = torch.stack([numbers, numbers + 1000], dim=1).flatten() * -0x61C8864680B583EB
        batch = KeyedJaggedTensor(["tags"], ids, lengths=torch.full((64,), 2))
        labels = (numbers % 2 == 0).float().to(device)
        dense.zero_grad()
        logits = over(ebc(batch).values()).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()
        dense.step()
        if step in (0, NUM_STEPS - 1):
            print(f"step {step}: loss {loss.item():.4f}, {len(ebc.tables()['tags'])} rows")
    assert ebc.embedding_bags["tags"].weight.device.type == "npu"


if __name__ == "__main__":
    main()
