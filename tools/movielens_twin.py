"""Trains one model twice on MovieLens 100K: on hash tables, and on torch.nn.EmbeddingBag.

    python tools/movielens_twin.py --movielens DIR [--seeds 0 1 2] [--output FILE.json]

Both start from the same rows (every id is mapped first, and the rows are exported by id) and the
same dense weights, and see the same batches. Then losses may differ only by the order in which
floats are added, and so may the AUC on the held-out tenth. Training amplifies such differences,
so a third training shows how much: the twin again, each of its first rows' weights moved by one
unit in the last place. Ends with status 1 if hash tables and twin differ by more than they may.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import statistics
import sys
import time
import warnings
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchmetrics.functional.classification import binary_auroc
from torchrec.distributed.types import ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsdk_pipeline import HybridTrainPipelineSparseDist
from recsdk_pipeline.data import HeldOutSplit, Share, read_movielens
from recsdk_pipeline.demo.model import ROW_WIDTH, ClickModels, Dlrm, HashedIds
from recsdk_pipeline.demo.settings import RECIPES
from recsdk_pipeline.demo.spreading import Rank, spread
from recsdk_sharding import ShardedHashEmbeddingBagCollection

RECIPE = RECIPES["movielens"]
CPU = torch.device("cpu")
NUM_FIRST_STEPS = 50
LARGEST_FIRST_DIFFERENCE = 1e-6
LARGEST_DIFFERENCE = 5e-3
LARGEST_AUC_DIFFERENCE = 1e-3
LOWEST_AUC = 0.77


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training: the loss of each step, and how it ended."""

    losses: list[float]
    auc: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The trainings from one seed."""

    seed: int
    hashed: Run
    twin: Run
    nudged_twin: Run

    def loss_differences(self) -> list[float]:
        """Of hash tables and twin, step by step."""
        return differences(self.hashed, self.twin)

    def auc_difference(self) -> float:
        return abs(self.hashed.auc - self.twin.auc)

    def agrees(self) -> bool:
        found = self.loss_differences()
        return (
            max(found[:NUM_FIRST_STEPS]) <= LARGEST_FIRST_DIFFERENCE
            and max(found) <= LARGEST_DIFFERENCE
            and self.auc_difference() <= LARGEST_AUC_DIFFERENCE
            and min(self.hashed.auc, self.twin.auc) >= LOWEST_AUC
        )


def differences(one: Run, other: Run) -> list[float]:
    return [abs(a - b) for a, b in zip(one.losses, other.losses, strict=True)]


class TwinIds(nn.Module):
    """`HashedIds` over torch.nn.EmbeddingBag, with a sorted list of each feature's ids."""

    def __init__(self, rows: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
        super().__init__()
        self.keys = {name: np.sort(keys) for name, (keys, _) in rows.items()}
        self.bags = nn.ModuleDict()
        for name, (keys, weights) in rows.items():
            weight = torch.from_numpy(weights[np.argsort(keys)])
            self.bags[name] = nn.EmbeddingBag.from_pretrained(
                weight, freeze=False, mode="mean", sparse=True, include_last_offset=True
            )

    def forward(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        return torch.stack([self._pooled(name, sparse[name]) for name in self.keys], dim=1)

    def _pooled(self, name: str, bags: Any) -> torch.Tensor:
        positions = np.searchsorted(self.keys[name], bags.values().numpy())
        pooled: torch.Tensor = self.bags[name](torch.from_numpy(positions), bags.offsets())
        return pooled


class TwinOptimizer:
    """Adagrad on the rows, weight decay on those that a step touches, and Adam on the rest."""

    def __init__(self, model: nn.Module, bags: nn.ModuleDict) -> None:
        self._rows = list(bags.parameters())
        known = {id(row) for row in self._rows}
        dense = [p for p in model.parameters() if id(p) not in known]
        self._adagrad = torch.optim.Adagrad(self._rows, lr=RECIPE.learning_rate)
        self._adam = torch.optim.Adam(dense, lr=RECIPE.dense_learning_rate)

    def zero_grad(self) -> None:
        self._adagrad.zero_grad()
        self._adam.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        for row in self._rows:
            assert row.grad is not None, "every feature of MovieLens is in every batch"
            grad = row.grad.coalesce()
            touched = row[grad.indices()[0]]
            decayed = grad.values() + RECIPE.weight_decay * touched
            row.grad = torch.sparse_coo_tensor(
                grad.indices(), decayed, grad.shape, check_invariants=False
            )
        self._adagrad.step()
        self._adam.step()


def compare(data: HeldOutSplit, seed: int, rank: Rank) -> Comparison:
    torch.manual_seed(seed)
    plain = Dlrm(
        HashedIds(data.features, seed=seed),
        num_features=len(data.features),
        num_dense=data.num_dense,
    )
    twin = copy.deepcopy(plain)
    model, optimizer = spread(ClickModels({"ids": plain}), rank, RECIPE)
    rows = export_all_rows(model, data)
    nudged = {name: (keys, np.nextafter(w, np.float32(1))) for name, (keys, w) in rows.items()}
    return Comparison(
        seed=seed,
        hashed=train(model, optimizer, data),
        twin=train_twin(twin, rows, data),
        nudged_twin=train_twin(twin, nudged, data),
    )


def train_twin(
    plain: Dlrm, rows: dict[str, tuple[np.ndarray, np.ndarray]], data: HeldOutSplit
) -> Run:
    twin = copy.deepcopy(plain)
    twin.vectors = TwinIds(rows)
    model = ClickModels({"ids": twin})
    return train(model, TwinOptimizer(model, twin.vectors.bags), data)


def export_all_rows(
    model: nn.Module, data: HeldOutSplit
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Give every id of the data a row; return the ids and rows of each table."""
    share = Share()
    everything = [
        *data.train(epoch=0, batch_size=4096, share=share),
        *data.held_out(batch_size=4096, share=share),
    ]
    (collection,) = [m for m in model.modules() if isinstance(m, ShardedHashEmbeddingBagCollection)]
    rows = {}
    for name, table in collection.tables().items():
        ids = np.unique(np.concatenate([b.sparse[name].values().numpy() for b in everything]))
        table.find_or_insert(ids)
        batches = list(table.export(state=False))
        keys = np.concatenate([batch.keys for batch in batches])
        rows[name] = keys, np.concatenate([batch.weights for batch in batches])
        assert rows[name][1].shape == (len(ids), ROW_WIDTH)
    return rows


def train(model: nn.Module, optimizer: Any, data: HeldOutSplit) -> Run:
    pipeline = HybridTrainPipelineSparseDist(model, optimizer, CPU, return_loss=True)
    start = time.monotonic()
    losses = []
    for epoch in range(RECIPE.epochs):
        batches = data.train(epoch=epoch, batch_size=RECIPE.batch_size, share=Share())
        losses += [loss.item() for _, loss in steps(pipeline, batches)]
    seconds = time.monotonic() - start
    return Run(losses=losses, auc=held_out_auc(model, pipeline, data), seconds=seconds)


def held_out_auc(model: nn.Module, pipeline: Any, data: HeldOutSplit) -> float:
    model.eval()
    batches = data.held_out(batch_size=4096, share=Share())
    outputs = [output for output, _ in steps(pipeline, batches)]
    probabilities = torch.cat([found["ids"] for found, _ in outputs])
    labels = torch.cat([labels for _, labels in outputs])
    return float(binary_auroc(probabilities, labels.int()))


def steps(pipeline: Any, batches: Any) -> Any:
    with suppress(StopIteration):
        while True:
            yield pipeline.progress(batches)


def table_of(comparisons: list[Comparison]) -> str:
    header = (
        f"| seed | steps | loss difference: first {NUM_FIRST_STEPS} steps | median | largest "
        "| largest, twin and nudged twin | AUC, hash tables | AUC, twin | difference |"
    )
    return "\n".join([header, "|---" * 9 + "|", *map(_line, comparisons)])


def _line(c: Comparison) -> str:
    found, control = c.loss_differences(), differences(c.twin, c.nudged_twin)
    first, median = max(found[:NUM_FIRST_STEPS]), statistics.median(found)
    figures = f"{first:.1e} | {median:.1e} | {max(found):.1e} | {max(control):.1e}"
    aucs = f"{c.hashed.auc:.5f} | {c.twin.auc:.5f} | {c.auc_difference():.1e}"
    return f"| {c.seed} | {len(found)} | {figures} | {aucs} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--movielens", type=Path, required=True, help="folder of the data")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=Path("build/movielens_twin.json"))
    args = parser.parse_args()
    warnings.filterwarnings("ignore", module="torch")
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo")
    host = ShardingEnv(world_size=1, rank=0, pg=dist.new_group(backend="gloo"))
    rank = Rank(host=host)
    comparisons = []
    for seed in args.seeds:
        data = read_movielens(args.movielens, seed=seed)
        comparisons.append(compare(data, seed, rank))
    print(table_of(comparisons))
    write(args.output, comparisons)
    dist.destroy_process_group()
    return int(not all(c.agrees() for c in comparisons))


def write(path: Path, comparisons: list[Comparison]) -> None:
    names = ("recsdk-core", "recsdk-sharding", "recsdk-pipeline", "torch", "torchrec")
    found = {
        "versions": {name: version(name) for name in names},
        "recipe": asdict(RECIPE),
        "comparisons": [asdict(comparison) for comparison in comparisons],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=2) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    sys.exit(main())
