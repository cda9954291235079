"""A click model on raw ids, trained by Lightning.

python with_lightning.py       needs lightning

A `RowOptimizer` over the model stands where its optimizer stood: Lightning clips, accumulates and
saves as it does for any model.
"""

from __future__ import annotations

import logging

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from recsdk_core.nn import HashEmbeddingBag, RowOptimizer


class Clicks(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = (
            HashEmbeddingBag(16, name="user"),
            HashEmbeddingBag(16, name="item"),
        )
        self.head = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Logits (B,) of users (B, 1) and items (B, N), all raw ids."""
        logits: torch.Tensor = self.head(self.users(users) + self.items(items)).squeeze(1)
        return logits

    def _loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        users, items, clicks = batch
        return nn.functional.binary_cross_entropy_with_logits(self(users, items), clicks)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return self._loss(batch)

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        self.log("loss", self._loss(batch))  # Lightning calls eval(): no rows are made

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return RowOptimizer(self, torch.optim.Adagrad, lr=0.1)


def make_data(count: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    """Users of even number click, if the first of their two items has an even number too."""
    users, items = torch.randint(0, 300, (count, 1)), torch.randint(0, 200, (count, 2))
    clicks = ((users[:, 0] % 2 == 0) & (items[:, 0] % 2 == 0)).float()
    raw = users * 7919**4 - 2**61, items * 104729**3 + 2**60
    return DataLoader(TensorDataset(*raw, clicks), batch_size=256, shuffle=True)


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    model, held_out = Clicks(), make_data(2_000)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=3,
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    [before] = trainer.validate(model, held_out, verbose=False)
    trainer.fit(model, make_data(20_000))
    [after] = trainer.validate(model, held_out, verbose=False)
    print(f"held-out loss before {before['loss']:.3f}, after {after['loss']:.3f}")
    print(f"{len(model.users.table)} users and {len(model.items.table)} items have rows")


if __name__ == "__main__":
    main()
