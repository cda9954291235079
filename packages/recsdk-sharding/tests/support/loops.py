"""Ways to train a model on batches: the plain loop, by hand in another order, and by pipelines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torchrec.distributed.train_pipeline.pipeline_stage import PipelineStage, SparseDataDistUtil
from torchrec.distributed.train_pipeline.train_pipelines import (
    PrefetchTrainPipelineSparseDist,
    StagedTrainPipeline,
    TrainPipelineBase,
    TrainPipelineFusedSparseDist,
    TrainPipelineSemiSync,
    TrainPipelineSparseDist,
)
from worlds import Batch, unwrapped

Loop = Callable[[Any, Any, list[Batch]], Iterator[torch.Tensor]]
"""Takes the model, the optimizer and batches on the host; gives the outputs."""


def plain(model: Any, optimizer: Any, batches: list[Batch]) -> Iterator[torch.Tensor]:
    """Step by step."""
    for batch in batches:
        optimizer.zero_grad()
        loss, out = model(batch.to(model.device))
        loss.backward()
        optimizer.step()
        yield out


def compiled(model: Any, optimizer: Any, batches: list[Batch]) -> Iterator[torch.Tensor]:
    """Step by step; forward and backward are compiled, and a compiler must leave tables alone."""

    @torch.compile(backend="eager")
    def step(batch: Batch) -> torch.Tensor:
        loss, out = model(batch)
        loss.backward()
        return out

    for batch in batches:
        optimizer.zero_grad()
        out = step(batch.to(model.device))
        optimizer.step()
        yield out


def looked_up_early(first: int) -> Loop:
    """From step `first` on the next batch is looked up before this one's backward."""

    def run(model: Any, optimizer: Any, batches: list[Batch]) -> Iterator[torch.Tensor]:
        ebc = unwrapped(model).ebc
        look_up = ebc.forward
        ahead = None
        for step, batch in enumerate(batches):
            pooled = look_up(batch.to(model.device).sparse).wait() if ahead is None else ahead
            ebc.forward = lambda _, pooled=pooled: pooled
            optimizer.zero_grad()
            loss, out = model(batch.to(model.device))
            ahead = None
            if first <= step < len(batches) - 1:
                ahead = look_up(batches[step + 1].to(model.device).sparse).wait()
            loss.backward()
            optimizer.step()
            yield out
        del ebc.forward

    return run


def _by_pipeline(kind: type, **options: Any) -> Loop:
    def run(model: Any, optimizer: Any, batches: list[Batch]) -> Iterator[torch.Tensor]:
        pipeline = kind(model, optimizer, model.device, **options)
        iterator = iter(_pinned(model, batches))
        for _ in batches:
            yield pipeline.progress(iterator)
        if hasattr(pipeline, "detach"):
            pipeline.detach()

    return run


def _attached_anew(kind: type, **options: Any) -> Loop:
    """The model is taken out of the pipeline between steps, evaluated, and put back."""

    def run(model: Any, optimizer: Any, batches: list[Batch]) -> Iterator[torch.Tensor]:
        pipeline = kind(model, optimizer, model.device, **options)
        iterator = iter(_pinned(model, batches))
        for step, _ in enumerate(batches):
            yield pipeline.progress(iterator)
            if step % 2:
                pipeline.detach()
                with torch.no_grad():
                    model.eval()(batches[0].to(model.device))
                model.train()
            if step % 4 == 1:  # else the pipeline does so by itself
                pipeline.attach(model)
        pipeline.detach()

    return run


def _by_stages(more: str | None = None) -> Loop:
    """With a stage for what `more` says: prefetch, or embedding_lookup."""

    def run(model: Any, optimizer: Any, batches: list[Batch]) -> Iterator[torch.Tensor]:
        stream = torch.get_device_module(model.device).Stream
        options = {} if more is None else {f"{more}_stream": stream()}
        dist = SparseDataDistUtil(model, data_dist_stream=stream(), **options)
        stages = [
            PipelineStage("copy", lambda b: b.to(model.device, non_blocking=True), stream()),
            dist.start_sparse_data_dist_stage(),
        ]
        if more == "prefetch":
            stages.append(PipelineStage(more, dist.prefetch, options["prefetch_stream"]))
        if more == "embedding_lookup":
            stages.append(dist.start_embedding_lookup_stage())
        pipeline = StagedTrainPipeline(stages)
        iterator = iter(_pinned(model, batches))
        while (batch := pipeline.progress(iterator)) is not None:
            optimizer.zero_grad()
            loss, out = model(batch)
            loss.backward()
            optimizer.step()
            yield out
        dist.detach()

    return run


def _pinned(model: Any, batches: list[Batch]) -> list[Batch]:
    return batches if model.device.type == "cpu" else [batch.pin_memory() for batch in batches]


LOOPS: dict[str, Loop] = {
    "plain": plain,
    "compiled": compiled,
    "looked up early": looked_up_early(0),
    "looked up early from 3": looked_up_early(3),
    "TrainPipelineBase": _by_pipeline(TrainPipelineBase),
    "TrainPipelineSparseDist": _by_pipeline(TrainPipelineSparseDist, execute_all_batches=True),
    "TrainPipelineSparseDist, attached anew": _attached_anew(
        TrainPipelineSparseDist, execute_all_batches=True
    ),
    "TrainPipelineFusedSparseDist": _by_pipeline(TrainPipelineFusedSparseDist),
    "TrainPipelineFusedSparseDist, attached anew": _attached_anew(TrainPipelineFusedSparseDist),
    "TrainPipelineFusedSparseDist, new stream": _by_pipeline(
        TrainPipelineFusedSparseDist, emb_lookup_stream="new"
    ),
    "TrainPipelineSemiSync": _by_pipeline(TrainPipelineSemiSync),
    "TrainPipelineSemiSync, attached anew": _attached_anew(TrainPipelineSemiSync),
    "TrainPipelineSemiSync from 0": _by_pipeline(TrainPipelineSemiSync, start_batch=0),
    "TrainPipelineSemiSync from 3": _by_pipeline(TrainPipelineSemiSync, start_batch=3),
    "PrefetchTrainPipelineSparseDist": _by_pipeline(PrefetchTrainPipelineSparseDist),
    "StagedTrainPipeline": _by_stages(),
    "StagedTrainPipeline, prefetch": _by_stages("prefetch"),
    "StagedTrainPipeline, embedding_lookup": _by_stages("embedding_lookup"),
}
ON_CPU = {
    "TrainPipelineBase": "plain",
    "TrainPipelineSparseDist": "plain",
    "TrainPipelineSparseDist, attached anew": "plain",
    "TrainPipelineFusedSparseDist": "plain",
    "TrainPipelineFusedSparseDist, attached anew": "plain",
    "TrainPipelineSemiSync": "plain",
    "TrainPipelineSemiSync, attached anew": "plain",
    "TrainPipelineSemiSync from 0": "looked up early",
    "TrainPipelineSemiSync from 3": "looked up early from 3",
}
"""Pipelines that run without a device, and what each is equal to."""
STOCK_PIPELINES = {
    **ON_CPU,
    "TrainPipelineFusedSparseDist, new stream": "plain",
    "PrefetchTrainPipelineSparseDist": "plain",
    "StagedTrainPipeline": "plain",
    "StagedTrainPipeline, prefetch": "plain",
    "StagedTrainPipeline, embedding_lookup": "looked up early",
}
"""All of torchrec's pipelines, and what each is equal to."""
