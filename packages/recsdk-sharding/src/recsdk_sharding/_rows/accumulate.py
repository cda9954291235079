"""Optimizers that add up the gradients of several backwards and apply them as one update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from recsdk_sharding._configs.checking import check_switch, int_of

__all__ = [
    "ACCUMULATION_ARGUMENTS",
    "TORCH_CLASSES",
    "AccumulateAdagrad",
    "AccumulateAdam",
    "AccumulateSGD",
    "accumulate_steps_of_parameter",
]

ACCUMULATION_ARGUMENTS = ("use_accumulate", "accumulate_step")
"""Arguments of the classes below that torch's lack."""


class _Accumulating(Optimizer):
    """Checks the two arguments; the others go to the torch class."""

    def __init__(
        self,
        params: Any,
        *args: Any,
        use_accumulate: bool = False,
        accumulate_step: int = 1,
        **kwargs: Any,
    ) -> None:
        _steps(use_accumulate, accumulate_step)
        super().__init__(params, *args, **kwargs)


class AccumulateSGD(_Accumulating, torch.optim.SGD):
    """torch.optim.SGD for `apply_optimizer_in_backward`, with gradient accumulation.

    With `use_accumulate`, a hash table adds up the gradients of `accumulate_step` backwards (at
    least 1, else ValueError) and applies them as one update. Its own `step` accumulates nothing.
    For other optimizers there is `HashEmbeddingBagConfig.accumulate_steps`.
    """


class AccumulateAdagrad(_Accumulating, torch.optim.Adagrad):
    """torch.optim.Adagrad with gradient accumulation, as `AccumulateSGD`."""


class AccumulateAdam(_Accumulating, torch.optim.Adam):
    """torch.optim.Adam with gradient accumulation, as `AccumulateSGD`."""


TORCH_CLASSES: Mapping[type, type] = {
    AccumulateSGD: torch.optim.SGD,
    AccumulateAdagrad: torch.optim.Adagrad,
    AccumulateAdam: torch.optim.Adam,
}
"""The torch class that each of them is."""


def _steps(use_accumulate: bool = False, accumulate_step: int = 1) -> int:
    check_switch("use_accumulate", use_accumulate)
    steps = int_of("accumulate_step", accumulate_step)
    if steps < 1:
        raise ValueError(f"accumulate_step must be at least 1, got {steps}")
    return steps if use_accumulate else 1


def accumulate_steps_of_parameter(parameter: nn.Parameter) -> int:
    """Backwards that make one update, by the optimizer applied to a parameter; 1 by default."""
    classes: list[type] = getattr(parameter, "_optimizer_classes", [])
    if not classes or classes[0] not in TORCH_CLASSES:
        return 1
    given: dict[str, Any] = parameter._optimizer_kwargs[0]  # type: ignore[attr-defined]
    return _steps(**{name: given[name] for name in ACCUMULATION_ARGUMENTS if name in given})
