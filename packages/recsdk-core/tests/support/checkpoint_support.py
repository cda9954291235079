"""Checkpoints for tests of manifests and stores: made without an engine's table.

A file of rows is any bytes here; what is in one is tested elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from recsdk_core.checkpoint._fields import canonical_json
from recsdk_core.checkpoint.manifest import (
    ChainLink,
    Described,
    Field,
    Manifest,
    RowsEntry,
    Sharding,
    TableEntry,
    UserEntry,
    path_of_rows,
    path_of_user_file,
)
from recsdk_core.checkpoint.participants import OneRank
from recsdk_core.checkpoint.reading import Position
from recsdk_core.checkpoint.saving import SaveOptions, ShardFile, save_shards
from recsdk_core.checkpoint.stores import Store, open_store

TOKEN = "0123456789abcdef0123456789abcdef"


def table_entry(name: str = "user", world_size: int = 0, **changes: Any) -> TableEntry:
    """A table's entry with files that do not exist."""
    files = [
        RowsEntry(
            path=path_of_rows(TOKEN, 0, rank),
            num_bytes=1000 + rank,
            checksum=f"{rank:032x}",
            num_rows=10,
            num_erased=0,
        )
        for rank in range(world_size)
    ]
    arguments: dict[str, Any] = {
        "name": name,
        "dim": 4,
        "seed": 2**64 - 1,
        "initializer": Described(kind="Uniform", arguments={"low": -0.5, "high": 0.5}),
        "default_value": 0.0,
        "optimizer": Described(kind="Adagrad", arguments={"lr": 0.1, "eps": 1e-10}),
        "update_count": 7,
        "log_decay": 0.0,
        "fields": (
            Field(name="weight", dtype="float32", width=4),
            Field(name="sum", dtype="float32", width=4),
        ),
        "sharding": Sharding(),
        "files": tuple(files),
    }
    return TableEntry(**{**arguments, **changes})


def manifest(world_size: int = 2, **changes: Any) -> Manifest:
    """A delta's manifest that uses every field."""
    user_file = UserEntry(
        path=path_of_user_file(TOKEN, 0), num_bytes=3, checksum="a" * 64, kind="bytes"
    )
    arguments: dict[str, Any] = {
        "token": TOKEN,
        "chain": ChainLink(parent="b" * 64, base="c" * 64, sequence=3),
        "world_size": world_size,
        "step": 12,
        "tables": (table_entry(world_size=world_size),),
        "user_state": {"epoch": 1, "blob": {"$file": 0}, "list": [None, True, 1.5, "x\u00e9"]},
        "user_files": (user_file,),
        "writer": "tests 1",
    }
    return Manifest(**{**arguments, **changes})


def sealed(value: dict[str, Any]) -> bytes:
    """A manifest of any JSON object, with a right SHA-256."""
    digest = hashlib.sha256(canonical_json({**value, "sha256": "0" * 64})).hexdigest()
    return canonical_json({**value, "sha256": digest})


def save(path: Any, content: bytes = b"rows", **options: Any) -> Position:
    """Saves one table whose file of rows is `content`."""
    shard = ShardFile(
        entry=table_entry(), write=_writer(content), position=options.pop("after", None)
    )
    return save_shards(open_store(path), OneRank(), [shard], SaveOptions(**options))


def _writer(content: bytes) -> Any:
    def write(target: Any, token: bytes, codec: str, progress: Any) -> Any:
        view = memoryview(content)
        for part in (view[:2], view[2:]):
            target.write_all(part)
        return SimpleNamespace(
            num_bytes=len(content),
            checksum="0" * 32,
            num_rows=0,
            num_erased=0,
            num_evicted=0,
            num_expired=0,
        )

    return write


def content_of(path: Any) -> bytes:
    """The one file of rows of a checkpoint; raises CheckpointError if there is none."""
    store: Store = open_store(path)
    found = Manifest.from_bytes(store.read_manifest(), store.location)
    with store.open(found.tables[0].files[0].path) as source:
        return source.read_all()


@contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    """Asserts that no name in a folder has come or gone meanwhile."""
    before = sorted(folder.rglob("*"))
    yield
    assert sorted(folder.rglob("*")) == before
