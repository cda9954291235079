"""The ways of a key and of a bag in docs/design/architecture.md name files that are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "design" / "architecture.md"
ROOMS = (
    ROOT / "cpp" / "src",
    ROOT / "packages" / "recsdk-core" / "src",
    ROOT / "packages" / "recsdk-core" / "src" / "recsdk_core",
    ROOT / "packages" / "recsdk-core" / "src" / "bind",
    ROOT / "packages" / "recsdk-sharding" / "src" / "recsdk_sharding",
)


def test_the_ways_name_files_that_are_there() -> None:
    blocks = re.findall(r"```text\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        names = set(re.findall(r"[\w/]+\.(?:py|cc|h|inc)\b", block))
        assert len(names) > 10
        missing = [name for name in names if not any((room / name).exists() for room in ROOMS)]
        assert not missing
