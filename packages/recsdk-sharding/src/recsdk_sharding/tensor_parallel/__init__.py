"""Dense layers cut over ranks, beside sharded tables in one model.

`parallelize` does all of it; `TensorParallelWrapper` is for models that call torch's
`parallelize_module` and torchrec's `DistributedModelParallel` themselves.
"""

from __future__ import annotations

from recsdk_sharding.tensor_parallel.parallelize import parallelize
from recsdk_sharding.tensor_parallel.wrapper import TensorParallelWrapper

__all__ = ["TensorParallelWrapper", "parallelize"]
