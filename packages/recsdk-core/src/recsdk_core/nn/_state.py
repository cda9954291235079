"""A table in a state_dict: keys, weights, optimizer state and update count as plain tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from recsdk_core.admission import record_names
from recsdk_core.checkpoint.admission_records import Records
from recsdk_core.checkpoint.replacing import NewRows, metadata_of, replace_rows
from recsdk_core.eviction import EvictionClock
from recsdk_core.nn.row_entries import (
    CLOCK,
    KEPT_OF_KEYS,
    SHARED,
    STATE,
    clock_of_entry,
    entries_of,
    records_of_entries,
    rows_of,
    shared_of_entries,
)
from recsdk_core.nn.unused_entries import UnusedEntry
from recsdk_core.outcome import Default
from recsdk_core.table import Table

_INT64 = 2**63
_DTYPES = {"keys": torch.int64, **KEPT_OF_KEYS}

__all__ = [
    "LoadedState",
    "brings_state",
    "forget_rows",
    "load_table",
    "save_table",
    "take_state",
]


def save_table(table: Table, prefix: str) -> dict[str, torch.Tensor]:
    """The entries of the visible rows."""
    return {prefix + name: tensor for name, tensor in entries_of(rows_of(table)).items()}


def _catches_up(table: Table) -> bool:
    return "log_decay" in dict(table.state_fields)


def load_table(
    table: Table,
    state_dict: Mapping[str, Any],
    prefix: str,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
    let_go: Callable[[], None],
) -> bool:
    """Replaces the table's rows by `state_dict`'s, or notes what does not fit and changes nothing.

    The caller holds a Ctrl-C back. `let_go` drops gradients that add up for the rows there are.

    Returns whether it replaced them: entries without `keys` and `weight` bring no rows.

    Optimizer state that is missing is made fresh, and its names are noted as missing:
    `load_state_dict` raises for them unless `strict=False`. So is what eviction keeps of keys: they
    then count as never seen, the counts of keys without a row, which then begin at 0, and the rows
    that keys without one share, which then begin anew. So a strict load raises for them once it
    has loaded what there is, as torch's modules do. Entries that are not used are noted as
    unexpected.
    """
    given = {k[len(prefix) :]: v for k, v in state_dict.items() if k.startswith(prefix)}
    shapes = {"keys": (), "weight": (table.dim,)}
    shapes.update({STATE + name: (width,) for name, width in table.state_fields})
    kept = metadata_of(table)
    shapes.update(dict.fromkeys(kept, ()))
    known = [*shapes, "update_count", *(["log_decay"] if _catches_up(table) else [])]
    known += record_names(table.admission)
    known += [CLOCK] if table._has_clock else []
    known += _shared_names(table)
    missing_keys.extend(prefix + name for name in known if name not in given)
    unexpected_keys.extend(prefix + name for name in given if name not in known)
    if not {"keys", "weight"} <= set(given):
        unexpected_keys.extend(_unused(table, prefix, name) for name in given if name in known)
        return False
    problems = _problems(table, given, shapes)
    if problems:
        error_msgs.extend(prefix + problem for problem in problems)
        return False
    _replace_rows(table, given, let_go)
    return True


def forget_rows(table: Table, let_go: Callable[[], None]) -> None:
    """Leaves the table as a new one, but for its counts of updates; BusyError as `replace_rows`."""
    none = NewRows(
        keys=np.empty(0, np.int64),
        weights=np.empty((0, table.dim), np.float32),
        state={name: np.empty((0, width), np.float32) for name, width in table.state_fields},
        update_count=table.update_count,
        log_decay=table.log_decay,
    )
    replace_rows([(table, none)], let_go)


def brings_state(table: Table, state_dict: Mapping[str, Any], prefix: str) -> bool:
    """Whether loading it gives rows optimizer state: else they get a fresh one, or have none."""
    names = [prefix + STATE + name for name, _ in table.state_fields]
    return bool(names) and all(name in state_dict for name in names)


@dataclass(frozen=True, kw_only=True)
class LoadedState:
    """Optimizer state of rows that came before their optimizer."""

    keys: torch.Tensor
    """int64 (n,)"""
    state: Mapping[str, torch.Tensor]
    """float32 (n, width) by name."""
    shared_keys: torch.Tensor
    """Of rows that keys without one share, int64 (m,)."""
    shared_state: Mapping[str, torch.Tensor]
    """float32 (m, width) by name; empty if none came."""

    @property
    def widths(self) -> list[dict[str, int]]:
        """The fields of state that came, of each kind of rows."""
        parts = [self.state, self.shared_state] if self.shared_state else [self.state]
        return [{name: each.shape[1] for name, each in part.items()} for part in parts]


def take_state(given: dict[str, Any], prefix: str) -> LoadedState | None:
    """Takes optimizer state out of a state_dict, for a table that has no optimizer yet.

    Leaves what has not the dtype or shape of such; None if there is none of keys' own rows.
    """
    keys, state = _take_of(given, prefix + "keys", prefix + STATE)
    if not state:
        return None
    name_of_keys, _, name_of_state = SHARED
    shared = _take_of(given, prefix + name_of_keys, f"{prefix}{name_of_state}.")
    return LoadedState(keys=keys, state=state, shared_keys=shared[0], shared_state=shared[1])


def _take_of(
    given: dict[str, Any], name_of_keys: str, start: str
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Keys, and what was taken out of the entries whose names begin so."""
    keys = given.get(name_of_keys)
    if not isinstance(keys, torch.Tensor) or keys.dim() != 1:
        return torch.empty(0, dtype=torch.int64), {}
    names = [
        name
        for name, each in given.items()
        if name.startswith(start)
        and isinstance(each, torch.Tensor)
        and each.dtype == torch.float32
        and each.dim() == 2
        and len(each) == len(keys)
    ]
    return keys, {name[len(start) :]: given.pop(name) for name in names}


