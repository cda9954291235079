"""A pipeline that evaluates a model, and does the host work of the next batches meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, Literal, overload

import torch
from torch import nn
from torchrec.streamable import Pipelineable
from typing_extensions import TypeVar

from recsdk_pipeline.hybrid_pipeline import HybridTrainPipelineSparseDist

In = TypeVar("In", bound=Pipelineable, default=Any)
Out = TypeVar("Out", default=Any)
Result = TypeVar("Result", default=Out)


class HybridEvalPipeline(Generic[In, Out, Result]):
    """Evaluates a model on batches, `pipe_n_batch` of them looked ahead, and writes nothing.

    No table gets a row, and no row or count of updates changes: an id without a row reads its
    table's default. The outputs are those of the model in evaluation mode without gradients, bit
    for bit.

    `model` returns `(losses, output)`. It and all its sharded modules must be in evaluation mode:
    the pipeline switches no mode. You may use it between the steps of a training pipeline of the
    same model, whose batches in flight stay as they are. With `return_loss`, `progress` returns
    `(output, losses)`. All ranks must pass the same `pipe_n_batch`, 1 to 12.

    Not thread-safe. Raises ValueError or TypeError for other arguments.
    """

    @overload
    def __init__(
        self: HybridEvalPipeline[In, Out, Out],
        model: nn.Module,
        device: torch.device,
        *,
        return_loss: Literal[False] = False,
        pipe_n_batch: int = 6,
    ) -> None: ...

    @overload
    def __init__(
        self: HybridEvalPipeline[In, Out, tuple[Out, torch.Tensor]],
        model: nn.Module,
        device: torch.device,
        *,
        return_loss: Literal[True],
        pipe_n_batch: int = 6,
    ) -> None: ...

    @overload
    def __init__(
        self: HybridEvalPipeline[In, Out, Out | tuple[Out, torch.Tensor]],
        model: nn.Module,
        device: torch.device,
        *,
        return_loss: bool = False,
        pipe_n_batch: int = 6,
    ) -> None: ...

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        return_loss: bool = False,
        pipe_n_batch: int = 6,
    ) -> None:
        self._model = model
        self._pipeline: HybridTrainPipelineSparseDist[In, Out, Any] = HybridTrainPipelineSparseDist(
            model,
            torch.optim.SGD([torch.zeros(1)]),  # takes no step in evaluation
            device,
            return_loss=return_loss,
            pipe_n_batch=pipe_n_batch,
        )

    def progress(self, dataloader_iter: Iterator[In]) -> Result:
        """Evaluate the next batch of the iterator and return the model's output.

        Raises StopIteration when all ranks have done all batches for which every rank has one,
        RuntimeError if the model or a part of it is in training mode, and else what
        `HybridTrainPipelineSparseDist.progress` raises.
        """
        with self._pipeline._guard():
            self._check_mode()
            result: Result = self._pipeline.progress(dataloader_iter)
            return result

    def drop(self, dataloader_iter: Iterator[In] | None = None) -> None:
        """Abandon the batches in flight of an iterator, or of all iterators."""
        self._pipeline.drop(dataloader_iter)

    def _check_mode(self) -> None:
        training = [name for name, part in self._model.named_modules() if part.training]
        if training:
            raise RuntimeError(
                f"the model is in training mode (module {training[0] or 'itself'!r}), in which "
                "batches would be written to its tables; call model.eval() first"
            )
