from __future__ import annotations

from pathlib import Path

import clean

MADE = (
    "build/x",
    ".benchmarks/x",
    ".import_linter_cache/x",
    ".venv/bin/x",
    "packages/a/.benchmarks/x",
    "packages/a/src/__pycache__/x",
)
KEPT = ("README.md", "packages/a/src/a.py", "tools/build.py")


def test_what_was_made_goes_and_sources_stay(tmp_path: Path) -> None:
    for name in (*MADE, *KEPT):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    clean.main(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == set(KEPT)
