"""A single `HashEmbeddingBag`, sharded over ranks.

Shape letters: N keys, B bags, L keys of each bag, D row width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding_types import BaseEmbeddingSharder, ShardedEmbeddingModule
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    ParameterSharding,
    ShardingEnv,
)
from torchrec.distributed.utils import append_prefix
from torchrec.modules.embedding_configs import PoolingType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recsdk_core
from recsdk_core.nn import HashEmbeddingBag, bag_offsets
from recsdk_core.nn.bag_arguments import require_tensor
from recsdk_core.nn.row_entries import rows_of
from recsdk_sharding._batch.jagged_data import KeyedJaggedTensorWithData
from recsdk_sharding._batch.uncompiled import uncompiled
from recsdk_sharding._configs.checking import int_of
from recsdk_sharding._configs.configs import DTYPES, HashEmbeddingBagConfig
from recsdk_sharding._configs.data_taken import DTYPES as DATA_TYPES
from recsdk_sharding._modules.failing import FailsTogether, Results
from recsdk_sharding._modules.sharded_tables import check_sharder_of_bags
from recsdk_sharding._modules.unsharded import HashEmbeddingBagCollection
from recsdk_sharding._rows.optimizers import RowOptimizer
from recsdk_sharding.placement.devices import check_device

__all__ = ["HashEmbeddingBagSharder", "ShardedHashEmbeddingBag", "planned_parameter"]

_PLANNED_ROWS = 1_000_000
_FEATURE = "keys"


@dataclass
class _TableConfig(HashEmbeddingBagConfig):
    """The config of a table that was made without one."""

    template: recsdk_core.Table | None = None
    """An empty table, for what a config does not say."""

    def make_table(
        self,
        optimizer: recsdk_core.optim.Optimizer,
        owned_groups: tuple[int, int] | None,
        columns: tuple[int, int],
        **limits: Any,
    ) -> recsdk_core.Table:
        """An empty table for a shard."""
        assert self.template is not None
        return self.template.empty_copy(
            dim=columns[1] - columns[0],
            optimizer=optimizer,
            owned_groups=None if self.max_rows is None else owned_groups,
            initializer=self.initializer_of(columns),
            **limits,
        )


def _collection_of(bag: HashEmbeddingBag) -> HashEmbeddingBagCollection:
    """A collection of one feature with the same table, rows and optimizer."""
    table = bag.table
    data_types = {name: data_type for data_type, name in DTYPES.items()}
    config = _TableConfig(
        name=table.name,
        embedding_dim=table.dim,
        num_embeddings=_planned_rows(bag),
        feature_names=[_FEATURE],
        pooling=PoolingType.MEAN if bag.mode == "mean" else PoolingType.SUM,
        data_type=data_types[table.dtype],
        seed=table.seed,
        max_rows=table.max_rows,
        eviction_groups=table.eviction_groups,
        eviction=table.eviction,
        admission=table.admission,
        default=table.default,
        accumulate_steps=bag.accumulate_steps,
        on_full=table.on_full,
        initializer=table.initializer,
        on_nonfinite=table.on_nonfinite,
        template=table.empty_copy(),
    )
    made = HashEmbeddingBagCollection([config], is_weighted=True)
    apply_optimizer_in_backward(RowOptimizer, made.parameters(), {"settings": table.optimizer})
    made.requires_grad_(bag.weight.requires_grad)
    (rows,) = made.embedding_bags.values()
    rows.home.replace_rows([(rows.shards[0].held, rows_of(table))])
    made.train(bag.training)
    return made


def _planned_rows(bag: HashEmbeddingBag) -> int:
    if bag.num_embeddings is not None:
        return bag.num_embeddings
    return max(1, _PLANNED_ROWS if bag.table.max_rows is None else bag.table.max_rows)


class ShardedHashEmbeddingBag(
    FailsTogether,
    ShardedEmbeddingModule[Any, Any, torch.Tensor, EmbeddingBagCollectionContext],  # type: ignore[misc]
):
    """A `recsdk_core.nn.HashEmbeddingBag` over several ranks; made by its sharder.

    Each rank passes its own bags, as to the unsharded module, and gets their vectors. Inside is a
    collection of one feature, `collection`, whose state is in `state_dict()`. Weights get their
    gradient.
    """

    def __init__(self, bag: HashEmbeddingBag, collection: Any) -> None:
        """`collection`: the sharded collection of the bag's table."""
        super().__init__()
        self.collection = collection
        self._include_last_offset = bag.include_last_offset
        self._lookups = collection._lookups

    @property
    def host_exchange(self) -> Any:
        """Where this module's host jobs run."""
        return self.collection.host_exchange

    def set_time(self, time: int) -> None:
        """The time of batches from now on, as that of a collection."""
        self.collection.set_time(time)

    def create_context(self) -> EmbeddingBagCollectionContext:
        """The context of a batch."""
        return self.collection.create_context()

    @uncompiled
    def input_dist(
        self,
        ctx: EmbeddingBagCollectionContext,
        keys: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
        times: torch.Tensor | int | None = None,
        scores: torch.Tensor | None = None,
        counts: torch.Tensor | int | None = None,
        clicks: torch.Tensor | int | None = None,
    ) -> Awaitable[Any]:
        """Starts the host work: keys (N,) with offsets, or (B, L) without; weights likewise.

        `times`, `scores`, `counts` and `clicks` as those of the unsharded module. Raises ValueError
        or TypeError for offsets and shapes that do not fit; the other ranks then raise PeerError.
        """
        try:
            data = {"times": times, "scores": scores, "counts": counts, "clicks": clicks}
            features = self._features(keys, offsets, per_sample_weights, data)
        except Exception as error:
            self.host_exchange.announce_failure(error)
            raise
        started: Awaitable[Any] = self.collection.input_dist(ctx, features)
        return started

    def _features(
        self,
        keys: torch.Tensor,
        offsets: torch.Tensor | None,
        weights: torch.Tensor | None,
        data: dict[str, Any],
    ) -> KeyedJaggedTensor:
        lengths = _lengths(keys, offsets, self._include_last_offset)
        if weights is None:
            weights = torch.ones(keys.shape, dtype=torch.float32, device=keys.device)
        require_tensor("per_sample_weights", weights)
        if weights.shape != keys.shape:
            raise ValueError(
                f"per_sample_weights must have the shape of keys, {tuple(keys.shape)}, got "
                f"{tuple(weights.shape)}"
            )
        return KeyedJaggedTensorWithData(
            keys=[_FEATURE],
            values=keys.reshape(-1),
            weights=weights.reshape(-1),
            lengths=lengths,
            **{name: _of_all(name, keys, given) for name, given in data.items()},
        )

    def compute(self, ctx: EmbeddingBagCollectionContext, dist_input: Any) -> list[torch.Tensor]:
        """The vectors that this rank pools."""
        pooled: list[torch.Tensor] = self.collection.compute(ctx, dist_input)
        return pooled

    def output_dist(
        self, ctx: EmbeddingBagCollectionContext, output: list[torch.Tensor]
    ) -> LazyAwaitable[torch.Tensor]:
        """Starts the return of the results."""
        pooled = self.collection.output_dist(ctx, output)
        return Results(lambda: pooled.wait().values(), self.host_exchange)

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """All of its parameters."""
        for name, _ in self.named_parameters():
            yield append_prefix(prefix, name)

    @property
    def unsharded_module_type(self) -> type[HashEmbeddingBag]:
        """The type of the unsharded module."""
        return HashEmbeddingBag


