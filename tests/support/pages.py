"""The code in pages of documentation, and modules that lie where nothing imports them from."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

__all__ = ["module_at", "python_of"]


def module_at(path: Path) -> ModuleType:
    """The module in a file, run anew, which is in no `sys.modules`."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def python_of(page: Path) -> str:
    """The page's blocks of Python, on the lines where they stand, so that errors name them."""
    is_python = False
    lines = []
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            is_python = line == "```python" and not is_python
            lines.append("")
        else:
            lines.append(line if is_python else "")
    return "\n".join(lines)
