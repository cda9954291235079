"""Which type, or device, torch gives tensors that nobody gives one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["of_type"]


@contextmanager
def of_type(name: str) -> Iterator[None]:
    """Inside, such tensors are of this type: "float32", as before, or another one; or on "meta"."""
    if name == "meta":
        with torch.device(name):
            yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_dtype(before)
