"""docs/design/architecture.md names files that are there, and draws the arrows between rooms."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import check_cpp_layers

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "design" / "architecture.md"
SHARDING = ROOT / "packages" / "recsdk-sharding" / "src" / "recsdk_sharding"
ROOMS = (
    ROOT / "cpp" / "src",
    ROOT / "packages" / "recsdk-core" / "src",
    ROOT / "packages" / "recsdk-core" / "src" / "recsdk_core",
    ROOT / "packages" / "recsdk-core" / "src" / "bind",
    SHARDING,
)
BLOCKS = re.findall(r"```text\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def drawn(block: str) -> dict[str, set[str]]:
    """The arrows of a drawing, by the room that they leave."""
    lines = (re.split(r" {2,}", line) for line in block.splitlines())
    return {line[1]: set(line[2].split()) for line in lines if len(line) == 3}


def drawing_of(room: str) -> dict[str, set[str]]:
    """The arrows of the drawing that has this room."""
    [found] = [block for block in BLOCKS if re.search(rf"^\d  {room}\b", block, re.MULTILINE)]
    return drawn(found)


def rooms_imported(file: Path) -> Iterator[str]:
    """What a module of recsdk_sharding imports when it runs."""
    nodes: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        nodes.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            package, *rest = node.module.split(".")
            if package == "recsdk_sharding" and rest:
                yield rest[0]


def test_the_ways_name_files_that_are_there() -> None:
    ways = [block for block in BLOCKS if ".cc" in block or ".py" in block]
    assert len(ways) == 2
    for block in ways:
        names = set(re.findall(r"[\w/]+\.(?:py|cc|h|inc)\b", block))
        assert len(names) > 10
        missing = [name for name in names if not any((room / name).exists() for room in ROOMS)]
        assert not missing


def test_the_engine_is_drawn_as_it_may_include() -> None:
    uses = {
        room: uses - {"util"}
        for room, uses in check_cpp_layers.MAY_INCLUDE.items()
        if not room.startswith("backends")
    }
    assert drawing_of("checkpoint") == {room: uses for room, uses in uses.items() if uses}


def test_sharding_is_drawn_as_it_imports() -> None:
    rooms = [path for path in SHARDING.iterdir() if (path / "__init__.py").is_file()]
    uses = {
        room.name: {each for file in room.rglob("*.py") for each in rooms_imported(file)}
        - {room.name}
        for room in rooms
    }
    assert drawing_of("planning") == {room: uses for room, uses in uses.items() if uses}
