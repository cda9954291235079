"""Keeps torchrec 1.6 from wrapping our replicated tables in DistributedDataParallel.

Gradients of replicated tables travel with the results. Later releases of torchrec wrap lookups in
a method, which our modules override; 1.6 does it in the constructor of its sharded modules.
"""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import embedding, embeddingbag

from recsdk_sharding._batch.lookup import HashLookup
from recsdk_sharding._compat.private import TORCHREC

__all__ = ["adapt_data_parallel"]


class _Wrapper(DistributedDataParallel):
    """torch's own, but a lookup of hash tables is left as it is."""

    def __new__(cls, module: Any, *args: Any, **kwargs: Any) -> Any:
        return module if isinstance(module, HashLookup) else super().__new__(cls)


def adapt_data_parallel() -> None:
    """Makes torchrec 1.6 leave lookups of hash tables as they are; later ones need nothing."""
    if TORCHREC < (1, 7):
        modules: tuple[Any, ...] = (embedding, embeddingbag)
        for module in modules:
            module.DistributedDataParallel = _Wrapper
