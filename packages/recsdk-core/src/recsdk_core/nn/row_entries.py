"""The rows of a table as entries of a `state_dict`: plain tensors by name.

Shape letters: n rows, D row width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recsdk_core.admission import RECORDS
from recsdk_core.checkpoint.admission_records import Records
from recsdk_core.checkpoint.manifest import METADATA
from recsdk_core.checkpoint.replacing import NewRows, rows_with_metadata
from recsdk_core.eviction import EvictionClock

__all__ = [
    "CLOCK",
    "ENTRIES",
    "KEPT_OF_KEYS",
    "SHARED",
    "STATE",
    "AnyName",
    "clock_of_entry",
    "entries_of",
    "records_of_entries",
    "rows_of",
    "shared_of_entries",
]

STATE = "state."
"""What the names of entries of optimizer state begin with."""


CLOCK = "evict_clock"
"""The name of the entry that says where the clock of eviction and admission stands."""

SHARED = ("shared_keys", "shared_weight", "shared_state")
"""What the entries of the rows that keys without one share begin with: int64 (m,), float32 (m, D),
and float32 (m, width) for each field of state, behind a point."""

KEPT_OF_KEYS: Mapping[str, torch.dtype] = {
    each.name: getattr(torch, each.dtype) for each in METADATA
}
"""The entries of what eviction keeps of keys, (n,) each."""

ENTRIES = (
    "keys",
    "state",
    "update_count",
    "log_decay",
    "drawn_name",
    CLOCK,
    *KEPT_OF_KEYS,
    *RECORDS,
    *SHARED,
)
"""What the names of entries begin with, but for that of a parameter."""


class AnyName:
    """Has an attribute of any name: to functions that look for what an entry is named after."""

    def __getattr__(self, name: str) -> AnyName:
        if name.startswith("_"):
            raise AttributeError(name)
        return self


def rows_of(table: Any) -> NewRows:
    """The rows that readers of a table see now, in ascending order of row number.

    With what eviction and admission keep of keys, if the table has them; then BusyError while a
    save is under way.
    """
    if getattr(table, "_has_more", False):
        return rows_with_metadata(table)
    batches = list(table.export())
    return NewRows(
        keys=_joined([batch.keys for batch in batches], np.empty(0, np.int64)),
        weights=_joined([batch.weights for batch in batches], _no_rows(table.dim)),
        state={
            name: _joined([batch.state[name] for batch in batches], _no_rows(width))
            for name, width in table.state_fields
        },
        update_count=table.update_count,
        log_decay=table.log_decay,
    )


def entries_of(rows: NewRows, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """keys int64 (n,), weight (n, D), state.<field> float32 (n, width), update_count.

    `dtype`: of weight. With an optimizer that catches up, log_decay too; with eviction what it
    keeps of each key (n,), with admission those of
    `recsdk_core.admission.RECORDS` that it keeps, and with either `CLOCK`, see `clock_of_entry`;
    with rows that keys without one share `SHARED`.
    """
    entries = {
        "keys": torch.from_numpy(rows.keys),
        "weight": torch.from_numpy(rows.weights).to(dtype),
        "update_count": torch.tensor(rows.update_count, device="cpu"),
        **{STATE + name: torch.from_numpy(value) for name, value in rows.state.items()},
    }
    if "log_decay" in rows.state:
        entries["log_decay"] = torch.tensor(rows.log_decay, dtype=torch.float64, device="cpu")
    entries.update({name: torch.from_numpy(kept) for name, kept in rows.metadata.items()})
    if rows.records is not None:
        entries.update({n: torch.from_numpy(part) for n, part in rows.records.by_name.items()})
    if rows.shared is not None:
        entries |= {
            "shared_keys": torch.from_numpy(rows.shared.keys),
            "shared_weight": torch.from_numpy(rows.shared.weights),
            **{f"shared_state.{n}": torch.from_numpy(v) for n, v in rows.shared.state.items()},
        }
    if rows.metadata or rows.records is not None:
        step, time = rows.clock.step, rows.clock.time
        clock = [step is not None, step or 0, time is not None, time or 0]
        entries[CLOCK] = torch.tensor(clock, device="cpu")
    return entries


def clock_of_entry(entry: Any) -> EvictionClock:
    """The clock of a tensor: whether there was a step, that, whether a time is set, and that.

    Raises ValueError for any other than int64 (4,) with the two flags 0 or 1.
    """
    is_fit = isinstance(entry, torch.Tensor) and entry.dtype == torch.int64
    numbers = entry.tolist() if is_fit and entry.shape == (4,) else []
    if not numbers or not {numbers[0], numbers[2]} <= {0, 1}:
        raise ValueError(
            f"{CLOCK} must be int64 (4,): whether there was a step, that, whether a time is set, "
            f"that; got {entry}"
        )
    has_step, step, has_time, time = numbers
    return EvictionClock(step=step if has_step else None, time=time if has_time else None)


def records_of_entries(
    entries: Mapping[str, Any], keys_n: NDArray[np.int64], *, of_sketch: bool
) -> Records | None:
    """The counts of keys without a row among entries, beside rows of keys (n,); None: none.

    With `of_sketch` keys of counts stand for words of a sketch, and may be among those of rows.

    Raises ValueError, naming the entry, for what cannot be such.
    """
    if RECORDS[0] not in entries:
        return None
    names = RECORDS if RECORDS[3] in entries else RECORDS[:3]
    parts: list[Any] = [entries.get(name) for name in names]
    num_keys = parts[0].numel() if isinstance(parts[0], torch.Tensor) else 0
    for name, part in zip(names, parts, strict=True):
        is_fit = isinstance(part, torch.Tensor) and part.dtype == torch.int64
        if not is_fit or part.shape != (num_keys,):
            raise ValueError(f"{name}: must be int64 ({num_keys},), got {part}")
    records = Records(*(np.ascontiguousarray(part.detach().cpu().numpy()) for part in parts))
    if not bool((records.counts > 0).all()):
        raise ValueError(f"{RECORDS[1]}: must be 1 or more, got {records.counts.min()}")
    if records.clicks is not None and not bool((records.clicks >= 0).all()):
        raise ValueError(f"{RECORDS[3]}: must be 0 or more, got {records.clicks.min()}")
    all_keys = records.keys if of_sketch else np.concatenate([keys_n, records.keys])
    found, numbers = np.unique(all_keys, return_counts=True)
    if len(found) != len(all_keys):
        raise ValueError(
            f"{RECORDS[0]}: must not repeat, nor be among keys, got {found[numbers > 1][0]} again"
        )
    return records


def shared_of_entries(entries: Mapping[str, Any]) -> NewRows | None:
    """The rows that keys without one share among entries; None: none.

    Raises ValueError, naming the entry, for what cannot be such.
    """
    if "shared_keys" not in entries:
        return None
    keys, weight = entries["shared_keys"], entries.get("shared_weight")
    num_rows = keys.numel() if isinstance(keys, torch.Tensor) else 0
    state = {
        name.removeprefix("shared_state."): value
        for name, value in entries.items()
        if name.startswith("shared_state.")
    }
    wanted = {"shared_keys": (keys, torch.int64, 1), "shared_weight": (weight, torch.float32, 2)}
    wanted |= {f"shared_state.{name}": (value, torch.float32, 2) for name, value in state.items()}
    for name, (value, dtype, num_dims) in wanted.items():
        is_fit = isinstance(value, torch.Tensor) and value.dtype == dtype
        if not is_fit or value.dim() != num_dims or len(value) != num_rows:
            raise ValueError(f"{name}: must be {dtype}, with {num_rows} rows, got {value}")
    arrays = {
        name: np.ascontiguousarray(value.detach().cpu().numpy())
        for name, (value, _, _) in wanted.items()
    }
    return NewRows(
        keys=arrays["shared_keys"],
        weights=arrays["shared_weight"],
        state={name: arrays[f"shared_state.{name}"] for name in state},
    )


def _no_rows(width: int) -> NDArray[np.float32]:
    return np.empty((0, width), np.float32)


def _joined(parts: Sequence[NDArray[Any]], empty: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([empty, *parts])
