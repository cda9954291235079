"""What the sharded collections have in common, pooled or not.

Shape letters: G bags of a feature, D width of its vectors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.types import (
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
)
from torchrec.modules.embedding_configs import EmbeddingTableConfig, PoolingType
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from recsdk_core.batch_leases import note_lookup
from recsdk_core.nn.function import end_failed_backward
from recsdk_sharding._batch.awaitables import StartedInputs
from recsdk_sharding._batch.context import HashShardingContext, HostGroup
from recsdk_sharding._batch.input_dist import HostDist, start_batch
from recsdk_sharding._batch.key_data import require_time
from recsdk_sharding._batch.late_weights import exchange_weights, tied
from recsdk_sharding._batch.outcomes import KeepsOutcomes
from recsdk_sharding._batch.output_dist import (
    ExchangeStats,
    HashOutputDist,
    Transfer,
    return_results,
)
from recsdk_sharding._batch.repeats import of_samples
from recsdk_sharding._batch.uncompiled import uncompiled
from recsdk_sharding._configs.checking import int_of
from recsdk_sharding._configs.configs import HashTableConfig
from recsdk_sharding._configs.data_taken import DTYPES
from recsdk_sharding._modules.failing import FailsTogether
from recsdk_sharding._modules.recomputing import refuse_recomputing
from recsdk_sharding._modules.sharding_types import HashSharding, make_sharding
from recsdk_sharding._modules.unsharded import HashEmbeddingBagCollection, HashEmbeddingCollection
from recsdk_sharding._rows.home import RowTable
from recsdk_sharding._rows.in_use import TablesInUse
from recsdk_sharding._rows.rows import TableRows
from recsdk_sharding.exchange import HostExchange
from recsdk_sharding.exchange.failures import failing_together
from recsdk_sharding.placement.devices import wait_for

__all__ = [
    "HashGroups",
    "ShardedTables",
    "bags_of_samples",
    "check_sharder_of_bags",
    "configs_of",
    "late_divisors",
]


@dataclass(frozen=True)
class HashGroups:
    """The groups of tables that are sharded alike."""

    shardings: list[HashSharding]
    positions: list[list[int]]
    """For each group's features the position among the module's, table by table."""

    @staticmethod
    def of_shardings(
        shardings: Sequence[HashSharding], configs: Sequence[HashTableConfig]
    ) -> HashGroups:
        """The groups of a module with these tables."""
        first_of: dict[str, int] = {}
        count = 0
        for config in configs:
            first_of[config.name] = count
            count += len(config.feature_names)
        positions = [
            [first_of[t.name] + index for t in s.layout.tables for index in range(len(t.features))]
            for s in shardings
        ]
        return HashGroups(list(shardings), positions)

    def parts_of(self, results: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Each group's results, for the module's features."""
        return [[results[position] for position in group] for group in self.positions]

    def of_features(self, values: Sequence[Sequence[Any]]) -> list[Any]:
        """A value for each feature of the module, from those of each group's features."""
        found: dict[int, Any] = {}
        for group, of_group in zip(self.positions, values, strict=True):
            found.update(zip(group, of_group, strict=True))
        return [found[position] for position in range(len(found))]


def configs_of(module: HashEmbeddingBagCollection | HashEmbeddingCollection) -> list[Any]:
    """The configs of a collection's tables."""
    if isinstance(module, HashEmbeddingBagCollection):
        return list(module.embedding_bag_configs())
    return list(module.embedding_configs())


def check_sharder_of_bags(what: str, sharder: Any) -> None:
    """Raises TypeError for what is no sharder of `HashEmbeddingBagCollection`."""
    if getattr(sharder, "module_type", None) is not HashEmbeddingBagCollection:
        raise TypeError(
            f"{what} must be a HashEmbeddingBagCollectionSharder, got {type(sharder).__name__}"
        )


