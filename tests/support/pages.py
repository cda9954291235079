"""The code in pages of documentation."""

from __future__ import annotations

from pathlib import Path

__all__ = ["python_of"]


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
