"""What `torch.utils.checkpoint` does to a lookup: it makes it again in backward."""

from __future__ import annotations

from collections.abc import Iterable

from recsdk_sharding._compat.private import is_in_backward

__all__ = ["refuse_recomputing"]


def refuse_recomputing(tables: Iterable[str]) -> None:
    """Raises RuntimeError in backward: a batch looked up again would be another step of tables."""
    if is_in_backward():
        raise RuntimeError(
            f"tables {list(tables)}: a backward looks a batch up again, as torch.utils.checkpoint "
            "makes it do; in training that would count its ids twice: call the collection outside "
            "of the checkpoint, and pass its vectors in"
        )
