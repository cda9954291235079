"""What smaller numbers cost a model: the demo's model, frozen with each type of rows.

One model is trained on tables of float32, then frozen for serving once for each type. The figures
are the AUC on held-out examples, the mean over seeds, and how far rows are from the trained ones.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from benchmarks import records
from benchmarks.models.training import Stream, Vectors, auc, hash_bag, streams, trained
from recsdk_core.nn import HashEmbeddingBag, freeze
from recsdk_core.serving import ServingTable
from recsdk_core.serving.manifest import DTYPES

TRAINED = "as trained"


def figures(stream: Stream, seed: int, folder: Path) -> dict[str, tuple[float, float]]:
    """By type, and as trained: the AUC, and the error of rows over their size."""
    data = stream.data(seed)
    rate = stream.recipe.learning_rate
    bags = {name: hash_bag(name, rate, seed) for name in data.features}
    model = trained(stream, data, Vectors(bags), seed)
    found = {TRAINED: (auc(model, stream, data), 0.0)}
    for dtype in DTYPES:
        place = folder / f"{stream.name}_{seed}_{dtype}"
        frozen = freeze(model, place, dtype=dtype)
        found[dtype] = (auc(frozen, stream, data), error_of_rows(bags, place))
    return found


def error_of_rows(bags: Mapping[str, HashEmbeddingBag], place: Path) -> float:
    """The root of all squared errors over that of all squared numbers."""
    off, size = 0.0, 0.0
    for name, bag in bags.items():
        served = ServingTable(place, name)
        for batch in bag.table.export(state=False):
            off += float(
                np.square(served.lookup(batch.keys) - batch.weights, dtype=np.float64).sum()
            )
            size += float(np.square(batch.weights, dtype=np.float64).sum())
    return float((off / size) ** 0.5)


def run(quick: bool, movielens: str | None = None) -> list[records.Record]:
    made = []
    for stream in streams(quick, movielens):
        with tempfile.TemporaryDirectory() as folder:
            each = [figures(stream, seed, Path(folder)) for seed in ((0,) if quick else (0, 1, 2))]
        aucs, errors = (
            {name: statistics.mean(one[name][i] for one in each) for name in each[0]}
            for i in (0, 1)
        )
        for dtype in DTYPES:
            made.append(
                records.Record(
                    workload=stream.name,
                    op=f"auc_{dtype}",
                    unit="AUC",
                    ours=aucs[dtype],
                    peers={TRAINED: aucs[TRAINED]},
                    ratio={TRAINED: aucs[dtype] / aucs[TRAINED]},
                )
            )
            made.append(
                records.Record(
                    workload=stream.name, op=f"error_{dtype}", unit="of rows", ours=errors[dtype]
                )
            )
    return made
