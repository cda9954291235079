"""Plans of hash tables that are made by hand, with torchrec's functions.

`construct_module_sharding_plan` and `apply_to_all` look for a module's sharder among torchrec's
own. So importing the package adds one that says which parameters of a hash collection to plan. It
needs no process group, and cannot shard; the sharders of `get_default_hybrid_sharders` do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torchrec.distributed import shard, sharding_plan
from torchrec.distributed.types import ModuleSharder

from recsdk_core.nn import HashEmbeddingBag
from recsdk_sharding._modules.sharders import planned_parameters
from recsdk_sharding._modules.single_bag import planned_parameter
from recsdk_sharding._modules.unsharded import HashEmbeddingBagCollection, HashEmbeddingCollection

__all__ = ["adapt_hand_plans"]


class _Planned(ModuleSharder[nn.Module]):  # type: ignore[misc]
    """A sharder that only says what to plan of a type of module."""

    def __init__(
        self, kind: type[nn.Module], parameters: Callable[[Any], dict[str, nn.Parameter]]
    ) -> None:
        super().__init__()
        self._kind = kind
        self._parameters = parameters

    @property
    def module_type(self) -> type[nn.Module]:
        return self._kind

    def shardable_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        return self._parameters(module)

    def shard(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Raises ValueError: it has no host group."""
        raise ValueError(
            f"{self._kind.__name__} is sharded over a host group: pass one of "
            "recsdk_sharding.get_default_hybrid_sharders(host_env=...) as sharder"
        )


def adapt_hand_plans() -> None:
    """Makes torchrec find the sharders for plans of hash tables."""
    adapted = _with_hash_modules(sharding_plan.get_module_to_default_sharders)
    sharding_plan.get_module_to_default_sharders = adapted
    shard.get_module_to_default_sharders = adapted


def _with_hash_modules(find: Callable[[], dict[Any, Any]]) -> Callable[[], dict[Any, Any]]:
    @functools.wraps(find)
    def adapted() -> dict[Any, Any]:
        return {
            **find(),
            HashEmbeddingBagCollection: _Planned(HashEmbeddingBagCollection, planned_parameters),
            HashEmbeddingCollection: _Planned(HashEmbeddingCollection, planned_parameters),
            HashEmbeddingBag: _Planned(HashEmbeddingBag, planned_parameter),
        }

    return adapted
