"""Chains of saves in a folder: which are removed, and what rows add up to."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

from recsdk_core.checkpoint import open_checkpoint


def saves_in(run: Path) -> list[Path]:
    """The complete ones of `step_<number>`, in their order."""
    found = [manifest.parent for manifest in run.glob("step_*/manifest.json")]
    return sorted(found, key=lambda place: int(place.name.removeprefix("step_")))


def remove_old(run: Path, num_chains: int) -> None:
    """Leaves the latest chains, at least one, as docs/howto/operate.md says."""
    saves = saves_in(run)
    starts = [number for number, save in enumerate(saves) if open_checkpoint(save).is_snapshot]
    old = saves[: starts[-num_chains]] if len(starts) > num_chains else []
    for save in reversed(old):
        (save / "manifest.json").unlink()
        shutil.rmtree(save)


def sum_of_rows(table: Any) -> int:
    """What the rows that readers see add up to, in any order."""
    total = 0
    for batch in table.export():
        arrays = [batch.weights, *(batch.state[name] for name in sorted(batch.state))]
        for number, key in enumerate(batch.keys.tolist()):
            raw = b"".join(each[number].tobytes() for each in arrays)
            digest = hashlib.sha256(raw + key.to_bytes(8, "little", signed=True)).digest()
            total += int.from_bytes(digest[:7], "little")
    return total % 2**61
