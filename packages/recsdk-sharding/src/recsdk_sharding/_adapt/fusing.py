"""torchrec's fused collections, which hash tables must not become.

torchrec's `fuse_embedding_optimizer` takes hash collections for its own, and would put dense tables
with a row for each id in their place, without a word. Importing the package therefore has the
fused collections refuse the configs of hash tables, whoever makes them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torchrec.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
)

from recsdk_sharding._configs.configs import HashTableConfig

__all__ = ["adapt_fused_collections"]


def adapt_fused_collections() -> None:
    """Has torchrec's fused collections raise ValueError for configs of hash tables."""
    for kind in (FusedEmbeddingBagCollection, FusedEmbeddingCollection):
        kind.__init__ = _checking(kind.__init__)


def _checking(make: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(make)
    def adapted(self: Any, tables: Any, *args: Any, **kwargs: Any) -> None:
        for table in tables:
            if isinstance(table, HashTableConfig):
                raise ValueError(
                    f"table {table.name!r}: a {type(self).__name__} has dense tables, which would "
                    "replace the hash table; leave fuse_embedding_optimizer out, and give the hash "
                    "collection's parameters to apply_optimizer_in_backward"
                )
        make(self, tables, *args, **kwargs)

    return adapted
