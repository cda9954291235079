"""What the tests run on every rank; each function returns plain values."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from worlds import (
    Batch,
    Setup,
    dense_of,
    make_batch,
    new_model,
    optimizer_of,
    rows_of,
    shard,
    unwrapped,
)

CPU = torch.device("cpu")


def own_batches(sizes: list[list[int]], weighted: bool, seed: int = 0) -> list[Batch]:
    """This rank's batches: `sizes` has a row for each step with the size on each rank."""
    rank = dist.get_rank()
    return [
        make_batch(seed + 100 * step + rank, row[rank], weighted=weighted)
        for step, row in enumerate(sizes)
    ]


def train(setup: Setup, sizes: list[list[int]], how: str = "plain") -> dict[str, Any]:
    """Trains on this rank's batches; outputs, rows and dense weights."""
    model = shard(new_model(setup, "meta"), setup)
    optimizer = optimizer_of(model, setup.dense_lr)
    batches = own_batches(sizes, setup.weighted)
    outputs = [out.detach().numpy() for out in _LOOPS[how](model, optimizer, batches)]
    return {
        "outputs": outputs,
        "rows": rows_of(unwrapped(model).ebc.tables()),
        "dense": dense_of(model),
        "counts": {k: t.update_count for k, t in unwrapped(model).ebc.tables().items()},
        "has_grad": [n for n, p in model.named_parameters() if "ebc" in n and p.grad is not None],
    }


def _plain(model: Any, optimizer: Any, batches: list[Batch]) -> Any:
    for batch in batches:
        optimizer.zero_grad()
        loss, out = model(batch)
        loss.backward()
        optimizer.step()
        yield out


def _pipeline(kind: type, **options: Any) -> Any:
    def run(model: Any, optimizer: Any, batches: list[Batch]) -> Any:
        pipeline = kind(model, optimizer, CPU, **options)
        iterator = iter(batches)
        for _ in batches:
            yield pipeline.progress(iterator)

    return run


_LOOPS = {
    "plain": _plain,
    "TrainPipelineBase": _pipeline(TrainPipelineBase),
    "TrainPipelineSparseDist": _pipeline(TrainPipelineSparseDist, execute_all_batches=True),
}