class ShardedTables(FailsTogether, KeepsOutcomes):
    """Mixed into torchrec's sharded collections."""

    training: bool
    _device: torch.device
    _host: HostGroup
    _unsharded_rows: Mapping[str, TableRows]
    _rows_by_name: dict[str, TableRows]
    _lookups: list[Any]
    _input_dists: list[HostDist]
    _output_dists: list[HashOutputDist]
    _sharding_types: list[str]
    _groups: HashGroups
    _is_sequence: bool

    def __init__(
        self,
        module: HashEmbeddingBagCollection | HashEmbeddingCollection,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        host: HostGroup,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        module_fqn: str | None = None,
        **options: Any,
    ) -> None:
        """`options`: further arguments of torchrec's class."""
        # Torchrec's constructor calls the factories; a module takes plain attributes before it.
        self._host = host
        host.exchange.note_module()
        self._configs = configs_of(module)
        self._unsharded_rows = {rows.config.name: rows for rows in module._rows()}
        self._rows_by_name = {}
        self._weights_ids = isinstance(module, HashEmbeddingBagCollection) and module.is_weighted()
        super().__init__(  # type: ignore[call-arg]
            module=module,
            table_name_to_parameter_sharding=table_name_to_parameter_sharding,
            env=env,
            device=device or torch.device("cpu"),
            qcomm_codecs_registry=qcomm_codecs_registry,
            module_fqn=module_fqn,
            **options,
        )
        shardings = self._shardings()
        for sharding in shardings:
            # Also torchrec's set_ec_index_dedup asks for it.
            sharding.drop_duplicates(getattr(self, "_use_index_dedup", False))
        self._input_dists = [sharding.create_input_dist() for sharding in shardings]
        self._has_uninitialized_input_dist = False
        self._in_use = TablesInUse(self._own_rows())
        self.keep_outcomes(module._keeps_outcomes)
        self._complete()

    def _complete(self) -> None:
        """The last of construction."""

    def _shardings(self) -> list[HashSharding]:
        """The sharding of each group of tables."""
        raise NotImplementedError

    @property
    def host_exchange(self) -> HostExchange:
        """Where this module's host jobs run."""
        return self._host.exchange

    def tables(self) -> dict[str, RowTable]:
        """This rank's shards of the tables: export, len, stats.

        By name of the table, with `.columns_<first>_<last>` if the shard has only some columns.
        Tables without a shard on this rank are left out.
        """
        return {shard.name: shard.table for rows in self._own_rows() for shard in rows.shards}

    def keep_outcomes(self, is_kept: bool = True) -> None:
        super().keep_outcomes(is_kept)
        for dist in self._input_dists:
            dist.wants_outcomes = is_kept

    def data_taken(self) -> tuple[str, ...]:
        """What rules of the tables take of what comes with ids, by name of `KeyData`."""
        taken = {name for config in self._configs for name in config.data_taken}
        return tuple(name for name in DTYPES if name in taken)

    def set_time(self, time: int) -> None:
        """Sets the time, in any unit, from the next training batch on that `input_dist` takes.

        For tables with `Evict.lru(by="time")`, and ids that have no times of their own, see
        `KeyedJaggedTensorWithData`; later times of ids move it on. The latest of all ranks' times
        counts for a batch. Tables, and saves of them, have it once that batch is mapped.
        Raises TypeError or ValueError for what is no int64.
        """
        for dist in self._input_dists:
            dist.set_time(require_time(time))

    def looks_next(self) -> bool:
        """Whether the next training batch begins with a look at norms, see `Evict.low_norm`.

        All batches before it must have been trained before `input_dist` takes it.
        """
        return any(dist.looks_next() for dist in self._input_dists)

    def send_weights_late(self) -> None:
        """From now on weights of ids do not come with the batch; they are set before `compute`."""
        for dist in self._input_dists:
            dist.sends_weights_late = True

    def stats(self) -> dict[str, ExchangeStats]:
        """The bytes that this rank has sent to other ranks so far, by sharding type."""
        parts = zip(self._sharding_types, self._input_dists, self._output_dists, strict=True)
        return {name: output.stats_with(host.bytes_sent) for name, host, output in parts}

    def require_equal_batches(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Makes all ranks refuse batches that differ in size within a group of ranks.

        Raises TypeError or ValueError for what are no groups of ranks.
        """
        found = _groups_of_ranks(groups, self.host_exchange.world_size)
        for dist in self._input_dists:
            dist.equal_batches = list(found)

    def _own_rows(self) -> list[TableRows]:
        return [self._rows_by_name[name] for name in self._unsharded_rows]

    def create_grouped_sharding_infos(
        self,
        module: Any,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, list[EmbeddingShardingInfo]]:
        """The tables by sharding type, without the arguments of fbgemm's kernels."""
        grouped: dict[str, list[EmbeddingShardingInfo]] = {}
        names = get_embedding_names_by_table(self._configs)
        for config, embedding_names in zip(self._configs, names, strict=True):
            sharding = table_name_to_parameter_sharding[config.name]
            info = EmbeddingShardingInfo(
                embedding_config=EmbeddingTableConfig(
                    num_embeddings=config.num_embeddings,
                    embedding_dim=config.embedding_dim,
                    name=config.name,
                    feature_names=list(config.feature_names),
                    pooling=PoolingType.SUM,  # ranks' shards are added; means are taken at the end
                    embedding_names=list(embedding_names),
                ),
                param_sharding=sharding,
                param=self._unsharded_rows[config.name].weight,
            )
            grouped.setdefault(sharding.sharding_type, []).append(info)
        return grouped

    def _create_sharding(
        self,
        infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None,
        codecs: Any,
    ) -> Any:
        """The sharding of one group of tables, and this rank's rows of them."""
        sharding = make_sharding(infos, env, device, codecs, is_sequence=self._is_sequence)
        whole = [self._unsharded_rows[info.embedding_config.name] for info in infos]
        sharding.attach(self._host, [rows.config for rows in whole], self._weights_ids)
        made = sharding.make_rows(device)
        for rows in whole:
            made[rows.config.name].take_rows_of(rows)
        self._rows_by_name.update(made)
        return sharding

    def _create_output_dist(self) -> None:
        shardings = self._shardings()
        self._output_dists = [sharding.create_output_dist(self._device) for sharding in shardings]
        self._groups = HashGroups.of_shardings(shardings, self._configs)
        names = get_embedding_names_by_table(self._configs)
        self._embedding_names = [name for of_table in names for name in of_table]
        self._widths = [c.embedding_dim for c in self._configs for _ in c.feature_names]

    def _registered_rows(self) -> nn.ModuleDict:
        """The tables' modules, with handles in place of tensors of num_embeddings rows."""
        for rows in self._own_rows():
            # What has an optimizer in backward is left out of dense optimizers.
            rows.weight.__dict__["_in_backward_optimizers"] = [self._optim]  # type: ignore[attr-defined]
        return nn.ModuleDict({rows.config.name: rows for rows in self._own_rows()})

    def init_data_parallel(self) -> None:
        """Does nothing: gradients of replicated tables travel with the results."""

    def reset_parameters(self) -> None:
        """Does nothing: rows are made when their ids first show up."""

    @uncompiled
    def input_dist(self, ctx: Any, features: Any) -> StartedInputs:
        """Starts the host work of a batch; it trains if the module does now.

        Returns at once. Raises only if something is wrong with the module, on every rank alike.
        """
        # If this raises, the other ranks would wait for this rank's batch.
        with failing_together(self.host_exchange.group):
            return self._start_batch(ctx, features)

    def _start_batch(self, ctx: Any, features: Any) -> StartedInputs:
        if self.training:
            self._in_use.check_trainable()
            if any(dist.config.has_norms for dist in self._input_dists):
                end_failed_backward()  # its batches would be in flight at a look
        if type(features) is not KeyedJaggedTensor:
            features = maybe_td_to_kjt(features, None)
        weights = None
        if self._weights_ids and isinstance(features, KeyedJaggedTensor):
            weights = features.weights_or_none()
        contexts = [
            HashShardingContext(is_training=self.training, own_weights=weights)
            for _ in self._input_dists
        ]
        ctx.sharding_contexts.extend(contexts)
        return StartedInputs(
            start_batch(self._input_dists, features, contexts, self.training),
            ctx,
            self._module_fqn,  # type: ignore[attr-defined]
            self._sharding_types,
        )

    def compute(self, ctx: Any, dist_input: Any) -> list[torch.Tensor]:
        """The vectors that this rank pools, by group.

        Raises RuntimeError if the module trained when the ids were sent and does not now, or the
        other way round.
        """
        note_lookup(batch.in_flight for batch in dist_input)
        check_mode(ctx.sharding_contexts, self.training)
        if self.training:
            refuse_recomputing(self._rows_by_name)
        wait_for_copies(ctx.sharding_contexts)
        self._note_batch(ctx.sharding_contexts)
        self.host_exchange.num_trained += self.training
        for dist, context in zip(self._input_dists, ctx.sharding_contexts, strict=True):
            if context.done.sample is not None:
                dist.note_rows(context.done.sample)
        arrived = self._exchange_weights(ctx.sharding_contexts, dist_input)
        pairs = zip(self._lookups, dist_input, strict=True)
        pooled = [lookup(batch) for lookup, batch in pairs]
        # A rank without shards takes part in the exchange's backward too.
        return [tied(numbers, arrived) for numbers in pooled] if arrived else pooled

    def _note_batch(self, contexts: Sequence[HashShardingContext]) -> None:
        """Notes the outcomes of the ids of the batch that is looked up."""
        found = [context.done.outcomes for context in contexts]
        kept = [outcomes for outcomes in found if outcomes is not None]
        is_kept = len(kept) == len(contexts)
        self._note_outcomes(
            self._embedding_names, self._groups.of_features(kept) if is_kept else None
        )

    def _exchange_weights(
        self, contexts: Sequence[HashShardingContext], batches: Sequence[Any]
    ) -> list[torch.Tensor]:
        """Gives the batches their weights, if these come late; returns those that came."""
        found = [context.done.late_weights for context in contexts]
        late = [way for way in found if way is not None]
        if not late:
            return []
        own = []
        for context, way in zip(contexts, late, strict=True):
            assert context.own_weights is not None
            context.own_weights = way.of_group(context.own_weights)
            own.append(context.own_weights)
        sends = [dist.send_weights for dist in self._output_dists]
        arrived = exchange_weights(late, sends, own, self.host_exchange.group)
        for batch, weights_M in zip(batches, arrived, strict=True):
            batch.take_weights(weights_M)
        return arrived

    def _start_return(self, ctx: Any, output: Sequence[torch.Tensor]) -> list[Transfer]:
        parts = zip(self._output_dists, output, ctx.sharding_contexts, strict=True)
        return [dist(numbers, context).wait() for dist, numbers, context in parts]

    def _separate_results(
        self, contexts: Sequence[HashShardingContext], transfers: Sequence[Transfer]
    ) -> list[torch.Tensor]:
        """The vectors of each feature's samples, or of their ids: float32 (G, D)."""
        groups, like = self._groups, transfers[0].numbers
        bags = bags_of_samples(groups, contexts)
        divisors = late_divisors(groups, contexts)
        parts = return_results(transfers, _Separate.of_batch(groups, contexts, self._widths, like))
        if divisors is not None:
            pairs = zip(parts, divisors, strict=True)
            parts = [part if each is None else part / each[:, None] for part, each in pairs]
        return parts if bags is None else of_samples(parts, bags)

    def update_shards(self, *args: Any, **kwargs: Any) -> None:
        """Not supported; raises NotImplementedError."""
        raise NotImplementedError(
            "hash tables cannot be moved between ranks in place: save, and load under another plan"
        )


def _groups_of_ranks(groups: Any, world_size: int) -> list[tuple[int, ...]]:
    """Groups of ranks as tuples of Python's ints."""
    if not isinstance(groups, (list, tuple)):
        raise TypeError(f"groups must be a list of tuples of ranks, got {groups!r:.100}")
    found = []
    for group in groups:
        if not isinstance(group, (list, tuple)):
            raise TypeError(f"groups must hold tuples of ranks, got {group!r:.100}")
        ranks = tuple(int_of("groups: a rank", rank) for rank in group)
        if not all(0 <= rank < world_size for rank in ranks):
            raise ValueError(f"groups must have ranks 0 to {world_size - 1}, got {ranks}")
        found.append(ranks)
    return found


def check_mode(contexts: Sequence[HashShardingContext], is_training: bool) -> None:
    """Raises RuntimeError for a batch that was sent in the other mode.

    Sent to be trained its new ids have rows already; sent to be evaluated they would never learn.
    """
    if all(context.is_training == is_training for context in contexts):
        return
    sent, now = ("eval", "train") if is_training else ("train", "eval")
    raise RuntimeError(
        f"this batch was sent ahead in {sent} mode, and the model is now in {now} mode; switch "
        "modes where the pipeline has no batch in flight: at the end of an iterator, after "
        "detach() to call the model itself, or after reset(), which drops them"
    )


def wait_for_copies(contexts: Sequence[HashShardingContext]) -> None:
    """Makes the current stream wait for the copies of these contexts' batch to the device."""
    for context in contexts:
        wait_for(context.copied)


@dataclass(frozen=True)
class _Separate:
    """A result (G, D) for each feature."""

    groups: HashGroups
    shapes: list[tuple[int, int]]
    like: torch.Tensor
    """On its device."""

    @staticmethod
    def of_batch(
        groups: HashGroups,
        contexts: Sequence[HashShardingContext],
        widths: Sequence[int],
        like: torch.Tensor,
    ) -> _Separate:
        """Those of a batch; `widths`: D of each feature."""
        counts = groups.of_features([context.done.features.num_bags for context in contexts])
        return _Separate(groups, list(zip(counts, widths, strict=True)), like)

    def empty(self) -> list[torch.Tensor]:
        """What is to be filled."""
        return [self.like.new_empty(*shape) for shape in self.shapes]

    takes_views = False  # as each may be changed in place by who gets it

    def joined(self, parts: list[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """The same, in the order of the module's features."""
        return self.groups.of_features(parts)

    def parts_of(self, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Those of each group's features."""
        return self.groups.parts_of(tensors)


def bags_of_samples(
    groups: HashGroups, contexts: Sequence[HashShardingContext]
) -> list[torch.Tensor] | None:
    """For each feature the bag of each sample, where the vectors are; None: bag b has sample b."""
    found = [context.done.samples for context in contexts]
    samples = [of_group.of_features() for of_group in found if of_group is not None]
    return groups.of_features(samples) if len(samples) == len(found) else None


def late_divisors(
    groups: HashGroups, contexts: Sequence[HashShardingContext]
) -> list[torch.Tensor | None] | None:
    """For each feature the divisor of its vectors, if the weights of a mean came late."""
    by_group = []
    for context in contexts:
        if context.done.late_weights is None:
            return None
        assert context.own_weights is not None
        by_group.append(context.done.late_weights.divisors(context.own_weights))
    found: list[torch.Tensor | None] = groups.of_features(by_group)
    return found if any(divisor is not None for divisor in found) else None
