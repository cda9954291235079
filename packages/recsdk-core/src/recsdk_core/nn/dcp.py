"""Tables in torch.distributed.checkpoint. Importing this module extends its default planners.

torch cannot know two things about tables. To load a table, its entries need room of the saved
sizes, not of the sizes that they have now. And if several ranks save entries of one name, torch
keeps some rank's copy of each entry. That is right only if all ranks have the same: else it may
keep the keys of one rank and the rows of another. So ranks tell each other what rows they have, and
a save of different rows is refused. With a planner that does not flatten dicts, torch keeps one
rank's copy of each dict: such a dict must have the same tables on all ranks, each whole.

Shape letters: n rows, D row width.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from itertools import count
from typing import Any, TypeAlias

import torch
from torch import distributed
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

from recsdk_core import _ext
from recsdk_core.admission import RECORDS
from recsdk_core.checkpoint.participants import refuse_different
from recsdk_core.errors import CheckpointError
from recsdk_core.nn.row_entries import CLOCK, KEPT_OF_KEYS

__all__ = ["MakeRoom", "before_loading", "holder_of", "saved_tensors"]

_KEPT = (CLOCK, *KEPT_OF_KEYS, *RECORDS)
_NAME = re.compile(
    r"keys|weight|update_count|log_decay|drawn_name|seed|ranks|state\.[^.]+|" + "|".join(_KEPT)
)
_ALWAYS = {"keys", "weight", "update_count"}
_HOLDERS = (Mapping, list, tuple)
_BATCH_BYTES = 2**22


# ---- loading -----------------------------------------------------------------------------------

MakeRoom: TypeAlias = Callable[[DefaultLoadPlanner, dict[str, Any], Metadata], None]
"""Puts tensors of the saved sizes into the state that is to be loaded."""


def before_loading(make_room: MakeRoom) -> None:
    """Makes torch's default load planner first call a function with all that it is to load."""
    set_up = DefaultLoadPlanner.set_up_planner

    @wraps(set_up)
    def adapted(
        self: DefaultLoadPlanner,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        if metadata is not None:
            make_room(self, state_dict, metadata)
        set_up(self, state_dict, metadata, is_coordinator)

    DefaultLoadPlanner.set_up_planner = adapted  # type: ignore[method-assign]


def saved_tensors(
    metadata: Metadata,
) -> Iterator[tuple[tuple[Any, ...], str, TensorStorageMetadata]]:
    """The tensors of a checkpoint: the keys of the dicts that lead to each, its name, its size."""
    for name, entry in metadata.state_dict_metadata.items():
        *path, last = (metadata.planner_data or {}).get(name, (name,))
        if isinstance(last, str) and isinstance(entry, TensorStorageMetadata):
            yield tuple(path), last, entry


def holder_of(state_dict: Mapping[str, Any], path: Sequence[Any]) -> dict[str, Any] | None:
    """The dict at the end of a path of keys, if there is one."""
    holder: Any = state_dict
    for step in path:
        holder = holder.get(step) if isinstance(holder, Mapping) else None
    return holder if isinstance(holder, dict) else None


def _make_room(_: DefaultLoadPlanner, state_dict: dict[str, Any], metadata: Metadata) -> None:
    by_holder: dict[tuple[Any, ...], dict[str, TensorStorageMetadata]] = {}
    for path, name, entry in saved_tensors(metadata):
        by_holder.setdefault(path, {})[name] = entry
    for path, saved in by_holder.items():
        holder = holder_of(state_dict, path)
        if holder is None:
            continue
        for table, names in _tables(holder).items():
            if "ranks" in names or not {n for n in names if table + n in saved} >= _ALWAYS:
                continue  # a part of recsdk-sharding's, which makes room itself; or no such table
            for name in names:
                found = saved.get(table + name)
                if found is not None and found.size != holder[table + name].shape:
                    made = torch.empty(found.size, dtype=found.properties.dtype)
                    holder[table + name] = made


def _tables(entries: Mapping[Any, Any]) -> dict[str, list[str]]:
    """The prefix of each table's entries, and the endings of their names."""
    tensors = [n for n, v in entries.items() if isinstance(n, str) and isinstance(v, torch.Tensor)]
    known = set(tensors)
    starts = [name.removesuffix("keys") for name in tensors if re.fullmatch(r"(.+\.)?keys", name)]
    return {
        start: [n[len(start) :] for n in tensors if n.startswith(start) and _is_name(n, start)]
        for start in starts
        if known >= {start + name for name in _ALWAYS}
    }


def _is_name(name: str, start: str) -> bool:
    return _NAME.fullmatch(name, len(start)) is not None


# ---- saving ------------------------------------------------------------------------------------

_REMEDY = (
    "shard it with recsdk-sharding, or give each rank's a name of its own, as in "
    "dcp.save({f'model_{rank}': model}, ...)"
)


@dataclass(frozen=True)
class _Plan(SavePlan):
    """What a rank is to save, and what its tables hold."""

    tables: Mapping[str, str] = field(default_factory=dict)
    """A checksum of each whole table, by its name."""
    containers: frozenset[str] = frozenset()
    """Dicts that are not flattened, by name: torch saves one rank's copy of each."""
    parts: tuple[str, ...] = ()
    """Parts of sharded tables that lie in one of them."""


def _adapt_save_planner() -> None:
    create_local_plan = DefaultSavePlanner.create_local_plan
    create_global_plan = DefaultSavePlanner.create_global_plan

    @wraps(create_local_plan)
    def adapted_local(self: DefaultSavePlanner) -> SavePlan:
        plan = create_local_plan(self)
        if not distributed.is_initialized() or distributed.get_world_size() == 1:
            return plan
        return _plan_with_tables(plan, self.state_dict)

    @wraps(create_global_plan)
    def adapted_global(
        self: DefaultSavePlanner, all_plans: list[SavePlan]
    ) -> tuple[list[SavePlan], Metadata]:
        _check([plan if isinstance(plan, _Plan) else _Plan([]) for plan in all_plans])
        return create_global_plan(self, all_plans)

    DefaultSavePlanner.create_local_plan = adapted_local  # type: ignore[method-assign]
    DefaultSavePlanner.create_global_plan = adapted_global  # type: ignore[method-assign]


def _check(plans: Sequence[_Plan]) -> None:
    """Raises CheckpointError if a checkpoint could not hold the tables of all ranks."""
    parts = [part for plan in plans for part in plan.parts]
    if parts and len(plans) > 1:
        raise CheckpointError(
            f"table {parts[0]!r} is one rank's shard of a table, in a dict of which torch would "
            "save one rank's only; leave flatten_state_dict on for the planner"
        )
    tables = sorted({table for plan in plans for table in plan.tables})
    # torch may take the keys of one rank, and the rows of another.
    what = "different rows, or the same rows in another order"
    refuse_different([_digests(plan, tables) for plan in plans], what, _REMEDY)


def _digests(plan: _Plan, tables: Collection[str]) -> dict[str, str]:
    """Checksums of the tables in one rank's plan, also of those that its unflattened dicts lack."""
    starts = tuple(f"{name}." for name in plan.containers)
    return {**{table: "none" for table in tables if table.startswith(starts)}, **plan.tables}


def _plan_with_tables(plan: SavePlan, state_dict: Mapping[str, Any]) -> _Plan:
    """The plan with what other ranks may have under the same names."""
    tables, _ = _checksums("", state_dict)
    containers, parts = set(), []
    for name, value in state_dict.items():
        for path, nested in _dicts(name, value):
            containers.add(name)
            checksums, of_several = _checksums(f"{path}.", nested)
            tables.update(checksums)
            parts += of_several
    return _Plan(**vars(plan), tables=tables, containers=frozenset(containers), parts=tuple(parts))


def _dicts(path: str, value: Any) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """The dicts within a value that torch saves as one object."""
    stack = [(path, value)] if isinstance(value, _HOLDERS) else []
    seen: dict[int, Any] = {}  # keeps the objects, so that no id is used again
    while stack:
        path, value = stack.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        keys: Iterable[Any] = count()
        children: Collection[Any] = value
        if isinstance(value, Mapping):
            yield path, value
            keys, children = value, value.values()
        types = set(map(type, children))  # few, while there may be millions of numbers
        holders = {each for each in types if issubclass(each, _HOLDERS)}
        stack += [
            (f"{path}.{key}", child)
            for key, child in zip(keys, children, strict=False)
            if type(child) in holders
        ]


def _checksums(start: str, entries: Mapping[Any, Any]) -> tuple[dict[str, str], list[str]]:
    """Of the tables in a dict by their names, which get a start; and the parts of sharded ones."""
    whole, parts = {}, []
    for table, names in _tables(entries).items():
        own = {name: entries[table + name].detach().cpu() for name in names}
        label = (start + table).rstrip(".")
        if "ranks" in own and int(own["ranks"][0]) > 1:
            parts.append(label)
        elif _is_table(own):
            whole[label] = _checksum(own)
    return whole, parts


def _is_table(entries: Mapping[str, torch.Tensor]) -> bool:
    keys = entries["keys"]
    rows = [value for name, value in entries.items() if _is_of_rows(name)]
    return (
        keys.dtype == torch.int64
        and keys.dim() == 1
        and all(value.dim() in (1, 2) and len(value) == len(keys) for value in rows)
    )


def _is_of_rows(name: str) -> bool:
    return name == "weight" or name.startswith("state.") or name in KEPT_OF_KEYS


def _checksum(entries: Mapping[str, torch.Tensor]) -> str:
    """A checksum of all rows in their order, and of what belongs to the table as a whole."""
    keys_n = entries["keys"].contiguous().numpy()
    others = {name: value for name, value in entries.items() if _is_of_rows(name)}
    rows = {"weight": others.pop("weight"), **others}  # a row file begins with it
    fields = [
        (name, "int64" if value.dtype == torch.int64 else "float32", _width(value))
        for name, value in rows.items()
    ]
    at_once = _BATCH_BYTES // (8 + 8 * sum(width for _, _, width in fields)) + 1

    def blocks() -> Iterator[_ext.RowBlock]:
        for begin in range(0, len(keys_n), at_once):
            end = begin + at_once
            part = {n: _of_file(value[begin:end]) for n, value in rows.items()}
            yield _ext.RowBlock.rows(keys_n[begin:end], {n: v.numpy() for n, v in part.items()})

    summary = _ext.write_row_file(
        lambda _: None,
        kind="snapshot",
        dim=rows["weight"].shape[1],
        fields=fields,
        blocks=blocks(),
        token=bytes(16),
    )
    whole: dict[str, Any] = {
        name: _digest(value) if name in RECORDS else value.tolist()
        for name, value in entries.items()
        if name not in rows and name != "keys"
    }
    return f"{summary.checksum} {rows['weight'].dtype} {sorted(whole.items())}"


def _digest(values: torch.Tensor) -> str:
    return hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()


def _width(values: torch.Tensor) -> int:
    return 1 if values.dim() == 1 else values.shape[1]


def _of_file(values: torch.Tensor) -> torch.Tensor:
    """Numbers as a row file has them: what eviction keeps may be whole, all else is float32."""
    wide = values if values.dtype == torch.int64 else values.float()
    return wide.reshape(len(wide), _width(wide)).contiguous()


before_loading(_make_room)
_adapt_save_planner()
