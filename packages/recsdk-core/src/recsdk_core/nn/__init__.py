"""Plain torch modules over tables of raw keys, trained in backward or by a `RowOptimizer`."""

from __future__ import annotations

from recsdk_core._internal.extras import require

require("torch", extra="torch", user="recsdk_core.nn")

import recsdk_core.nn.row_averages  # noqa: E402, F401
from recsdk_core.nn.bag_arguments import bag_offsets  # noqa: E402
from recsdk_core.nn.function import (  # noqa: E402
    FeatureBags,
    SharedTraining,
    TableBags,
    gather_features,
    pool_features,
)
from recsdk_core.nn.modules import HashEmbedding, HashEmbeddingBag  # noqa: E402
from recsdk_core.nn.penalties import l2  # noqa: E402
from recsdk_core.nn.row_optimizer import RowOptimizer  # noqa: E402
from recsdk_core.nn.serving_modules import (  # noqa: E402
    ServingEmbedding,
    ServingEmbeddingBag,
    freeze,
)
from recsdk_core.nn.serving_operators import close_exported  # noqa: E402

__all__ = [
    "FeatureBags",
    "HashEmbedding",
    "HashEmbeddingBag",
    "RowOptimizer",
    "ServingEmbedding",
    "ServingEmbeddingBag",
    "SharedTraining",
    "TableBags",
    "bag_offsets",
    "close_exported",
    "freeze",
    "gather_features",
    "l2",
    "pool_features",
]
