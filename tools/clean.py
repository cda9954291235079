"""Removes what was made in this folder: build/, dist/, .venv and caches."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MADE = (
    "build",
    "dist",
    ".venv",
    ".benchmarks",
    ".hypothesis",
    ".import_linter_cache",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
)
MADE_ANYWHERE = (
    "__pycache__",
    ".benchmarks",
    ".pytest_cache",
    ".hypothesis",
    "*.egg-info",
    ".import_linter_cache",
)


def main(root: Path = ROOT) -> None:
    folders = [root / name for name in MADE]
    for area in ("packages", "tests", "tools", "packaging"):
        for pattern in MADE_ANYWHERE:
            folders += (root / area).rglob(pattern)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
