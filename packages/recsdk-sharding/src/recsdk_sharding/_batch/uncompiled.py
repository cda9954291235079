"""What torch.compile leaves to Python: looking hash tables up.

The engine, the exchange between ranks and the memory that they share mean nothing to a compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["uncompiled"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def uncompiled(function: _Function) -> _Function:
    """The same function, which a compiled model calls as it is, in a graph break."""
    disable: Any = torch.compiler.disable
    made: _Function = disable(function, reason="hash tables are looked up outside of the graph")
    return made
