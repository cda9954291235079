"""Makes all ranks raise where one cannot make its model.

torchrec's `DistributedModelParallel` shards on each rank by itself. Then the ranks meet, in torch's
DistributedDataParallel; if one has raised before, the others wait there until their process group
times out. So importing the package makes ranks that share hash tables meet once before, past it.
"""

from __future__ import annotations

import functools
from typing import Any

from torchrec.distributed.model_parallel import DistributedModelParallel

from recsdk_sharding.exchange.calls import open_call

__all__ = ["adapt_making"]


def adapt_making() -> None:
    """Makes ranks meet before torchrec makes a model data-parallel."""
    DistributedModelParallel.init_data_parallel = _meeting(
        DistributedModelParallel.init_data_parallel
    )


def _meeting(init_data_parallel: Any) -> Any:
    @functools.wraps(init_data_parallel)
    def adapted(self: Any) -> None:
        call = open_call()
        if call is not None:
            call.end()
        init_data_parallel(self)

    return adapted