def _of_all(name: str, keys: torch.Tensor, given: torch.Tensor | int | None) -> torch.Tensor | None:
    """What comes with each key, (N,), if it is one for all too."""
    if given is None:
        return None
    if isinstance(given, torch.Tensor) and (given.dim() > 0 or name == "scores"):
        if given.shape != keys.shape:
            raise ValueError(
                f"{name} must have the shape of keys, {tuple(keys.shape)}, got {tuple(given.shape)}"
            )
        return given.reshape(-1)
    if name == "scores":
        raise TypeError(f"scores must be a tensor of {DATA_TYPES[name]}, got {given!r}")
    number = int_of(f"{name}, unless it is a tensor of {DATA_TYPES[name]},", given)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{name} must be in [-2**63, 2**63), got {number}")
    return torch.full((keys.numel(),), number, device=keys.device)


def _lengths(
    keys: torch.Tensor, offsets: torch.Tensor | None, include_last_offset: bool
) -> torch.Tensor:
    """Keys of each bag; raises for offsets that the unsharded module refuses too."""
    found = bag_offsets(keys, offsets, include_last_offset)
    ends, num_keys = found.cpu(), keys.numel()
    if not len(ends) or ends[0] != 0 or ends[-1] != num_keys:
        got = f"{int(ends[0])} to {int(ends[-1])}" if len(ends) else "none"
        raise ValueError(
            f"offsets must run from 0 to the number of keys, {num_keys}, got {got}; pass where "
            "each bag begins"
        )
    below = (ends.diff() < 0).nonzero()
    if len(below):
        place = int(below[0]) + 1
        raise ValueError(
            f"offsets must not descend, got {int(ends[place])} after {int(ends[place - 1])} at "
            f"{place}; pass them in ascending order"
        )
    return found.diff()


