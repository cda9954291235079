"""Cases that run on every rank: what trains beside new rows keeps its random numbers."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from pipeline_support.model import DEVICE, SmallModel, World, batches, hash_tables, rest_of, spread
from recsdk_pipeline import HybridTrainPipelineSparseDist
from recsdk_sharding import HashEmbeddingBagCollection

NUM_STEPS = 8


def of_one_seed(rows: torch.Tensor) -> None:
    torch.manual_seed(rows.shape[1])
    rows.data.copy_(torch.randn(1, rows.shape[1]))


def tables_with(init_fn: Any) -> HashEmbeddingBagCollection:
    configs = hash_tables().embedding_bag_configs()
    for config in configs:
        config.init_fn = init_fn
    return HashEmbeddingBagCollection(configs, device=torch.device("meta"))


class DroppingModel(SmallModel):
    """Notes the mask of each forward."""

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss, _ = super().forward(batch)
        return loss, torch.nn.functional.dropout(torch.ones(32), 0.5, training=True)


def case_function_that_seeds_leaves_dropout_alone(world: World) -> None:
    torch.manual_seed(7)
    expected = [torch.nn.functional.dropout(torch.ones(32), 0.5) for _ in range(NUM_STEPS)]
    assert len({mask.numpy().tobytes() for mask in expected}) == NUM_STEPS
    for depth in (1, 2, 6):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "table .*: init_fn seeds torch itself")
            model, optimizer = spread(DroppingModel(tables=tables_with(of_one_seed)), world)
            pipeline = HybridTrainPipelineSparseDist(model, optimizer, DEVICE, pipe_n_batch=depth)
            torch.manual_seed(7)
            masks = rest_of(pipeline, iter(batches(world, NUM_STEPS)))
        assert all(torch.equal(*pair) for pair in zip(masks, expected, strict=True)), depth
