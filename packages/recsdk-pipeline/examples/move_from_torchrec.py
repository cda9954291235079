"""A torchrec model moves to hash tables with its checkpoint and optimizers, and trains on.

    torchrun --standalone --nproc-per-node 2 move_from_torchrec.py FOLDER

or `python move_from_torchrec.py FOLDER` for one rank. Dense indexes become the raw ids for which
they stood. Prints how far losses are from those of the model that stays with torchrec's tables.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from running import joined, spread
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from recsdk_sharding import HashEmbeddingBagCollection, HashEmbeddingBagConfig, import_rows

IDS = {"user": torch.arange(50) * 7919 - 2**40, "item": torch.arange(80) ** 5 + 2**61}
STOCK = EmbeddingBagCollection, EmbeddingBagConfig
HASH = HashEmbeddingBagCollection, HashEmbeddingBagConfig


class Clicks(nn.Module):
    def __init__(self, bags: Any, config: Any) -> None:
        super().__init__()
        tables = [
            config(name=name, embedding_dim=8, num_embeddings=len(ids), feature_names=[name])
            for name, ids in IDS.items()
        ]
        self.bags = bags(tables=tables, device=torch.device("meta"))
        self.over = nn.Linear(16, 1)

    def forward(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        logits: torch.Tensor = self.over(self.bags(sparse).values())
        return logits.squeeze(1)


def train(model: nn.Module, optimizer: Any, seed: int, *, is_raw: bool) -> list[float]:
    numbers, losses = torch.Generator().manual_seed(10 * seed + dist.get_rank()), []
    for _ in range(20):
        indexes = {n: torch.randint(len(i), (32,), generator=numbers) for n, i in IDS.items()}
        labels = ((indexes["user"] + indexes["item"]) % 2).float()
        values = torch.cat([IDS[n][i] if is_raw else i for n, i in indexes.items()])
        sparse = KeyedJaggedTensor(list(IDS), values, lengths=torch.ones_like(values))
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(sparse), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(folder: str) -> None:
    with joined() as env:

        def made(kind: Any) -> tuple[nn.Module, Any]:
            module = Clicks(*kind)
            model, optimizer = spread(module, module.bags, env, row_lr=0.1, dense_lr=0.01)
            optimizer.save_param_groups(True)  # with the learning rates
            return model, optimizer

        stock, stock_optimizer = made(STOCK)
        train(stock, stock_optimizer, seed=1, is_raw=False)
        saved = {"model": stock.state_dict(), "optimizer": stock_optimizer.state_dict()}
        dcp.save(saved, checkpoint_id=folder)
        expected = train(stock, stock_optimizer, seed=2, is_raw=False)

        # From here on as in another process: torchrec reads its checkpoint into a model of its own.
        before, before_optimizer = made(STOCK)
        before_optimizer.init_state()
        saved = {"model": before.state_dict(), "optimizer": before_optimizer.state_dict()}
        dcp.load(saved, checkpoint_id=folder)
        model, optimizer = made(HASH)
        import_rows(model, saved["model"], IDS, saved["optimizer"])  # rows and their state
        layers = {name: saved["model"][name] for name in ("over.weight", "over.bias")}
        model.load_state_dict(layers, strict=False)
        optimizer.init_state()
        state = optimizer.state_dict()
        state["state"] = {name: saved["optimizer"]["state"][name] for name in state["state"]}
        optimizer.load_state_dict(state)
        losses = train(model, optimizer, seed=2, is_raw=True)
        if env.rank == 0:
            most = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
            print(f"largest difference of a loss {most:.7f}")


if __name__ == "__main__":
    main(sys.argv[1])
