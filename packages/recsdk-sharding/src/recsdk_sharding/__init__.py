"""Hash embedding tables for torchrec: modules, sharders and the exchange between ranks.

from recsdk_sharding import (
    HashEmbeddingBagCollection, HashEmbeddingBagConfig, get_default_hybrid_sharders,
)
"""

from __future__ import annotations

from recsdk_sharding._compat.requirements import check_requirements, say_what_was_found

__version__ = "0.1.0"

check_requirements()

from recsdk_sharding._compat.private import (  # noqa: E402
    adapt_group_names,
    check_private_interfaces,
)

check_private_interfaces()
say_what_was_found()

from recsdk_sharding._adapt.data_parallel import adapt_data_parallel  # noqa: E402
from recsdk_sharding._adapt.dense_collections import adapt_dense_collections  # noqa: E402
from recsdk_sharding._adapt.feature_processors import adapt_feature_processors  # noqa: E402
from recsdk_sharding._adapt.hand_plans import adapt_hand_plans  # noqa: E402
from recsdk_sharding._adapt.models_together import adapt_making  # noqa: E402
from recsdk_sharding._adapt.npu import adapt_torchrec  # noqa: E402
from recsdk_sharding._adapt.npu_kernels import adapt_kernels  # noqa: E402
from recsdk_sharding._adapt.plans_together import adapt_collective_plans  # noqa: E402
from recsdk_sharding._adapt.quantizing import adapt_quantization  # noqa: E402
from recsdk_sharding._adapt.stock_pipelines import adapt_pipelines  # noqa: E402
from recsdk_sharding._batch.jagged_data import (  # noqa: E402
    JaggedTensorWithCount,
    JaggedTensorWithData,
    JaggedTensorWithTimestamp,
    KeyedJaggedTensorWithCount,
    KeyedJaggedTensorWithData,
    KeyedJaggedTensorWithTimestamp,
    with_clicks,
)
from recsdk_sharding._batch.output_dist import ExchangeStats  # noqa: E402
from recsdk_sharding._checkpoint.dcp import HashLoadPlanner, adapt_load_planner  # noqa: E402
from recsdk_sharding._checkpoint.migrate import export_rows, import_rows  # noqa: E402
from recsdk_sharding._checkpoint.saver import Saver  # noqa: E402
from recsdk_sharding._configs.configs import HashEmbeddingBagConfig, HashEmbeddingConfig  # noqa: E402
from recsdk_sharding._configs.upstream import (  # noqa: E402
    AdmitAndEvictConfig,
    AdmitAndEvictPolicyType,
    ShowClickParams,
)
from recsdk_sharding._modules.feature_processed import (  # noqa: E402
    HashFeatureProcessedEmbeddingBagCollectionSharder,
    ShardedHashFeatureProcessedEmbeddingBagCollection,
)
from recsdk_sharding._modules.quantized import (  # noqa: E402
    QuantHashEmbeddingBagCollection,
    QuantHashEmbeddingCollection,
)
from recsdk_sharding._modules.quantized_sharders import (  # noqa: E402
    QuantHashEmbeddingBagCollectionSharder,
    QuantHashEmbeddingCollectionSharder,
)
from recsdk_sharding._modules.sharded_bags import ShardedHashEmbeddingBagCollection  # noqa: E402
from recsdk_sharding._modules.sharded_quantized import (  # noqa: E402
    ShardedQuantHashEmbeddingBagCollection,
    ShardedQuantHashEmbeddingCollection,
)
from recsdk_sharding._modules.sharded_sequences import ShardedHashEmbeddingCollection  # noqa: E402
from recsdk_sharding._modules.sharders import (  # noqa: E402
    HashEmbeddingBagCollectionSharder,
    HashEmbeddingCollectionSharder,
    get_default_hybrid_sharders,
)
from recsdk_sharding._modules.single_bag import (  # noqa: E402
    HashEmbeddingBagSharder,
    ShardedHashEmbeddingBag,
)
from recsdk_sharding._modules.unsharded import (  # noqa: E402
    HashEmbeddingBagCollection,
    HashEmbeddingCollection,
)
from recsdk_sharding._rows.accumulate import (  # noqa: E402
    AccumulateAdagrad,
    AccumulateAdam,
    AccumulateSGD,
)
from recsdk_sharding._rows.home import RowTable  # noqa: E402
from recsdk_sharding._rows.optimizers import RowOptimizer  # noqa: E402
from recsdk_sharding.exchange.errors import PeerError  # noqa: E402
from recsdk_sharding.exchange.failures import failing_together  # noqa: E402
from recsdk_sharding.planning import (  # noqa: E402
    HashEmbeddingEnumerator,
    HashEmbeddingShardingPlanner,
    HashParameterConstraints,
    format_plan,
)
from recsdk_sharding.tensor_parallel import (  # noqa: E402
    TensorParallelWrapper,
    parallelize,
)

adapt_torchrec()
adapt_making()
adapt_group_names()
adapt_kernels()
adapt_hand_plans()
adapt_collective_plans()
adapt_quantization()
adapt_data_parallel()
adapt_dense_collections()
adapt_feature_processors()
adapt_pipelines()
adapt_load_planner()

__all__ = [
    "AccumulateAdagrad",
    "AccumulateAdam",
    "AccumulateSGD",
    "AdmitAndEvictConfig",
    "AdmitAndEvictPolicyType",
    "ExchangeStats",
    "HashEmbeddingBagCollection",
    "HashEmbeddingBagCollectionSharder",
    "HashEmbeddingBagConfig",
    "HashEmbeddingBagSharder",
    "HashEmbeddingCollection",
    "HashEmbeddingCollectionSharder",
    "HashEmbeddingConfig",
    "HashEmbeddingEnumerator",
    "HashEmbeddingShardingPlanner",
    "HashFeatureProcessedEmbeddingBagCollectionSharder",
    "HashLoadPlanner",
    "HashParameterConstraints",
    "JaggedTensorWithCount",
    "JaggedTensorWithData",
    "JaggedTensorWithTimestamp",
    "KeyedJaggedTensorWithCount",
    "KeyedJaggedTensorWithData",
    "KeyedJaggedTensorWithTimestamp",
    "PeerError",
    "QuantHashEmbeddingBagCollection",
    "QuantHashEmbeddingBagCollectionSharder",
    "QuantHashEmbeddingCollection",
    "QuantHashEmbeddingCollectionSharder",
    "RowOptimizer",
    "RowTable",
    "Saver",
    "ShardedHashEmbeddingBag",
    "ShardedHashEmbeddingBagCollection",
    "ShardedHashEmbeddingCollection",
    "ShardedHashFeatureProcessedEmbeddingBagCollection",
    "ShardedQuantHashEmbeddingBagCollection",
    "ShardedQuantHashEmbeddingCollection",
    "ShowClickParams",
    "TensorParallelWrapper",
    "__version__",
    "export_rows",
    "failing_together",
    "format_plan",
    "get_default_hybrid_sharders",
    "import_rows",
    "parallelize",
    "with_clicks",
]
