"""What saving and loading take of memory beside the table's own, as the system counts it."""

from __future__ import annotations

import json
from pathlib import Path

import warm_processes

from recsdk_core import _ext

MOST_BYTES = 64 * 2**20

PREAMBLE = """
import json, sys
from pathlib import Path
import numpy as np
from recsdk_core import Table, optim

def memory(name):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)

def own_bytes(table):
    stats = table.stats()
    return stats.row_bytes + stats.index_bytes + stats.metadata_bytes + stats.tracking_bytes

folder, codec = sys.argv[1:]
table = Table(dim=64, name="user", optimizer=optim.RowwiseAdagrad(lr=0.1), num_threads=2)
"""

SAVE = (
    PREAMBLE
    + """
for begin in range(0, 800_000, 50_000):
    table.find_or_insert(np.arange(begin, begin + 50_000) * 7919)
before, own = memory("VmRSS"), own_bytes(table)
table.save(folder, codec=codec)
print(json.dumps([memory("VmHWM") - before - (own_bytes(table) - own), own]))
"""
)

LOAD = (
    PREAMBLE
    + """
before = memory("VmRSS")
table.load(folder)
own = own_bytes(table)
print(json.dumps([memory("VmHWM") - before - own, own]))
"""
)


def extra_bytes(script: str, folder: Path, codec: str) -> int:
    """The most bytes, in a process of its own, above those of the table, which is far larger."""
    program, printed = folder.parent / "program.py", folder.parent / "printed"
    program.write_text(script)
    started = warm_processes.start(program, folder, codec, output=printed)
    assert warm_processes.status_of(started) == 0
    extra, own = json.loads(printed.read_text())
    assert own > 3 * MOST_BYTES
    return int(extra)


def test_saving_and_loading_take_at_most_64_mebibytes(tmp_path: Path) -> None:
    for codec in ("none", "zstd") if _ext.HAS_ZSTD else ("none",):
        folder = tmp_path / codec
        found = {"save": extra_bytes(SAVE, folder, codec), "load": extra_bytes(LOAD, folder, codec)}
        print(codec, {op: f"{n / 2**20:.1f} MiB" for op, n in found.items()})
        assert max(found.values()) <= MOST_BYTES, (codec, found)
