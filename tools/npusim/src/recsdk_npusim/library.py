"""The compiled part."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

__all__ = ["load", "operators"]

operators: Any = torch.ops.npusim
"""Its operators."""


def load() -> None:
    """Loads it into this process."""
    found = importlib.util.find_spec("recsdk_npusim")
    assert found is not None
    folders = found.submodule_search_locations or []
    for folder in folders:
        path = Path(folder) / "npusim.so"
        if path.exists():
            torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
            return
    raise ImportError(f"npusim.so is in none of {list(folders)}; install recsdk-npusim again")
