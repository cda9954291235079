"""Keeps torchrec from turning hash tables into its collections of dense tables.

The configs of hash tables are torchrec's with fields of their own. So torchrec's collections would
silently take them for dense tables with a row for each id, and `fuse_embedding_optimizer` would
replace hash collections by such collections. Importing the package makes these collections refuse
the configs of hash tables, whoever makes them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
)
from torchrec.modules.mc_modules import ManagedCollisionCollection

from recsdk_sharding._configs.configs import HashTableConfig

__all__ = ["adapt_dense_collections"]

_FUSED = (
    "leave fuse_embedding_optimizer out, and give the hash collection's parameters to "
    "apply_optimizer_in_backward"
)
_COLLECTIONS: Mapping[type, tuple[str, str]] = {
    EmbeddingBagCollection: ("tables", "make a HashEmbeddingBagCollection of it"),
    EmbeddingCollection: ("tables", "make a HashEmbeddingCollection of it"),
    FusedEmbeddingBagCollection: ("tables", _FUSED),
    FusedEmbeddingCollection: ("tables", _FUSED),
    ManagedCollisionCollection: (
        "embedding_configs",
        "give a hash collection the raw ids as they are",
    ),
}
"""Which argument has the configs, and what to do instead."""


def adapt_dense_collections() -> None:
    """Makes torchrec's collections raise ValueError for configs of hash tables."""
    for kind, (argument, advice) in _COLLECTIONS.items():
        kind.__init__ = _checking(kind.__init__, argument, advice)  # type: ignore[misc]


def _checking(make: Callable[..., None], argument: str, advice: str) -> Callable[..., None]:
    signature = inspect.signature(make)

    @functools.wraps(make)
    def adapted(self: Any, *args: Any, **kwargs: Any) -> None:
        for table in signature.bind(self, *args, **kwargs).arguments[argument]:
            if isinstance(table, HashTableConfig):
                raise ValueError(
                    f"table {table.name!r}: a {type(self).__name__} has dense tables, and "
                    f"{type(table).__name__} is for a hash table; {advice}"
                )
        make(self, *args, **kwargs)

    return adapted
