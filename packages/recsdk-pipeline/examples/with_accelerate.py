"""A click model on raw ids, trained by Accelerate, saved and resumed.

python with_accelerate.py FOLDER       needs accelerate

A `RowOptimizer` over the model stands where its optimizer stood.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from recsdk_core.nn import HashEmbeddingBag, RowOptimizer


class Clicks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = (
            HashEmbeddingBag(16, name="user"),
            HashEmbeddingBag(16, name="item"),
        )
        self.head = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.users(users) + self.items(items)).squeeze(1)
        return logits


def make_data(count: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    """Users of even number click items of even number."""
    users, items = torch.randint(0, 300, (count, 1)), torch.randint(0, 200, (count, 1))
    clicks = ((users % 2 == 0) & (items % 2 == 0)).float()[:, 0]
    raw = users * 7919**4 - 2**61, items * 104729**3 + 2**60
    return DataLoader(TensorDataset(*raw, clicks), batch_size=256)


def prepared(data: Any) -> tuple[Accelerator, Any, Any, Any]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Clicks()
    optimizer = RowOptimizer(model, torch.optim.Adagrad, lr=0.05)
    return accelerator, *accelerator.prepare(model, optimizer, data)


def train(accelerator: Accelerator, model: Any, optimizer: Any, data: Any) -> float:
    """Train one epoch; return the loss of its last batch."""
    model.train()
    for users, items, clicks in data:
        with accelerator.accumulate(model):
            loss = nn.functional.binary_cross_entropy_with_logits(model(users, items), clicks)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return float(loss.detach())


def main() -> None:
    torch.manual_seed(0)
    data = make_data(10_000)
    accelerator, *parts = prepared(data)
    losses = [train(accelerator, *parts) for _ in range(2)]
    accelerator.save_state(sys.argv[1])
    whole = train(accelerator, *parts)

    accelerator, *parts = prepared(data)  # as a new process would
    accelerator.load_state(sys.argv[1])
    resumed = train(accelerator, *parts)
    print(f"loss {losses[0]:.3f}, then {losses[1]:.3f}, then {whole:.6f}")
    print(f"the resumed run's loss {'is the same' if resumed == whole else 'differs'}")


if __name__ == "__main__":
    main()
