"""Says in words how a key stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recsdk_core.admission import Admit
from recsdk_core.eviction import Evict
from recsdk_core.predicates import COLUMNS, Kept, sources_of
from recsdk_core.stats import Explanation

__all__ = ["explained"]


def explained(
    key: int,
    standing: Mapping[str, Any],
    metadata: Mapping[str, Any],
    eviction: Evict | None,
    admission: Admit | None,
) -> Explanation:
    """An explanation of what the engine says of a key; `metadata` (1,) by name, if it has a row."""
    step = standing["step"]
    kept = Kept.by_rule(metadata, step, eviction)
    names = [name for name in COLUMNS if name in sources_of(metadata)]
    columns = {name: kept.column(name)[0].item() for name in names}
    has_order = standing["row"] is not None and eviction is not None
    reasons = (
        _without_row(standing, eviction, admission)
        if standing["row"] is None
        else _with_row(standing, columns, eviction)
    )
    return Explanation(
        key=key,
        row=standing["row"],
        columns=columns,
        seen=standing["seen"],
        group=standing["group"],
        group_rows=standing["group_rows"],
        group_quota=standing["group_quota"],
        num_before=standing["num_before"] if has_order else None,
        has_expired=standing["has_expired"],
        reasons=tuple(reasons),
    )


def _room(standing: Mapping[str, Any]) -> str:
    return (
        f"its group {standing['group']} has {standing['group_rows']} of "
        f"{standing['group_quota']} rows"
    )


def _with_row(
    standing: Mapping[str, Any], columns: Mapping[str, float], eviction: Evict | None
) -> Sequence[str]:
    reasons = [f"it has row {standing['row']}"]
    if eviction is None:
        return [*reasons, "nobody leaves unless erased"]
    reasons += [f"{name} {value}" for name, value in columns.items()]
    if eviction.min_age > columns.get("age", eviction.min_age):
        reasons.append(f"it stays until it is {eviction.min_age} steps old")
    if standing["has_expired"]:
        reasons.append("it has expired, and leaves at the next look unless it is seen before")
    if standing["group"] is not None:
        before = standing["num_before"]
        reasons.append(f"{_room(standing)}, and {before} of these keys leave before it")
    return reasons


def _without_row(
    standing: Mapping[str, Any], eviction: Evict | None, admission: Admit | None
) -> Sequence[str]:
    reasons = ["it has no row"]
    if admission is not None:
        seen = standing["seen"]
        times = "what it was is not kept" if seen is None else f"it was seen {seen} times so far"
        reasons.append(f"a rule of admission decides when it comes: {times}")
    if standing["group"] is not None:
        is_full = standing["group_rows"] >= standing["group_quota"]
        then = "others leave for it" if eviction is not None else "it is refused"
        reasons.append(_room(standing) + (f": {then}" if is_full else ""))
    return reasons
