"""Loss, AUC and calibration of the steps since the last report.

Shape letter: B examples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

__all__ = ["NUM_SUMS", "Figures", "Predictions", "Window"]

Predictions: TypeAlias = Callable[[Any], tuple[torch.Tensor, torch.Tensor]]
"""From a model's output its probabilities (B,) and labels (B,), which nobody changes afterwards."""

_SHIFT = 15  # of a float's 23 bits behind the exponent, 8 are left
_OCTAVES = 30  # powers of 2 to either side; odds beyond them count as 2**-30 or 2**30
_LEAST_ODDS = (127 - _OCTAVES) << 23
_INFINITE = 255 << 23
_NUM_BINS = (2 * _OCTAVES << 23 >> _SHIFT) + 1
_MOST_KEPT = 32_768
_LOSS, _STEPS, _PROBABILITY, _HEAD = 0, 1, 2, 3  # before the counts
NUM_SUMS = _HEAD + 2 * (_NUM_BINS + 1)
"""How many numbers a window adds up."""


class Window:
    """Adds up steps, where the model's output is; nothing waits for a device before `sums`.

    Predictions are counted by ranges of their odds, 256 between any power of 2 and the next, so AUC
    takes those within 0.4 % for equal. They are kept until there are 32,768, and counted at once.
    """

    def __init__(self, predictions: Predictions | None) -> None:
        self._predictions = predictions
        self._losses: list[torch.Tensor] = []
        self._counts: dict[torch.device, _Counts] = {}

    @torch.no_grad()
    def add(self, losses: torch.Tensor, output: Any) -> None:
        """Adds a step. Raises ValueError for predictions of another shape than their labels."""
        self._losses.append(losses.detach())
        if self._predictions is None:
            return
        probabilities_B, labels_B = self._predictions(output)
        if probabilities_B.shape != labels_B.shape:
            raise ValueError(
                f"predictions gave probabilities of shape {tuple(probabilities_B.shape)} and "
                f"labels of shape {tuple(labels_B.shape)}; they must be equal"
            )
        device = probabilities_B.device
        if device not in self._counts:
            self._counts[device] = _Counts(device)
        self._counts[device].add(probabilities_B, labels_B)

    def sums(self) -> torch.Tensor:
        """The sums of the steps, to be added up over ranks: float64, on the cpu."""
        found = torch.zeros(NUM_SUMS, dtype=torch.float64)
        if self._losses:
            found[_LOSS] = sum(float(losses.sum()) for losses in self._losses)
        found[_STEPS] = len(self._losses)
        for counts in self._counts.values():
            counts.count()
            found[_PROBABILITY] += counts.total.cpu()
            found[_HEAD:] += counts.by_bin.cpu()
        return found

    def start_anew(self) -> None:
        """Forgets the steps."""
        self._losses, self._counts = [], {}


class _Counts:
    """Predictions on one device, by range and label."""

    def __init__(self, device: torch.device) -> None:
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._num_kept = 0
        self.by_bin = torch.zeros(2 * (_NUM_BINS + 1), dtype=torch.int64, device=device)
        exact = torch.float32 if device.type in ("npu", "mps") else torch.float64
        self.total = torch.zeros((), dtype=exact, device=device)

    def add(self, probabilities_B: torch.Tensor, labels_B: torch.Tensor) -> None:
        """Keeps predictions, and counts them if they are many."""
        self._kept.append((probabilities_B.detach(), labels_B))
        self._num_kept += labels_B.numel()
        if self._num_kept >= _MOST_KEPT:
            self.count()

    @torch.no_grad()
    def count(self) -> None:
        """Counts what is kept."""
        if not self._kept:
            return
        probabilities_N = torch.cat([each.flatten() for each, _ in self._kept])
        if probabilities_N.dtype != torch.float64:  # whose odds near 1 differ where floats do not
            probabilities_N = probabilities_N.float()
        is_positive_N = torch.cat([each.flatten() for _, each in self._kept]) > 0.5
        self._kept, self._num_kept = [], 0
        # A float's bits order as it does; those of the odds are nearly their logarithm.
        odds_N = (probabilities_N + 0.0).div_(1 - probabilities_N)
        bits_N = odds_N.float().view(torch.int32)
        is_bad_N = (bits_N < 0) | (bits_N > _INFINITE)
        place_N = (bits_N - _LEAST_ODDS >> _SHIFT).clamp_(0, _NUM_BINS - 1)
        place_N = place_N.masked_fill_(is_bad_N, _NUM_BINS).mul_(2).add_(is_positive_N)
        if place_N.device.type == "cpu":
            self.by_bin += torch.bincount(place_N, minlength=len(self.by_bin))
        else:  # where bincount would wait for the device
            self.by_bin.index_add_(0, place_N, torch.ones_like(place_N, dtype=torch.int64))
        self.total += probabilities_N.masked_fill_(is_bad_N, 0).sum(dtype=self.total.dtype)


class Figures:
    """What the sums of a window say; None: nothing, as where all labels are equal."""

    def __init__(self, sums: torch.Tensor) -> None:
        """`sums`: of `Window.take`, of one rank or added up over all."""
        by_bin = sums[_HEAD:].view(-1, 2)
        self.num_bad = int(by_bin[-1].sum())
        """Predictions outside of 0 to 1, or not finite."""
        self.num_examples = int(by_bin.sum())
        """Those with a prediction."""
        negatives, positives = by_bin[:-1].unbind(1)
        num_negatives, num_positives = float(negatives.sum()), float(positives.sum())
        steps = float(sums[_STEPS])
        self.loss = float(sums[_LOSS]) / steps if steps else None
        """Mean over steps and ranks."""
        self.calibration = float(sums[_PROBABILITY]) / num_positives if num_positives else None
        """Sum of predictions over sum of labels."""
        self.auc: float | None = None
        """Part of the pairs of a positive and a negative in which the positive is higher."""
        if num_negatives and num_positives:
            below = negatives.cumsum(0) - negatives / 2
            self.auc = float(positives @ below) / (num_negatives * num_positives)
