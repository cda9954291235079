"""Training and evaluation of the demo's model on one rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchmetrics.classification import BinaryAUROC

from recsdk_pipeline.data import ClickBatch, ClickData
from recsdk_pipeline.demo.report import Screen, State
from recsdk_pipeline.demo.settings import Recipe
from recsdk_pipeline.demo.spreading import CPU, Rank, num_rows
from recsdk_pipeline.hybrid_pipeline import HybridTrainPipelineSparseDist
from recsdk_pipeline.telemetry.metrics import Report
from recsdk_pipeline.telemetry.telemetry import Telemetry

MODEL = "ids"
BASELINE = "without ids"

_NUM_REPORTS = 15
_NUM_POINTS = 60  # of the curves that are drawn
_EVALUATION_BATCH = 4096
_BATCHES_A_REPORT = 2


class _Timed:
    """Batches, and how long was waited for them."""

    def __init__(self, batches: Iterator[ClickBatch]) -> None:
        self._batches = batches
        self.seconds = 0.0

    def __iter__(self) -> _Timed:
        return self

    def __next__(self) -> ClickBatch:
        start = time.monotonic()
        try:
            return next(self._batches)
        finally:
            self.seconds += time.monotonic() - start


class _Kept:
    """A sink that keeps reports."""

    def __init__(self) -> None:
        self.reports: list[Report] = []

    def open(self, rank: int | None) -> None:
        """Nothing to open."""

    def write(self, report: Report) -> None:
        """Keep a report."""
        self.reports.append(report)

    def close(self) -> None:
        """Nothing to close."""


class Losses:
    """The mean loss of examples; a step may have more on one rank than on another, or none."""

    def __init__(self) -> None:
        self._sums = torch.zeros(2, dtype=torch.float64)
        """Of losses and of examples."""

    def add(self, mean_loss: torch.Tensor, num_examples: int) -> None:
        """Count the examples of a step; without any the loss means nothing."""
        if num_examples:
            self._sums[0] += mean_loss * num_examples
            self._sums[1] += num_examples

    def mean(self) -> float:
        """Over the examples of all ranks, each of which must call."""
        sums = self._sums.clone()
        dist.all_reduce(sums)
        return float(sums[0] / sums[1])


class Training:
    """Trains a model that is spread over all ranks; each rank has one.

    `batches` are those of the first epoch of `data`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        *,
        data: ClickData,
        batches: Iterator[ClickBatch],
        rank: Rank,
        recipe: Recipe,
        num_steps: int,
    ) -> None:
        self._model = model
        self._data, self._batches = data, batches
        self._rank = rank
        self._recipe = recipe
        self._pipeline: HybridTrainPipelineSparseDist[ClickBatch, Any] = (
            HybridTrainPipelineSparseDist(model, optimizer, CPU, return_loss=True)
        )
        self.num_steps = num_steps
        self._seconds = 0.0
        self._waited = 0.0
        self._examples = 0
        self._kept = _Kept()
        self.states: list[State] = []
        """How far it was at each report."""

    @property
    def reports(self) -> list[Report]:
        """What was told of all ranks; on the first rank only."""
        return self._kept.reports

    @property
    def steps(self) -> int:
        """Batches trained."""
        return self._pipeline.num_batches_trained

    @property
    def examples_per_second(self) -> float:
        """Over all ranks, while training."""
        return self._examples / max(self._seconds, 1e-9)

    def stall_share(self) -> float:
        """Part of the training that went into waiting for data, mean over ranks; all must call."""
        share = torch.tensor(self._waited / max(self._seconds, 1e-9))
        dist.all_reduce(share)
        return float(share) / self._rank.share.world_size

    def run(self, screen: Screen) -> None:
        """Train all epochs, evaluating on a part of the held-out examples now and then."""
        every = max(1, self.num_steps // _NUM_REPORTS)
        losses = Losses()
        with Telemetry(
            self._model,
            self._pipeline,
            every=max(1, self.num_steps // _NUM_POINTS),
            to=[self._kept],
            predictions=lambda output: (output[0][MODEL], output[1]),
        ):
            for loss, num_examples in self._losses():
                losses.add(loss, num_examples)
                screen.advance(self.steps)
                if self.steps % every == 0:
                    self.states.append(self._state(losses))
                    screen.show(self.states[-1])
                    losses = Losses()

    def evaluate(self, num_batches: int | None = None) -> dict[str, float | None]:
        """Return the AUC of each model on the first held-out batches, or on all.

        None where it is undefined: all labels are equal.
        """
        self._model.eval()
        batches = self._data.held_out(batch_size=_EVALUATION_BATCH, share=self._rank.share)
        metrics: dict[str, BinaryAUROC] = {}
        counts = torch.zeros(2, dtype=torch.int64)  # of each label
        for (probabilities, labels), _ in self._steps(islice(batches, num_batches)):
            counts += torch.bincount(labels.long(), minlength=2)
            for name, values in probabilities.items():
                metrics.setdefault(name, BinaryAUROC()).update(values.cpu(), labels.cpu().int())
        self._model.train()
        dist.all_reduce(counts)
        is_defined = bool(counts.min() > 0)
        aucs = {name: float(metric.compute()) for name, metric in metrics.items()}
        return {name: auc if is_defined else None for name, auc in aucs.items()}

    def rows(self) -> dict[str, int]:
        """Return the rows of each table over all ranks."""
        return num_rows(self._model)

    def _losses(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Train, yielding the mean loss and the number of this rank's examples of each step."""
        size, share = self._recipe.batch_size, self._rank.share
        for epoch in range(self._recipe.epochs):
            if epoch:
                self._batches = self._data.train(epoch=epoch, batch_size=size, share=share)
            batches = _Timed(self._batches)
            start = time.monotonic()
            for step, ((_, labels), losses) in enumerate(self._steps(batches)):
                self._seconds += time.monotonic() - start
                self._waited, batches.seconds = self._waited + batches.seconds, 0.0
                self._examples += max(0, min(size, self._data.num_train - step * size))
                yield losses[0].detach(), len(labels)
                start = time.monotonic()

    def _steps(self, batches: Iterator[ClickBatch]) -> Iterator[Any]:
        while True:
            try:
                step = self._pipeline.progress(batches)
            except StopIteration:
                return
            yield step

    def _state(self, losses: Losses) -> State:
        return State(
            steps=self.steps,
            loss=losses.mean(),
            auc=self.evaluate(_BATCHES_A_REPORT)[MODEL],
            examples_per_second=self.examples_per_second,
            rows=self.rows(),
        )
