"""Feature processors in front of a sharded collection of hash tables.

Shape letters: N ids, of a feature or a batch; C columns.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext
from torchrec.distributed.fp_embeddingbag import (
    FeatureProcessedEmbeddingBagCollectionSharder,
    ShardedFeatureProcessedEmbeddingBagCollection,
)
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    ParameterSharding,
    ShardingEnv,
)
from torchrec.modules.feature_processor_ import FeatureProcessorsCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recsdk_sharding._batch.late_weights import tied
from recsdk_sharding._modules.failing import FailsTogether
from recsdk_sharding._modules.sharded_tables import check_sharder_of_bags
from recsdk_sharding._modules.unsharded import HashEmbeddingBagCollection
from recsdk_sharding.exchange import HostExchange
from recsdk_sharding.exchange.agreement import Agreement
from recsdk_sharding.exchange.calls import open_call

__all__ = [
    "HashFeatureProcessedEmbeddingBagCollectionSharder",
    "ShardedHashFeatureProcessedEmbeddingBagCollection",
    "weights_made",
]


@dataclass
class _Context(EmbeddingBagCollectionContext):  # type: ignore[misc]
    """One batch."""

    features: KeyedJaggedTensor | None = None
    """The input of the processors."""


class ShardedHashFeatureProcessedEmbeddingBagCollection(
    FailsTogether,
    ShardedFeatureProcessedEmbeddingBagCollection,  # type: ignore[misc]
):
    """A `FeatureProcessedEmbeddingBagCollection` of hash tables over several ranks.

    Each rank runs the processors on its own batch, in the model's forward, with the parameters of
    that step. The weights that they make then go to the ranks that have the ids, and their
    gradients come back. So any processor works with any sharding type, and a pipeline that looks
    ahead trains the same. A processor may set weights, but must not change ids. If one raises, all
    ranks raise in that step; for this every forward has a small collective on the host.
    """

    def __init__(
        self,
        module: FeatureProcessedEmbeddingBagCollection,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        ebc_sharder: Any,
        env: ShardingEnv,
        device: torch.device,
        module_fqn: str | None = None,
    ) -> None:
        super().__init__(
            module, table_name_to_parameter_sharding, ebc_sharder, env, device, module_fqn
        )
        self._embedding_bag_collection.send_weights_late()
        call = open_call()
        if call is not None:
            call.meet()
        self._agreement = Agreement(self.host_exchange.group)
        self._processed = frozenset(
            name
            for config in module._embedding_bag_collection.embedding_bag_configs()
            for name in config.feature_names
        )

    @property
    def host_exchange(self) -> HostExchange:
        """Where this module's host jobs run."""
        exchange: HostExchange = self._embedding_bag_collection.host_exchange
        return exchange

    def processor_parameters(self) -> list[nn.Parameter]:
        """The dense parameters that make weights."""
        return list(self._feature_processors.parameters())

    def data_taken(self) -> tuple[str, ...]:
        """As that of a collection."""
        taken: tuple[str, ...] = self._embedding_bag_collection.data_taken()
        return taken

    def create_context(self) -> _Context:
        """The context of a batch."""
        return _Context()

    def preprocess_input(
        self, args: list[Any], kwargs: Mapping[str, Any]
    ) -> tuple[list[Any], Mapping[str, Any]]:
        """Leaves the input as it is."""
        return args, kwargs

    def input_dist(self, ctx: _Context, features: KeyedJaggedTensor) -> Awaitable[Any]:
        """Starts the host work of a batch's ids."""
        ctx.features = features
        started: Awaitable[Any] = self._embedding_bag_collection.input_dist(ctx, features)
        return started

    def compute(self, ctx: _Context, dist_input: Any) -> list[torch.Tensor]:
        """Runs the processors, and pools the ids with the weights that they make."""
        assert ctx.features is not None
        features, step = ctx.features, ctx.sharding_contexts[0].done.step
        features.length_per_key()  # the batch keeps it: on the device it would be waited for
        weights_N = self._agreement.together(
            lambda: self._weights(features.to(self._device, non_blocking=True)), step
        )
        for context in ctx.sharding_contexts:
            context.own_weights = weights_N
        pooled: list[torch.Tensor] = self._embedding_bag_collection.compute(ctx, dist_input)
        return pooled

    def output_dist(self, ctx: _Context, output: list[torch.Tensor]) -> LazyAwaitable[KeyedTensor]:
        """Starts the return of the results."""
        return self._embedding_bag_collection.output_dist(ctx, output)

    def _weights(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """The weights of all ids of a batch, float32 (N,)."""
        parts = weights_made(self._feature_processors, self._processed, features)
        # Every parameter is in the graph on every rank, as DistributedDataParallel needs it.
        return tied(torch.cat(parts), self.processor_parameters())


def weights_made(
    processors: Any, names: Collection[str], features: KeyedJaggedTensor
) -> list[torch.Tensor]:
    """The weights that processors make for the ids of each feature, float32; 1 but for `names`.

    Raises ValueError if they change ids, or make none for some.
    """
    is_collection = isinstance(processors, FeatureProcessorsCollection)
    return (_of_all if is_collection else _of_each)(processors, names, features)


def _of_all(
    processors: Any, names: Collection[str], features: KeyedJaggedTensor
) -> list[torch.Tensor]:
    """One processor makes them for all features."""
    made = processors(features)
    weights = made.weights_or_none()
    is_same = made.values() is features.values() and made.keys() == features.keys()
    given = _split(features.values(), features)
    values = given if is_same else _split(made.values(), made)
    ids_of = dict(zip(made.keys(), values, strict=True))
    found = {} if weights is None else dict(zip(made.keys(), _split(weights, made), strict=True))
    return [
        _checked(name, ids_N, ids_of.get(name), found.get(name))
        if name in names
        else torch.ones(len(ids_N), dtype=torch.float32, device=ids_N.device)
        for name, ids_N in zip(features.keys(), given, strict=True)
    ]


def _of_each(
    processors: Any, names: Collection[str], features: KeyedJaggedTensor
) -> list[torch.Tensor]:
    """Each feature has a processor."""
    weights = features.weights_or_none()
    given = zip(
        features.keys(),
        _split(features.values(), features),
        features.lengths().split_with_sizes(features.stride_per_key()),
        [None] * len(features.keys()) if weights is None else _split(weights, features),
        strict=True,
    )
    parts = []
    for name, ids_N, lengths, weights_N in given:
        if name not in names:
            parts.append(torch.ones(len(ids_N), dtype=torch.float32, device=ids_N.device))
            continue
        jagged = JaggedTensor(values=ids_N, lengths=lengths, weights=weights_N)
        made = processors[name](jagged)
        parts.append(_checked(name, ids_N, made.values(), made.weights_or_none()))
    return parts


def _split(values: torch.Tensor, features: KeyedJaggedTensor) -> Sequence[torch.Tensor]:
    parts: Sequence[torch.Tensor] = values.split_with_sizes(features.length_per_key())
    return parts


def _checked(
    name: str, ids_N: torch.Tensor, made_N: torch.Tensor | None, weights_N: torch.Tensor | None
) -> torch.Tensor:
    """The weights that a processor has made."""
    if weights_N is None or weights_N.shape != ids_N.shape:
        got = "none" if weights_N is None else f"a tensor of shape {tuple(weights_N.shape)}"
        raise ValueError(
            f"feature {name!r}: its processor must make a weight for each of {len(ids_N)} ids, "
            f"got {got}"
        )
    if made_N is None or (made_N is not ids_N and not torch.equal(made_N, ids_N)):
        raise ValueError(
            f"feature {name!r}: its processor changed the ids, which have gone to the ranks that "
            "own them; it may set weights only"
        )
    return weights_N.to(torch.float32)


class HashFeatureProcessedEmbeddingBagCollectionSharder(
    FeatureProcessedEmbeddingBagCollectionSharder  # type: ignore[misc]
):
    """Shards feature processors in front of hash tables; in front of torchrec's, as torchrec does.

    Parameters of processors train as dense ones: each rank has the gradients of its own loss.
    """

    def __init__(self, hash_sharder: Any, stock: FeatureProcessedEmbeddingBagCollectionSharder):
        """`hash_sharder` shards the hash collection; `stock` is for torchrec's tables.

        Raises TypeError for other sharders.
        """
        check_sharder_of_bags("hash_sharder", hash_sharder)
        if not isinstance(stock, FeatureProcessedEmbeddingBagCollectionSharder):
            raise TypeError(
                "stock must be torchrec's FeatureProcessedEmbeddingBagCollectionSharder, got "
                f"{type(stock).__name__}"
            )
        super().__init__(hash_sharder, stock.qcomm_codecs_registry)
        self._stock = stock

    def shard(
        self,
        module: FeatureProcessedEmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedFeatureProcessedEmbeddingBagCollection:
        """The sharded module. Raises ValueError for a plan, device or group that does not fit."""
        if not _has_hash_tables(module):
            return self._stock.shard(module, params, env, device, module_fqn)
        return ShardedHashFeatureProcessedEmbeddingBagCollection(
            module, params, self._ebc_sharder, env, device or torch.device("cpu"), module_fqn
        )

    def shardable_parameters(
        self, module: FeatureProcessedEmbeddingBagCollection
    ) -> dict[str, nn.Parameter]:
        """The parameters of the tables, for the planner."""
        sharder = self._ebc_sharder if _has_hash_tables(module) else self._stock._ebc_sharder
        found: dict[str, nn.Parameter] = sharder.shardable_parameters(
            module._embedding_bag_collection
        )
        return found

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Those of hash tables."""
        types: list[str] = self._ebc_sharder.sharding_types(compute_device_type)
        return types

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Those of hash tables."""
        kernels: list[str] = self._ebc_sharder.compute_kernels(sharding_type, compute_device_type)
        return kernels


def _has_hash_tables(module: FeatureProcessedEmbeddingBagCollection) -> bool:
    return isinstance(module._embedding_bag_collection, HashEmbeddingBagCollection)
