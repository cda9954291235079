"""Hash embedding tables for torchrec: modules, sharders and the exchange between ranks.

from recsdk_sharding import (
    HashEmbeddingBagCollection, HashEmbeddingBagConfig, get_default_hybrid_sharders,
)
"""

from __future__ import annotations

from recsdk_sharding._requirements import check_requirements

__version__ = "0.1.0"

check_requirements()

from recsdk_sharding._torchrec_compat import check_private_interfaces  # noqa: E402

check_private_interfaces()

from recsdk_sharding.configs import HashEmbeddingBagConfig  # noqa: E402
from recsdk_sharding.modules import HashEmbeddingBagCollection  # noqa: E402
from recsdk_sharding.npu import adapt_torchrec  # noqa: E402
from recsdk_sharding.sharded import ShardedHashEmbeddingBagCollection  # noqa: E402
from recsdk_sharding.sharders import (  # noqa: E402
    HashEmbeddingBagCollectionSharder,
    get_default_hybrid_sharders,
)

adapt_torchrec()

__all__ = [
    "HashEmbeddingBagCollection",
    "HashEmbeddingBagCollectionSharder",
    "HashEmbeddingBagConfig",
    "ShardedHashEmbeddingBagCollection",
    "__version__",
    "get_default_hybrid_sharders",
]
