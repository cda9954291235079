"""The demo's model on plain modules, trained on its stream of clicks or on MovieLens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchmetrics.functional.classification import binary_auroc

from recsdk_core.nn import HashEmbeddingBag
from recsdk_pipeline.data import ClickBatch, ClickData, Share, SyntheticClicks, read_movielens
from recsdk_pipeline.demo.model import ROW_WIDTH, Dlrm
from recsdk_pipeline.demo.settings import RECIPES, Recipe

NUM_HELD_OUT = 50_000
NUM_QUICK = 100_000
DENSE_RATE = 1e-3
WHOLE = Share()


@dataclass(frozen=True, kw_only=True)
class Stream:
    """What to train on: data, how long, and how fast."""

    name: str
    data: Callable[[int], ClickData]
    """For a seed."""
    recipe: Recipe

    def batches(self, data: ClickData) -> Iterator[ClickBatch]:
        for epoch in range(self.recipe.epochs):
            yield from data.train(epoch=epoch, batch_size=self.recipe.batch_size, share=WHOLE)


def streams(quick: bool, movielens: str | None) -> list[Stream]:
    """The demo's, and MovieLens if its folder is given."""
    recipe = RECIPES["synthetic"]
    most = NUM_QUICK if quick else int(recipe.examples or 0)

    def clicks(seed: int) -> ClickData:
        return SyntheticClicks(num_train=most, num_held_out=NUM_HELD_OUT, seed=seed)

    found = [Stream(name=f"demo_{most:.0e}".replace("e+0", "e"), data=clicks, recipe=recipe)]
    if movielens is not None:
        folder = movielens

        def ratings(seed: int) -> ClickData:
            return read_movielens(folder, seed=seed)

        found.append(Stream(name="movielens_1e5", data=ratings, recipe=RECIPES["movielens"]))
    return found


class Vectors(nn.Module):
    """One vector per feature and example: what the feature's bag gives for its ids."""

    def __init__(self, bags: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.bags = nn.ModuleDict(bags)

    def forward(self, sparse: Any) -> torch.Tensor:
        """Return (B, F, D)."""
        found = [
            bag(sparse[name].values(), sparse[name].offsets()) for name, bag in self.bags.items()
        ]
        return torch.stack(found, 1)


class OwnOptimizer(nn.Module):
    """A module whose rows an optimizer in the loop trains."""

    optimizer: torch.optim.Optimizer


class TakesClicks(nn.Module):
    """A module that is told which examples of the next batch are clicked."""

    clicks_B: torch.Tensor


def hash_bag(feature: str, rate: float, seed: int, **limits: Any) -> HashEmbeddingBag:
    """A bag of means that trains its rows in backward."""
    return HashEmbeddingBag(
        ROW_WIDTH,
        mode="mean",
        include_last_offset=True,
        name=feature,
        seed=seed,
        optimizer=torch.optim.Adagrad,
        optimizer_kwargs={"lr": rate},
        **limits,
    )


def trained(stream: Stream, data: ClickData, vectors: nn.Module, seed: int) -> Dlrm:
    """A model, trained to the end of the stream; each `OwnOptimizer` of it is stepped too."""
    torch.manual_seed(seed)
    model = Dlrm(vectors, num_features=len(data.features), num_dense=data.num_dense)
    of_rows = {id(parameter) for parameter in vectors.parameters()}
    dense = [each for each in model.parameters() if id(each) not in of_rows]
    own = [each.optimizer for each in vectors.modules() if isinstance(each, OwnOptimizer)]
    optimizers = [torch.optim.Adam(dense, lr=DENSE_RATE), *own]
    told = [each for each in vectors.modules() if isinstance(each, TakesClicks)]
    for batch in stream.batches(data):
        for each in told:
            each.clicks_B = batch.labels.long()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()
    return model.eval()


@torch.no_grad()
def auc(model: nn.Module, stream: Stream, data: ClickData) -> float:
    """On the held-out examples."""
    batches = list(data.held_out(batch_size=stream.recipe.batch_size, share=WHOLE))
    logits = torch.cat([model(batch) for batch in batches])
    labels = torch.cat([batch.labels for batch in batches])
    return float(binary_auroc(logits, labels.int()))
