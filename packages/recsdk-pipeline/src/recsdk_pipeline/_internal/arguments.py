"""Checks of a pipeline's arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["check_parts"]


def check_parts(model: Any, optimizer: Any, device: Any) -> torch.device:
    """Return the device; raise TypeError or ValueError for a wrong model, optimizer or device."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    methods = [getattr(optimizer, name, None) for name in ("zero_grad", "step")]
    if isinstance(optimizer, type) or not all(map(callable, methods)):
        raise TypeError(
            "optimizer must be a torch.optim.Optimizer, such as torchrec's CombinedOptimizer, got "
            f"{type(optimizer).__name__}"
        )
    if not isinstance(device, (torch.device, str)):
        raise TypeError(f"device must be a torch.device, got {device!r}; pass torch.device(...)")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be a torch.device, got {device!r}: {error}") from error
