"""Batches of IdBags: arrays, which stay on the host, and of which the model makes tensors.

test_pipeline_on_ranks.py shows how they ended. Shape letters: B samples, F features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from pipeline_support.model import (
    DEVICE,
    SmallModel,
    World,
    assert_equal,
    batches,
    content,
    hash_tables,
    plain_evaluation,
    plain_step,
    rest_of,
    spread,
)
from recsdk_pipeline import HybridEvalPipeline, HybridTrainPipelineSparseDist
from recsdk_pipeline.data import ClickBatch, IdBags

Move = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class RawBatch(Pipelineable):
    """A batch whose bags no device has."""

    bags: dict[str, IdBags]
    dense: torch.Tensor
    labels: torch.Tensor

    @classmethod
    def of(cls, batch: ClickBatch) -> RawBatch:
        names, ids = batch.sparse.keys(), batch.sparse.values().numpy()
        lengths_FB = batch.sparse.lengths().numpy().reshape(len(names), -1)
        parts = np.split(ids, lengths_FB.sum(axis=1).cumsum()[:-1])
        triples = zip(names, parts, lengths_FB, strict=True)
        bags = {name: IdBags.of_lengths(part, lengths) for name, part, lengths in triples}
        return cls(bags, batch.dense, batch.labels)

    @property
    def sparse(self) -> KeyedJaggedTensor:
        """Made each time, of which no pipeline knows ahead."""
        values, lengths = (
            torch.cat([torch.from_numpy(getattr(each, name)) for each in self.bags.values()])
            for name in ("values", "lengths")
        )
        return KeyedJaggedTensor(list(self.bags), values, lengths=lengths)

    def to(self, device: torch.device, non_blocking: bool = False) -> RawBatch:
        return self._moved(lambda own: own.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> RawBatch:
        return self._moved(torch.Tensor.pin_memory)

    def record_stream(self, stream: Any) -> None:
        self.dense.record_stream(stream)
        self.labels.record_stream(stream)

    def _moved(self, move: Move) -> RawBatch:
        return RawBatch(self.bags, move(self.dense), move(self.labels))


class _Traceable(SmallModel):
    """The same model for torchrec's pipelines."""

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        sparse = batch.sparse
        pooled = [tables(sparse).values() for tables in self.tables.values()]
        logits = self.layers(torch.cat([*pooled, batch.dense], dim=1)).squeeze(1)
        return _loss_of(logits, batch.labels), logits.detach()


@torch.fx.wrap
def _loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    total = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
    return total / max(len(labels), 1)


def _made(world: World) -> tuple[Any, Any]:
    return spread(_Traceable(tables=hash_tables()), world)


def raw_batches(world: World, count: int) -> list[RawBatch]:
    found = [RawBatch.of(batch) for batch in batches(world, count)]
    return found if DEVICE.type == "cpu" else [batch.pin_memory() for batch in found]


def case_raw_bags_train_as_in_the_plain_loop(world: World) -> None:
    model, optimizer = _made(world)
    train = raw_batches(world, 7)
    expected = [plain_step(model, optimizer, batch) for batch in train]
    evaluated = plain_evaluation(model, train)
    for kind, options in (
        (HybridTrainPipelineSparseDist, {"pipe_n_batch": 1}),
        (HybridTrainPipelineSparseDist, {"pipe_n_batch": 6}),
        (TrainPipelineBase, {}),
        (TrainPipelineSparseDist, {"execute_all_batches": True}),
    ):
        other, other_optimizer = _made(world)
        pipeline: Any = kind(other, other_optimizer, DEVICE, **options)
        assert_equal(rest_of(pipeline, iter(train)), expected)
        assert_equal(content(other), content(model))
    for depth in (1, 4):
        pipeline = HybridEvalPipeline(model.eval(), DEVICE, pipe_n_batch=depth)
        assert_equal(rest_of(pipeline, iter(train)), evaluated)


class _Handing(SmallModel):
    """Hands its tables bags as they are."""

    def sparse_of(self, batch: Any) -> Any:
        return batch.bags["user"]


def case_tables_refuse_raw_bags_by_name(world: World) -> None:
    for depth in (1, 6):
        model, optimizer = spread(_Handing(tables=hash_tables()), world)
        pipeline = HybridTrainPipelineSparseDist(model, optimizer, DEVICE, pipe_n_batch=depth)
        for is_trained in (True, False):
            model.train(is_trained)
            with pytest.raises(TypeError, match="must be a KeyedJaggedTensor, got IdBags"):
                pipeline.progress(iter(raw_batches(world, 3)))


def case_bags_alone_are_no_batch(world: World) -> None:
    model, optimizer = _made(world)
    bags: Any = IdBags.of_lists([[1], []])
    with pytest.raises(TypeError, match="must yield batches with a method to.*, got IdBags"):
        HybridTrainPipelineSparseDist(model, optimizer, DEVICE).progress(iter([bags]))
