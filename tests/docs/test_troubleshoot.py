"""Messages that docs/howto/troubleshoot.md quotes are those that the sources say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/howto/troubleshoot.md"
OF_OTHERS = {"undefined symbol"}
JOIN = re.compile(r'"\s*\n\s*f?"|" \+\n?\s*"')
"""Between two pieces of one text, in Python or C++."""


def said() -> str:
    sources = [
        *(ROOT / "packages").glob("*/src/**/*.py"),
        *(ROOT / "packages").glob("*/src/**/*.cc"),
        *(ROOT / "cpp/src").rglob("*.cc"),
    ]
    return "\n".join(JOIN.sub("", source.read_text()) for source in sources)


def quoted() -> list[str]:
    """The messages in the first columns; names, which have no space, are not among them."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    found = [code for row in rows for code in re.findall(r"`([^`]+)`", row.split(" | ")[0])]
    return [code for code in found if " " in code and code not in OF_OTHERS]


@pytest.fixture(scope="module")
def all_said() -> str:
    return said()


@pytest.mark.parametrize("message", quoted())
def test_a_quoted_message_is_said(message: str, all_said: str) -> None:
    assert message in all_said
