"""Operators that fail."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Failing(TorchDispatchMode):
    """Raises in place of the operators with these numbers; counts what is called."""

    def __init__(self, numbers: Container[int] = ()) -> None:
        super().__init__()
        self.numbers = numbers
        self.names: list[str] = []
        self.num_failed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "profiler":  # marks, no work
            return func(*args, **(kwargs or {}))
        self.names.append(func.overloadpacket.__name__)
        if len(self.names) - 1 in self.numbers:
            self.num_failed += 1
            raise torch.OutOfMemoryError("no memory today")
        return func(*args, **(kwargs or {}))