class HashEmbeddingBagSharder(BaseEmbeddingSharder[HashEmbeddingBag]):  # type: ignore[misc]
    """Shards a `recsdk_core.nn.HashEmbeddingBag`, by any sharding type of its collection.

    It is planned under the name of its table, with `num_embeddings` rows if it has that, else with
    `max_rows`, or a million without a limit.
    It keeps the rows that it has. On a device it needs `max_rows`, which sets its memory.
    """

    def __init__(self, collection_sharder: Any) -> None:
        """`collection_sharder` shards the `HashEmbeddingBagCollection`; TypeError for others."""
        check_sharder_of_bags("collection_sharder", collection_sharder)
        super().__init__(qcomm_codecs_registry=collection_sharder.qcomm_codecs_registry)
        self._sharder = collection_sharder

    def shard(
        self,
        module: HashEmbeddingBag,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedHashEmbeddingBag:
        """The sharded module.

        Raises TypeError or ValueError for a module, plan, device or group that does not fit.
        """
        _check_bag(module)
        made_on = check_device(device, type(self).__name__)
        module.check_named()
        module.check_shardable()
        if module.mode == "max":
            raise ValueError(
                f"table {module.table.name!r}: mode='max' is of modules on one process; take 'sum' "
                "or 'mean' to spread the table over ranks"
            )
        table = module.table
        if made_on.type != "cpu":
            _check_for_device(table)
        collection = self._sharder.shard(_collection_of(module), params, env, made_on, module_fqn)
        made = ShardedHashEmbeddingBag(module, collection)
        made.train(module.training)
        return made

    def shardable_parameters(self, module: HashEmbeddingBag) -> dict[str, nn.Parameter]:
        """A meta tensor (planned rows, D), by the table's name."""
        _check_bag(module)
        return planned_parameter(module)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Those of a collection."""
        types: list[str] = self._sharder.sharding_types(compute_device_type)
        return types

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Those of a collection."""
        kernels: list[str] = self._sharder.compute_kernels(sharding_type, compute_device_type)
        return kernels

    @property
    def module_type(self) -> type[HashEmbeddingBag]:
        """The type of module that it shards."""
        return HashEmbeddingBag


def _check_bag(module: Any) -> None:
    if not isinstance(module, HashEmbeddingBag):
        raise TypeError(
            "HashEmbeddingBagSharder: module must be a HashEmbeddingBag, got "
            f"{type(module).__name__}"
        )


def planned_parameter(module: HashEmbeddingBag) -> dict[str, nn.Parameter]:
    """A meta tensor (planned rows, D), by the table's name, as if it were trained."""
    table = module.table
    planned = nn.Parameter(
        torch.empty(_planned_rows(module), table.dim, dtype=torch.float32, device="meta")
    )
    planned.__dict__["_in_backward_optimizers"] = []  # for plans made by hand
    return {table.name: planned}


def _check_for_device(table: recsdk_core.Table) -> None:
    if table.max_rows is None:
        raise ValueError(
            f"table {table.name!r}: a HashEmbeddingBag needs max_rows to be sharded on a device, "
            "since its memory there is taken at once"
        )
