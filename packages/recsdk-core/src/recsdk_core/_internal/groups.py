"""How `max_rows` divides over groups of keys."""

from __future__ import annotations

from recsdk_core._internal.checks import int_if_given, int_within
from recsdk_core.virtual_shards import NUM_VIRTUAL_SHARDS, default_eviction_groups

__all__ = ["groups_of"]


def groups_of(
    kind: str,
    max_rows: int | None,
    eviction_groups: int | None,
    owned_groups: tuple[int, int] | None,
) -> tuple[int | None, tuple[int, int] | None]:
    """`eviction_groups` and `owned_groups`; ValueError or TypeError, which names the wrong one."""
    if max_rows is None:
        for name, value in (("eviction_groups", eviction_groups), ("owned_groups", owned_groups)):
            if value is not None:
                raise ValueError(f"{kind}: {name} divides max_rows; set max_rows too")
        return None, None
    most = NUM_VIRTUAL_SHARDS + 1
    divided = int_if_given(kind, 1, most, eviction_groups=eviction_groups)
    if divided is not None and (divided & (divided - 1) or divided > max(max_rows, 1)):
        raise ValueError(
            f"{kind}: eviction_groups must be a power of two up to max_rows, {max_rows}, got "
            f"{divided}"
        )
    if owned_groups is None:
        return divided, None
    return divided, _owned(kind, divided or default_eviction_groups(max_rows), owned_groups)


def _owned(kind: str, num_groups: int, owned_groups: tuple[int, int]) -> tuple[int, int]:
    try:
        first, last = owned_groups
    except (TypeError, ValueError):
        got = repr(owned_groups)
        raise TypeError(f"{kind}: owned_groups must be (begin, end), got {got}") from None
    begin = int_within(kind, 0, num_groups + 1, **{"owned_groups[0]": first})
    end = int_within(kind, 0, num_groups + 1, **{"owned_groups[1]": last})
    if begin > end:
        raise ValueError(f"{kind}: owned_groups must be (begin, end), got {owned_groups}")
    return begin, end
