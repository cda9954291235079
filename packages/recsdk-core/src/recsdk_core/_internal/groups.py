"""How `max_rows` divides over groups of keys."""

from __future__ import annotations

from recsdk_core._internal.checks import require_int
from recsdk_core.virtual_shards import NUM_VIRTUAL_SHARDS, default_eviction_groups

__all__ = ["require_groups"]


def require_groups(
    kind: str,
    max_rows: int | None,
    eviction_groups: int | None,
    owned_groups: tuple[int, int] | None,
) -> None:
    """Raises ValueError or TypeError naming the argument that is wrong."""
    if max_rows is None:
        for name, value in (("eviction_groups", eviction_groups), ("owned_groups", owned_groups)):
            if value is not None:
                raise ValueError(f"{kind}: {name} divides max_rows; set max_rows too")
        return
    if eviction_groups is not None:
        require_int(kind, 1, NUM_VIRTUAL_SHARDS + 1, eviction_groups=eviction_groups)
        if eviction_groups & (eviction_groups - 1) or eviction_groups > max(max_rows, 1):
            raise ValueError(
                f"{kind}: eviction_groups must be a power of two up to max_rows, {max_rows}, got "
                f"{eviction_groups}"
            )
    if owned_groups is None:
        return
    num_groups = eviction_groups or default_eviction_groups(max_rows)
    try:
        begin, end = owned_groups
    except (TypeError, ValueError):
        got = repr(owned_groups)
        raise TypeError(f"{kind}: owned_groups must be (begin, end), got {got}") from None
    require_int(kind, 0, num_groups + 1, **{"owned_groups[0]": begin, "owned_groups[1]": end})
    if begin > end:
        raise ValueError(f"{kind}: owned_groups must be (begin, end), got {owned_groups}")
