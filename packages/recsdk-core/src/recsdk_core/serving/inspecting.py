"""What `recsdk ckpt inspect` tells of checkpoints, of frozen ones, and of folders of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

from recsdk_core.checkpoint.columns import shared_name, shares_rows
from recsdk_core.checkpoint.manifest import Manifest, TableEntry
from recsdk_core.checkpoint.reading import (
    Checkpoint,
    find_chain,
    open_checkpoint_at,
)
from recsdk_core.checkpoint.stores import Store, is_frozen, open_store
from recsdk_core.errors import CheckpointError
from recsdk_core.serving.manifest import FrozenManifest, FrozenSource

__all__ = ["Told", "inspected", "lines_of"]

Told: TypeAlias = "tuple[dict[str, Any], list[str]]"
"""A value for JSON, and lines for people."""


def inspected(source: str) -> tuple[dict[str, Any], list[str], bool]:
    """What to tell of a checkpoint, frozen or not, or of a folder of them; and whether all of them
    can be read. Raises CheckpointError if there is none."""
    store = open_store(source)
    within = _children_with_manifest(store)
    if within:
        return _of_folder(store.location, within)
    found = _opened(store)
    told = _of_checkpoint(found) if isinstance(found, Checkpoint) else _of_frozen(store, found)
    return *told, True


def _children_with_manifest(store: Store) -> list[Store]:
    """Those of a folder that is no checkpoint itself."""
    try:
        if store.has_manifest():
            return []
        children = store.children()
    except CheckpointError:  # opening it as a checkpoint says what is wrong
        return []
    return [child for child in children if _has_manifest(child)]


def _has_manifest(store: Store) -> bool:
    try:
        return store.has_manifest()
    except CheckpointError:
        return True  # opening it tells what is wrong


def _opened(store: Store) -> Checkpoint | FrozenManifest:
    if is_frozen(store):
        return FrozenManifest.from_bytes(store.read_manifest(), f"{store.location}/manifest.json")
    return open_checkpoint_at(store)


def _of_folder(location: str, within: Sequence[Store]) -> tuple[dict[str, Any], list[str], bool]:
    found: list[dict[str, Any]] = []
    frozen: list[dict[str, Any]] = []
    errors: list[str] = []
    lines: list[str] = []
    for store in within:
        try:
            one = _opened(store)
        except CheckpointError as error:
            errors.append(str(error))
            continue
        if isinstance(one, Checkpoint):
            found.append(
                {
                    "location": one.location,
                    "hash": one.hash,
                    "kind": one.manifest.kind,
                    "step": one.manifest.step,
                    "num_bytes": one.manifest.num_bytes,
                }
            )
            lines.append(f"{_kind(one)}, {_step(one.manifest)}, {_size(one.manifest.num_bytes)}")
        else:
            frozen.append(
                {
                    "location": store.location,
                    "token": one.token,
                    "step": None if one.source is None else one.source.step,
                    "num_bytes": one.num_bytes,
                }
            )
            lines.append(f"{store.location}: frozen, {_step(one.source)}, {_size(one.num_bytes)}")
    number = f"{len(within)} checkpoint{'s' * (len(within) > 1)}"
    first = f"{location}: a folder of {number}; inspect one of them to learn more"
    value = {"location": location, "checkpoints": found, "frozen": frozen, "errors": errors}
    lines = [first, *lines, *(f"cannot be read: {error}" for error in errors)]
    return value, lines, not errors


def _of_checkpoint(found: Checkpoint) -> Told:
    manifest = found.manifest
    before, missing = _links_before(found)
    value = {
        "location": found.location,
        "hash": found.hash,
        "kind": manifest.kind,
        "chain": None if manifest.chain is None else asdict(manifest.chain),
        "links_before": before,
        "missing": missing,
        "step": manifest.step,
        "world_size": manifest.world_size,
        "num_bytes": manifest.num_bytes,
        "writer": manifest.writer,
        "token": manifest.token,
        "has_user_state": manifest.user_state is not None,
        "tables": [
            {
                **{k: v for k, v in asdict(entry).items() if k != "files"},
                "num_rows": entry.num_rows,
                "num_erased": entry.num_erased,
                "num_by_cause": {k.name.lower(): n for k, n in entry.num_by_cause.items()},
                "num_bytes": entry.num_bytes,
            }
            for entry in manifest.tables
        ],
    }
    lines = lines_of(found)
    if missing is not None:
        lines.append(f"chain: not all beside it: {missing}")
    elif before:
        lines.append(f"chain: all {len(before) + 1} beside it, from {before[0]} on")
    return value, lines


def _of_frozen(store: Store, manifest: FrozenManifest) -> Told:
    source = manifest.source
    value = {
        "location": store.location,
        "kind": "frozen",
        "source": None if source is None else asdict(source),
        "num_bytes": manifest.num_bytes,
        "writer": manifest.writer,
        "token": manifest.token,
        "tables": [
            {
                **{k: v for k, v in asdict(entry).items() if k != "files"},
                "num_shards": len(entry.files),
                "num_rows": entry.num_rows,
                "num_bytes": entry.num_bytes,
            }
            for entry in manifest.tables
        ],
    }
    of_what = "tables in memory" if source is None else f"the checkpoint with hash {source.hash}"
    lines = [
        f"{store.location}: frozen, of {of_what}",
        f"token {manifest.token}, {_step(source)}, {_size(manifest.num_bytes)}, "
        f"by {manifest.writer}",
    ]
    for entry in manifest.tables:
        shards = f"{len(entry.files)} shard{'s' * (len(entry.files) > 1)}"
        shared = f"one of {entry.num_shared} rows that such keys share"
        lines.append(
            f"table {entry.name!r}: {entry.num_rows} rows of width {entry.dim} as {entry.dtype}, "
            f"{_size(entry.num_bytes)} in {shards}; keys without a row read "
            f"{shared if entry.num_shared else entry.default_value}"
        )
    return value, lines


def _kind(found: Checkpoint) -> str:
    link = found.manifest.chain
    kind = "snapshot" if link is None else f"delta {link.sequence} on {link.parent[:16]}"
    return f"{found.location}: {kind}"


def _step(of: Manifest | FrozenSource | None) -> str:
    return f"step {'-' if of is None or of.step is None else of.step}"


def _links_before(found: Checkpoint) -> tuple[list[str], str | None]:
    """Where the links of the chain before it lie, or why it cannot be loaded."""
    try:
        return [one.location for one in find_chain(found)[:-1]], None
    except CheckpointError as error:
        return [], str(error)


def lines_of(found: Checkpoint) -> list[str]:
    """What to tell people of a checkpoint alone."""
    manifest = found.manifest
    link = manifest.chain
    lines = [
        _kind(found),
        f"hash {found.hash}, {_step(manifest)}, "
        f"{manifest.world_size} rank{'s' * (manifest.world_size > 1)}, "
        f"{_size(manifest.num_bytes)}, by {manifest.writer}",
    ]
    shared_by = _shared_by(manifest.tables)
    for entry in manifest.tables:
        if entry.name in shared_by:
            lines.append(
                f"table {entry.name!r}: {entry.num_rows} rows that keys of "
                f"{shared_by[entry.name]!r} without one share, {_size(entry.num_bytes)}"
            )
            continue
        causes = (f"{n} {cause.name.lower()}" for cause, n in entry.num_by_cause.items())
        erased = "" if link is None else f", {entry.num_erased} left ({', '.join(causes)})"
        lines += [
            f"table {entry.name!r}: {entry.num_rows} rows{erased} of width {entry.dim}, "
            f"{_size(entry.num_bytes)}, {entry.update_count} updates, {entry.sharding.rule}",
            f"  optimizer {entry.optimizer}; initializer {entry.initializer}, seed {entry.seed}",
            "  fields " + ", ".join(f"{f.name} {f.dtype}[{f.width}]" for f in entry.fields),
        ]
        if entry.eviction is not None:
            lines.append(f"  eviction {entry.eviction}")
        if entry.admission is not None:
            num_counts = sum(file.num_rows for file in entry.admission.files)
            of_what = "words of a sketch" if entry.admission.has_sketch else "keys without a row"
            lines.append(f"  admission {entry.admission}, counts of {num_counts} {of_what}")
    return lines


def _shared_by(tables: Sequence[TableEntry]) -> dict[str, str]:
    """The tables that are rows which the keys of another share, with its name."""
    return {shared_name(entry.name): entry.name for entry in tables if shares_rows(entry)}


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"
