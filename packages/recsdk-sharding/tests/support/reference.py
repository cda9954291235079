"""The same training on one process, twice: by the unsharded module, and by torch.optim alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from worlds import (
    Batch,
    Model,
    Rows,
    Setup,
    collection_of,
    dense_of,
    dense_parameters,
    features_of,
    joined,
    loss_of,
    make_batch,
    new_model,
    rows_of,
    tables,
)


def batches_of(sizes: list[list[int]], weighted: bool, seed: int = 0) -> list[list[Batch]]:
    """The batches of every step and rank, as the ranks make them."""
    return [
        [make_batch(seed + 100 * step + r, n, weighted=weighted) for r, n in enumerate(row)]
        for step, row in enumerate(sizes)
    ]


def mean_loss(out: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """The mean over the ranks of each rank's loss."""
    return torch.stack([loss_of(part) for part in out.split(sizes)]).mean()


def train_unsharded(setup: Setup, sizes: list[list[int]]) -> dict[str, Any]:
    """Trains the unsharded module on the joined batches."""
    model = new_model(setup, "cpu")
    dense = torch.optim.SGD(dense_parameters(model), lr=setup.dense_lr)
    outputs = []
    for row, batches in zip(sizes, batches_of(sizes, setup.weighted), strict=True):
        dense.zero_grad()
        _, out = model(joined(batches))
        mean_loss(out, row).backward()
        dense.step()
        outputs.append([part.detach().numpy() for part in out.split(row)])
    return {
        "outputs": outputs,
        "rows": rows_of(collection_of(model).tables()),
        "dense": dense_of(model),
    }


class DictionaryEmbeddings:
    """Rows in a dense matrix addressed through a dictionary, trained by torch.optim.

    Only rows that a batch touched take part in its update: what the optimizer did to the others is
    undone.
    """

    def __init__(self, setup: Setup, initial: Rows) -> None:
        self.configs = tables(**setup.options)
        self.index = {n: {k: i for i, k in enumerate(rows)} for n, rows in initial.items()}
        self.weights = {
            name: torch.nn.Parameter(torch.from_numpy(np.stack([w for w, _ in rows.values()])))
            for name, rows in initial.items()
        }
        self.optimizers = {
            name: setup.optimizer([weight], **setup.arguments)
            for name, weight in self.weights.items()
        }

    def pooled(self, batch: Batch) -> torch.Tensor:
        """The pooled vectors of all features, side by side."""
        features = features_of(batch)
        parts = [self._pool(c, *features[name]) for c in self.configs for name in c.feature_names]
        return torch.cat(parts, dim=1)

    def _pool(
        self, config: Any, lengths: torch.Tensor, keys: torch.Tensor, given: torch.Tensor | None
    ) -> torch.Tensor:
        index = self.index[config.name]
        rows = torch.tensor([index[key] for key in keys.tolist()], dtype=torch.int64)
        bag = torch.repeat_interleave(lengths)
        weights = torch.ones(len(rows)) if given is None else given
        vectors = self.weights[config.name][rows] * weights[:, None]
        total = torch.zeros(len(lengths), config.embedding_dim).index_add(0, bag, vectors)
        if config.pooling.value == "SUM":
            return total
        norm = torch.zeros(len(total)).index_add(0, bag, weights)[:, None]
        return torch.where(norm == 0, 0.0, total / norm)

    def step(self, batch: Batch) -> None:
        """One optimizer step on the rows of the batch."""
        features = features_of(batch)
        for config in self.configs:
            keys = {k for n in config.feature_names for k in features[n][1].tolist()}
            touched = torch.tensor([self.index[config.name][k] for k in keys], dtype=torch.int64)
            self._step_touched(config.name, touched)

    def _step_touched(self, name: str, touched: torch.Tensor) -> None:
        weight, optimizer = self.weights[name], self.optimizers[name]
        is_untouched = torch.ones(len(weight), dtype=torch.bool)
        is_untouched[touched] = False
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        before = [(t, t.detach().clone()) for t in self._row_tensors(name)]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for tensor, old in before:
                tensor[is_untouched] = old[is_untouched]
            if not before[1:]:  # the state was made in this step: fresh for untouched rows
                for tensor in self._row_tensors(name)[1:]:
                    tensor[is_untouched] = 0

    def _row_tensors(self, name: str) -> list[torch.Tensor]:
        weight = self.weights[name]
        state = self.optimizers[name].state.get(weight, {})
        return [weight, *(v for v in state.values() if torch.is_tensor(v) and v.dim() > 0)]


def train_with_torch(setup: Setup, sizes: list[list[int]], initial: Rows) -> dict[str, Any]:
    """Trains dictionary embeddings and the same dense part."""
    dense_part = Model(tables(**setup.options), torch.device("cpu"))
    dense = torch.optim.SGD(dense_part.over.parameters(), lr=setup.dense_lr)
    sparse = DictionaryEmbeddings(setup, initial)
    outputs = []
    for row, batches in zip(sizes, batches_of(sizes, setup.weighted), strict=True):
        batch = joined(batches)
        dense.zero_grad()
        out = dense_part.over(torch.cat([sparse.pooled(batch), batch.dense], dim=1)).squeeze(1)
        mean_loss(out, row).backward()
        dense.step()
        sparse.step(batch)
        outputs.append([part.detach().numpy() for part in out.split(row)])
    weights = {
        name: {key: sparse.weights[name][i].detach().numpy() for key, i in index.items()}
        for name, index in sparse.index.items()
    }
    return {"outputs": outputs, "weights": weights, "dense": dense_of(dense_part)}


def initial_rows(setup: Setup, rows: Rows) -> Rows:
    """The initial rows of the same keys, from fresh tables."""
    fresh: Rows = {}
    model = new_model(setup, "cpu")
    for name, table in model.ebc.tables().items():
        keys = np.array(list(rows[name]), dtype=np.int64)
        table.find_or_insert(keys)
        fresh[name] = {key: rows_of({name: table})[name][key] for key in rows[name]}
    return fresh