def _unused(table: Table, prefix: str, name: str) -> str:
    """The name of an entry that cannot be used without others that are missing."""
    if name != "weight":
        return prefix + name
    return UnusedEntry(
        prefix + name,
        "weights of a dense table, whose rows have no ids: use table.upsert(ids, weights) of "
        f"table {table.name!r}",
    )


def _problems(
    table: Table, given: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """What does not fit the table, one message each."""
    found = _bad_tensors(given, shapes) + _bad_count(given.get("update_count", 0))
    if _catches_up(table):
        found += _bad_log_decay(given.get("log_decay", 0.0))
    found += _bad_metadata(table, given)
    if found:
        return found
    num_rows = len(given["keys"])
    if table.max_rows is not None and num_rows > table.max_rows and table.eviction is None:
        found.append(f"keys: {num_rows} rows do not fit into max_rows={table.max_rows}")
    if len(np.unique(_array(given["keys"]))) != num_rows:
        found.append("keys: must not repeat")
    return found


def _bad_tensors(given: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Entries that are no tensors of the dtype and shape that they must have."""
    num_rows = given["keys"].shape[:1] if isinstance(given["keys"], torch.Tensor) else ()
    found = []
    for name, row_shape in shapes.items():
        if name not in given:
            continue
        tensor, dtype = given[name], _DTYPES.get(name, torch.float32)
        if not isinstance(tensor, torch.Tensor):
            found.append(f"{name}: must be a tensor, got {type(tensor).__name__}")
        elif tensor.dtype != dtype:
            found.append(f"{name}: must be {dtype}, got {tensor.dtype}; pass it .to({dtype})")
        elif len(tensor.shape) != 1 + len(row_shape) or tensor.shape != (*num_rows, *row_shape):
            wanted = (*(num_rows or ("n",)), *row_shape)
            found.append(f"{name}: must have shape {wanted}, got {tuple(tensor.shape)}")
    return found


def _bad_count(count: Any) -> list[str]:
    is_whole = isinstance(count, int) or (
        isinstance(count, torch.Tensor)
        and count.numel() == 1
        and not (count.is_floating_point() or count.is_complex())
    )
    if is_whole and 0 <= int(count) < _INT64:
        return []
    return [f"update_count: must be a whole number from 0 to 2**63 - 1, got {count}"]


def _bad_log_decay(value: Any) -> list[str]:
    is_number = isinstance(value, float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    if is_number and math.isfinite(value) and value <= 0:
        return []
    return [f"log_decay: must be a finite number of 0 or less, got {value}"]


def _bad_metadata(table: Table, given: Mapping[str, Any]) -> list[str]:
    for names in (metadata_of(table), record_names(table.admission)):
        wanted = {*names, CLOCK} if names else set()
        missing = sorted(wanted - set(given))
        if missing and any(name in given for name in names):
            return [f"{missing}: must be there as well: all of {sorted(wanted)}, or none"]
    try:
        _clock(given)
        _records(table, given)
        _shared(table, given)
    except ValueError as error:
        return [str(error)]
    return []


def _clock(given: Mapping[str, Any]) -> EvictionClock:
    return clock_of_entry(given[CLOCK]) if CLOCK in given else EvictionClock()


def _records(table: Table, given: Mapping[str, Any]) -> Records | None:
    """The counts of keys without a row; ValueError for what cannot be such."""
    if table.admission is None:
        return None
    is_sketch = table.admission.max_bytes is not None
    return records_of_entries(given, _array(given["keys"]), of_sketch=is_sketch)


def _shared_names(table: Table) -> list[str]:
    """The entries of the rows that keys without one share."""
    if table.default.kind != "shared_rows":
        return []
    keys, weight, state = SHARED
    return [keys, weight, *(f"{state}.{name}" for name, _ in table.state_fields)]


def _shared(table: Table, given: Mapping[str, Any]) -> NewRows | None:
    """The rows that keys without one share; ValueError for what cannot be such."""
    found = shared_of_entries(given) if _shared_names(table) else None
    if found is None:
        return None
    wanted = table.shared_rows()
    widths = {name: value.shape[1] for name, value in found.state.items()}
    if found.weights.shape[1] != table.dim or set(found.keys) != set(wanted.keys):
        raise ValueError(
            f"shared_keys: {len(found.keys)} rows of width {found.weights.shape[1]} are not the "
            f"{len(wanted.keys)} of width {table.dim} that keys without a row share"
        )
    if not set(widths.items()) <= set(table.state_fields):
        raise ValueError(
            f"shared_state: must be of {dict(table.state_fields)}, got {widths}; leave its entries "
            "out with strict=False, for a fresh one"
        )
    return found if len(widths) == len(table.state_fields) else replace(found, state={})


def _replace_rows(table: Table, given: Mapping[str, Any], let_go: Callable[[], None]) -> None:
    keys, weights, state = _array(given["keys"]), _array(given["weight"]), None
    if all(STATE + name in given for name, _ in table.state_fields):
        state = {name: _array(given[STATE + name]) for name, _ in table.state_fields}
    count, log_decay = int(given.get("update_count", 0)), float(given.get("log_decay", 0.0))
    if table._has_more:  # an upsert would be a step that sees the keys
        kept = metadata_of(table)
        rows = NewRows(
            keys=keys,
            weights=weights,
            state=_fresh_state(table, keys, weights, log_decay) if state is None else state,
            update_count=count,
            log_decay=log_decay if _catches_up(table) else 0.0,
            metadata={name: _array(given[name]) for name in kept if name in given},
            clock=_clock(given),
            records=_records(table, given),
            shared=_shared(table, given),
        )
        replace_rows([(table, rows)], let_go)
        return
    table.reserve(len(keys))  # whatever memory is missing, it is noticed before the rows are gone
    let_go()
    table.clear()
    table.upsert(keys, weights, state)
    table.update_count = count
    if _catches_up(table):
        table.log_decay = log_decay


def _fresh_state(table: Table, keys: Any, weights: Any, log_decay: float) -> Mapping[str, Any]:
    """The optimizer state that rows of these distinct keys (n,) begin with."""
    made = table.empty_copy(
        max_rows=None,
        eviction_groups=None,
        owned_groups=None,
        eviction=None,
        admission=None,
        default=Default.zeros(),
    )
    if _catches_up(made):
        made.log_decay = log_decay
    made.upsert(keys, weights)
    return rows_of(made).state


def _array(tensor: torch.Tensor) -> Any:
    return np.ascontiguousarray(tensor.detach().cpu().numpy())
