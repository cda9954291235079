"""Compacting and resharding keep what belongs to a file: states of policies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_support import table_entry

from recsdk_core import CheckpointError, _ext
from recsdk_core.checkpoint import Position, compact, open_checkpoint, reshard
from recsdk_core.checkpoint.owners import Owner
from recsdk_core.checkpoint.ranks import OneRank
from recsdk_core.checkpoint.saving import Part, SaveOptions, save_parts
from recsdk_core.checkpoint.stores import open_store

KEYS = np.arange(100, dtype=np.int64)
Policies = dict[str, bytes]


def save(path: Path, of_files: list[Policies], after: Position | None = None) -> Position:
    """A table with states of policies in each of its files."""
    entry = table_entry(log_decay=0.0)
    parts = []
    for index, policies in enumerate(of_files):
        owner = Owner(index, len(of_files), entry.sharding)

        def write(
            target: Any, token: bytes, codec: Any, progress: Any, o: Owner = owner,
            policies: Policies = policies,
        ) -> Any:  # fmt: skip
            keys = KEYS[o.owns(KEYS)]
            values = np.ones((len(keys), 4), np.float32)
            return _ext.write_row_file(
                target.write,
                kind="snapshot" if after is None else "delta",
                dim=4,
                fields=[("weight", "float32", 4), ("sum", "float32", 4)],
                blocks=[
                    _ext.RowBlock.rows(keys, {"weight": values, "sum": values}),
                    *(_ext.RowBlock.policy(name, data) for name, data in policies.items()),
                ],
                token=token,
                block_bytes=4096,
            )

        part = Part(entry=entry, write=write, index=index, num_parts=len(of_files), position=after)
        parts.append(part)
    options = SaveOptions(is_delta=after is not None, world_size=len(of_files))
    return save_parts(open_store(path), OneRank(), parts, options)


def policies_of(path: Path) -> list[Policies]:
    """Of each file."""
    found = open_checkpoint(path)
    of_files = []
    for index in range(len(found.manifest.tables[0].files)):
        policies: Policies = {}
        with found.rows_file(0, index) as file:
            while (block := file.next_block()) is not None:
                if block.kind == "policy":
                    policies[block.name] = policies.get(block.name, b"") + block.data
        of_files.append(policies)
    return of_files


def test_states_of_policies_are_kept(tmp_path: Path) -> None:
    first = save(tmp_path / "0", [{"lfu": b"old"}, {"lfu": b"old"}])
    states: list[Policies] = [{"lfu": b"x" * 10_000, "lru": b""}, {"lru": b"y"}]
    save(tmp_path / "1", states, first)
    compact(tmp_path / "1", tmp_path / "whole")
    assert policies_of(tmp_path / "whole") == states
    reshard(tmp_path / "1", tmp_path / "same", world_size=2)
    assert policies_of(tmp_path / "same") == states
    for options in ({"world_size": 1}, {"world_size": 2, "rule": "modulo"}):
        with pytest.raises(CheckpointError, match=r"states of policies \(\['lfu', 'lru'\]\)"):
            reshard(tmp_path / "1", tmp_path / "other", **options)
        assert not (tmp_path / "other").exists()
