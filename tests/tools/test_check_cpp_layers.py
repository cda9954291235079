from __future__ import annotations

from pathlib import Path

import check_cpp_layers


def test_the_tree_has_no_finding() -> None:
    assert list(check_cpp_layers.findings()) == []


def test_the_layers_have_no_cycle() -> None:
    rooms = check_cpp_layers.MAY_INCLUDE
    of_backends = {room for room in rooms if room.startswith("backends")}
    left = {room: uses - {room} for room, uses in rooms.items() if room not in of_backends}
    left = {room: uses - of_backends for room, uses in left.items()}
    while left:
        free = {room for room, uses in left.items() if not uses & set(left)}
        assert free, f"these know each other: {sorted(left)}"
        left = {room: uses for room, uses in left.items() if room not in free}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_an_arrow_that_points_up_is_found(tmp_path: Path) -> None:
    cpp = tmp_path / "cpp"
    write(cpp / "src/table/table.h", '#include "util/hash.h"\n#include "recsdk/types.h"\n')
    write(cpp / "src/util/hash.h", '#include <vector>\n#include "table/table.h"\n')
    write(cpp / "include/recsdk/types.h", '#include "../../src/util/hash.h"\n')
    write(cpp / "src/attic/old.cc", "")
    found = "\n".join(check_cpp_layers.findings(cpp))
    assert "cpp/src/util/hash.h: includes table/table.h; util may not know table" in found
    assert "cpp/include/recsdk/types.h: includes ../../src/util/hash.h" in found
    assert "cpp/src/attic/old.cc: 'attic' is no room that is known" in found
    assert found.count("\n") == 2
