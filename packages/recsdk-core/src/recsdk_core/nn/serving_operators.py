"""Reads of frozen tables as torch operators, for compilers, exporters and tracers.

They change nothing, so they may be moved and dropped. A table that follows a chain may answer
differently from one call to the next, so they are not computed ahead. An operator names its table
by a number of this process, which is a tensor, so that one compiled function serves many tables. An
exported program names path and table too, by which another process opens them; a table of that
path that follows a chain there is the one that it reads. The tables that were of one freeze when
they were exported are opened together, so that they are of one freeze there, too. They stay open
until `close_exported`: an operator is told the text of a place, and not which program runs it.

Shape letters: N keys, B bags, D row width.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import uuid
from collections.abc import Sequence
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch

from recsdk_core.errors import CheckpointError
from recsdk_core.files import local_path
from recsdk_core.nn.bag_arguments import bag_offsets
from recsdk_core.nn.embedding_arguments import check_ends, left_out
from recsdk_core.nn.lookup_options import MaxOfBags
from recsdk_core.serving import ServingTable
from recsdk_core.serving.exported import ExportedTables
from recsdk_core.serving.table import followed_table

__all__ = [
    "close_exported",
    "lookup_recorded",
    "number_of_table",
    "place_of_table",
    "pool_bags",
    "pool_recorded",
]

_torch_library: Any = torch.library
_uncompiled: Any = torch.compiler.disable
_PROCESS = uuid.uuid4().hex
_tables: WeakValueDictionary[int, ServingTable] = WeakValueDictionary()
_Group: TypeAlias = tuple[str, str, tuple[int, ...] | None, str]
"""Process, path, shards and token of tables that were exported."""
_opened: dict[_Group, ExportedTables] = {}


def number_of_table(table: ServingTable) -> int:
    """A number that finds the table as long as it lives, and none in another process."""
    number = secrets.randbits(62)
    _tables[number] = table
    return number


def place_of_table(table: ServingTable, number: int) -> str:
    """What names the table in exported programs."""
    token = table.manifest.token
    return json.dumps((_PROCESS, number, table.path, table.name, table.shards, token))


def lookup_recorded(module: Any, keys: torch.Tensor) -> torch.Tensor:
    """What a `ServingEmbedding` reads for keys, as an operator: float32 (*shape, D)."""
    args = (module.table.dim, *_place_of(module))
    return torch.ops.recsdk.serving_lookup(keys, *args)  # type: ignore[no-any-return]


def pool_recorded(
    module: Any,
    keys: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    num_bags: int,
) -> torch.Tensor:
    """What a `ServingEmbeddingBag` pools, as an operator: float32 (B, D)."""
    how = (module.mode, module.include_last_offset, module.padding, module.table.dim)
    args = (num_bags, *how, *_place_of(module))
    return torch.ops.recsdk.serving_pool(keys, offsets, weights, *args)  # type: ignore[no-any-return]


def pool_bags(
    table: ServingTable,
    keys: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    mode: str,
    include_last_offset: bool,
    padding: int | None,
) -> torch.Tensor:
    """Pools bags here and now: float32 (B, D); padding is left out of the largest, "max"."""
    ends = bag_offsets(keys, offsets, include_last_offset).contiguous()
    if offsets is not None:
        check_ends(ends, len(keys))
    keys = keys.reshape(-1).contiguous()
    if mode == "max":
        keys, ends = left_out(keys, ends, padding)
        return MaxOfBags(ends).forward(table.lookup(keys))
    if weights is not None:
        weights = weights.detach().reshape(-1).float().contiguous()
    return table.pool(keys, ends, weights, mode)  # type: ignore[no-any-return]


def _place_of(module: Any) -> tuple[str | None, torch.Tensor | None]:
    """What names the table in exported programs, else the number."""
    if getattr(torch.compiler, "_is_exporting_flag", False):
        return module.place, None
    if torch.compiler.is_compiling():
        return None, module.number_1
    return None, torch.full((1,), module.number, device="cpu")


def _table_of(place: str | None, number: torch.Tensor | None, dim: int) -> ServingTable:
    table = _exported(str(place)) if number is None else _tables.get(int(number))
    if table is None:
        raise RuntimeError(
            "the frozen table for which this was compiled is gone; compile again, and keep its "
            "module"
        )
    if table.dim != dim:
        raise ValueError(
            f"table {table.name!r} has width {table.dim}, and the program was exported for {dim}; "
            "export it again"
        )
    return table


def _exported(place: str) -> ServingTable:
    """The table that was exported, if it lives here; else one of its path that follows a chain;
    else what is at its path, from now on."""
    number, name, group = _parsed(place)
    process, path, shards, _ = group
    own = _tables.get(number) if process == _PROCESS else None
    if own is not None:
        return own
    follower = followed_table(path, name, shards)
    return _opened_with_others(group, name) if follower is None else follower


@functools.cache
def _parsed(place: str) -> tuple[int, str, _Group]:
    try:
        process, number, path, name, shards, token = json.loads(place)
        return number, name, (process, path, None if shards is None else tuple(shards), token)
    except (TypeError, ValueError):
        raise CheckpointError(
            f"the place of a frozen table, {place}: was not exported by this version of "
            "recsdk-core; export the program again"
        ) from None


def _opened_with_others(group: _Group, name: str) -> ServingTable:
    """The table of what was at the path when the first of the group was asked for."""
    found = _opened.get(group)
    if found is None:
        _, path, shards, _ = group
        made = ExportedTables(path, shards)
        made.table(name)  # if it cannot be opened, nothing is kept
        found = _opened.setdefault(group, made)  # what came first is kept
    return found.table(name)


def close_exported(path: Any) -> int:
    """Lets go of the tables that exported programs have opened at a path; returns how many.

    They stay open otherwise until the process ends, and files that another freeze has replaced take
    their place on the disk as long. A program of this path that runs again opens what is there
    then. Call it when a newer program has taken the place of all those, or between their requests:
    what a request reads before and after it may be of two freezes. Nothing of modules and of
    programs that are still beside the modules of which they were exported.

    Thread safety: calls of an operator that run meanwhile end as they began.
    """
    folder = os.path.abspath(local_path(path))
    closed = [_opened.pop(group, ()) for group in list(_opened) if group[1] == folder]
    return sum(map(len, closed))


def _lookup(
    keys: torch.Tensor, dim: int, place: str | None, number: torch.Tensor | None
) -> torch.Tensor:
    table = _table_of(place, number, dim)
    vectors: torch.Tensor = table.lookup(keys.reshape(-1).contiguous())
    return vectors.view(*keys.shape, dim)


def _pool(
    keys: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    num_bags: int,
    mode: str,
    include_last_offset: bool,
    padding: int | None,
    dim: int,
    place: str | None,
    number: torch.Tensor | None,
) -> torch.Tensor:
    table = _table_of(place, number, dim)
    return pool_bags(table, keys, offsets, weights, mode, include_last_offset, padding)


def _like_keys(keys: torch.Tensor, dim: int, *_place: Any) -> torch.Tensor:
    return keys.new_empty((*keys.shape, dim), dtype=torch.float32)


def _like_bags(
    keys: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    num_bags: int,
    mode: str,
    include_last_offset: bool,
    padding: int | None,
    dim: int,
    *_place: Any,
) -> torch.Tensor:
    return keys.new_empty((num_bags, dim), dtype=torch.float32)


def _no_gradient(ctx: Any, *grads: Sequence[Any]) -> None:
    raise RuntimeError(
        "a frozen table is only read and has no gradient for per_sample_weights; detach them, or "
        "take the trained model"
    )


_TAGS = (torch.Tag.nondeterministic_seeded,)
"""Compilers then compute nothing of them ahead, not even where all keys are constants."""
_PLACE = "int dim, str? place, Tensor? number"
_HOW = "SymInt num_bags, str mode, bool include_last_offset, int? padding"
_SCHEMAS: dict[str, tuple[str, Any, Any]] = {
    "serving_lookup": (f"(Tensor keys, {_PLACE}) -> Tensor", _lookup, _like_keys),
    "serving_pool": (
        f"(Tensor keys, Tensor? offsets, Tensor? weights, {_HOW}, {_PLACE}) -> Tensor",
        _pool,
        _like_bags,
    ),
}


def _define() -> None:
    for name, (schema, run, fake) in _SCHEMAS.items():
        full = f"recsdk::{name}"
        _LIBRARY.define(name + schema, tags=_TAGS)
        _LIBRARY.impl(name, _uncompiled(run), "CompositeExplicitAutograd")
        _torch_library.register_fake(full, fake, lib=_LIBRARY)
        _torch_library.register_autograd(full, _no_gradient, lib=_LIBRARY)


_LIBRARY = _torch_library.Library("recsdk", "FRAGMENT")
_define()
