"""Which rooms of the engine may include which: an arrow may only point to a room further down.

python3 tools/check_cpp_layers.py      exits with 1 and names each finding, path: what
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

CPP = Path(__file__).resolve().parent.parent / "cpp"

# Each room with those that it may include, beside itself and the public headers. What a room may
# include, those above it may too only if they name it: so the list is the drawing of the layers.
MAY_INCLUDE: dict[str, set[str]] = {
    "util": set(),
    "io": {"util"},
    "keymap": {"util"},
    "kernels": {"util"},
    "bags": {"util", "kernels"},
    "rows": {"util", "kernels"},
    "admission": {"util", "keymap", "kernels"},
    "eviction": {"util", "keymap", "kernels", "rows"},
    "index": {"util", "keymap", "kernels", "rows", "admission", "eviction"},
    "cut": {"util", "index", "bags", "rows"},
    "table": {"util", "index", "kernels", "bags", "rows", "cut"},
    "backends": {"backends/cpu", "backends/npu"},
    "backends/cpu": {"backends"},
    "backends/npu": {"backends"},
    "device": {"util", "index", "kernels", "bags", "backends"},
    "checkpoint": {"util", "io", "keymap", "kernels", "rows", "table"},
    "c_api": {"util"},
    "serving": {"util", "io", "kernels"},
    "freeze": {"util", "io", "kernels", "serving"},
}
PUBLIC = "include"
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


def room_of(path: Path) -> str:
    """The room of a file, a path below `cpp/`."""
    first, *rest = path.parts
    if first == "src":
        return rest[0]
    if first == "backends" and len(rest) > 1:
        return f"backends/{rest[0]}"
    return first


def included(file: Path, name: str, cpp: Path) -> Path | None:
    """The file that an include means, below `cpp/`; None if it is not of this library."""
    for folder in (cpp / "src", cpp / "include", cpp, file.parent):
        path = (folder / name).resolve()
        if path.is_file() and path.is_relative_to(cpp):
            return path.relative_to(cpp)
    return None


def findings(cpp: Path = CPP) -> Iterator[str]:
    """What is wrong, a line each."""
    for folder in ("src", "include", "backends"):
        for file in sorted((cpp / folder).rglob("*")):
            if file.suffix in (".h", ".cc", ".inc"):
                yield from findings_of_file(file, cpp)


def findings_of_file(file: Path, cpp: Path) -> Iterator[str]:
    name = file.relative_to(cpp)
    room = room_of(name)
    if room != PUBLIC and room not in MAY_INCLUDE:
        yield f"cpp/{name}: {room!r} is no room that is known; add it to MAY_INCLUDE"
        return
    allowed = {room, PUBLIC, *MAY_INCLUDE.get(room, set())}
    for target in INCLUDE.findall(file.read_text()):
        path = included(file, target, cpp)
        if path is not None and room_of(path) not in allowed:
            yield f"cpp/{name}: includes {target}; {room} may not know {room_of(path)}"


def main() -> int:
    found = list(findings())
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
