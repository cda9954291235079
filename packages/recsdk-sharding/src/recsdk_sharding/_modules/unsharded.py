"""The unsharded collections of hash tables, with which a model is written.

Shape letters: N keys, B batch, C columns (the sum of the features' widths), D row width.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recsdk_sharding._batch.features import Features, features_on_host, read_features
from recsdk_sharding._batch.key_data import (
    latest_in,
    latest_of,
    require_data,
    require_time,
    set_time,
    tables_with_time,
    time_from,
)
from recsdk_sharding._batch.local_batch import LocalBatch
from recsdk_sharding._batch.outcomes import KeepsOutcomes, of_repeated
from recsdk_sharding._batch.sequences import SentSamples, jagged_tensors, without_duplicates
from recsdk_sharding._batch.uncompiled import uncompiled
from recsdk_sharding._compat.private import active_data_parallel_size
from recsdk_sharding._configs.checking import check_switch
from recsdk_sharding._configs.configs import HashEmbeddingBagConfig, HashEmbeddingConfig
from recsdk_sharding._configs.data_taken import DTYPES, evicts_by_time
from recsdk_sharding._configs.translating import bag_configs, sequence_configs
from recsdk_sharding._modules.recomputing import refuse_recomputing
from recsdk_sharding._rows.home import RowTable
from recsdk_sharding._rows.rows import TableRows
from recsdk_sharding.placement.devices import check_device

__all__ = ["HashEmbeddingBagCollection", "HashEmbeddingCollection"]


class _Unsharded(KeepsOutcomes):
    """What both collections have in common; mixed into torchrec's."""

    if TYPE_CHECKING:  # torch.jit.script would read annotations of the class
        training: bool
        device: torch.device
    _num_steps = 0

    def _rows(self) -> list[TableRows]:
        raise NotImplementedError

    def tables(self) -> dict[str, RowTable]:
        """The tables by name: export, len, stats."""
        return {rows.config.name: rows.shards[0].table for rows in self._rows()}

    def data_taken(self) -> tuple[str, ...]:
        """What rules of the tables take of what comes with ids, by name of `KeyData`."""
        taken = {name for each in self._rows() for name in each.config.data_taken}
        return tuple(name for name in DTYPES if name in taken)

    def set_time(self, time: int) -> None:
        """The time, in any unit, of the batches from now on; for `Evict.lru(by="time")`.

        It is that of ids that have none of their own, see `KeyedJaggedTensorWithData`.
        Raises TypeError or ValueError for what is no int64.
        """
        set_time(tables_with_time(self.tables().values()), require_time(time))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Rows and optimizer state move with the module."""
        super()._apply(fn, recurse)  # type: ignore[misc]
        self._device = self._rows()[0].weight.device
        return self

    def reset_parameters(self) -> None:
        """Does nothing: rows are made when their ids first show up."""

    def _map(self, batch: Features, *, is_sequence: bool) -> LocalBatch:
        """Maps a batch, as a step if the module trains."""
        step = now_T = None
        if self.training:
            refuse_recomputing(each.config.name for each in self._rows())
            for each in self._rows():
                each.check_trainable()
            now_T = self._times_from(batch)
            step = self._num_steps + 1
        mapped = LocalBatch(self._rows(), batch, step=step, is_sequence=is_sequence, now_T=now_T)
        self._num_steps += int(self.training)  # a batch that fails is no step
        return mapped

    def _times_from(self, batch: Features) -> list[int | None] | None:
        """The time of each table from this batch on, which must have what tables need."""
        configs = [each.config for each in self._rows()]
        require_data({config.name: config.data_needed for config in configs}, batch)
        if not any(evicts_by_time(config.eviction) for config in configs):
            return None
        latest_F, counts_F = latest_of(batch), batch.counts
        now_T: list[int | None] = []
        begin = 0
        for each in self._rows():
            end = begin + len(each.config.feature_names)
            now = None
            if evicts_by_time(each.config.eviction):
                latest = latest_in(latest_F, slice(begin, end))
                num_untimed = sum(counts_F[begin:end]) if latest_F is None else 0
                now = time_from(each.shards[0].table, None, latest, num_untimed)
            now_T.append(now)
            begin = end
        return now_T

    def _check_usable(self) -> None:
        kind = type(self).__name__
        if self.device.type == "meta":
            raise RuntimeError(
                f"this {kind} was built on the meta device: shard it with "
                "DistributedModelParallel, or build it with device=torch.device('cpu')"
            )
        num_ranks = active_data_parallel_size()
        if num_ranks > 1:
            raise RuntimeError(
                f"an unsharded {kind} in DistributedDataParallel over "
                f"{num_ranks} ranks would train other rows on each rank: shard it with "
                "DistributedModelParallel and get_default_hybrid_sharders"
            )


class HashEmbeddingBagCollection(_Unsharded, EmbeddingBagCollection):  # type: ignore[misc]
    """torchrec's `EmbeddingBagCollection` over raw 64-bit ids.

    A drop-in: it has the same configs, inputs (`KeyedJaggedTensor`), outputs (`KeyedTensor` of
    float32 (B, C)) and names of parameters, `embedding_bags.<table>.weight`. Any int64 is a legal
    id. In training (`module.training`, whatever the gradient mode) an id without a row gets one; in
    evaluation it reads zeros, and nothing is written. An empty bag pools to zeros; MEAN divides by
    the number of ids of the bag, or by the sum of its weights if weighted (0 gives zeros).

    The optimizer given to `apply_optimizer_in_backward` runs in backward, once per table, with the
    torch class's defaults. A parameter never gets a `.grad`; on the cpu it is a (0, D) handle. The
    rows are in `state_dict()`, per table and rank, and are copied by deepcopy and pickle. Two
    backwards through one forward raise RuntimeError.

    On npu or cuda the rows and optimizer state are in device memory. All of it is allocated when
    the module is made or sharded: `num_embeddings` rows over all ranks and a little more (see
    `recsdk_sharding.placement.devices.row_budget`). Further ids are refused and read zeros. The
    host maps ids, so pipelines that pass them on the host are faster.

    Use it as it is on one process, or shard it by `DistributedModelParallel` with the sharders of
    `get_default_hybrid_sharders`. In DistributedDataParallel over more than one rank forward raises
    RuntimeError, since each rank would train tables of its own.

    >>> import torch
    >>> from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    >>> from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
    >>> config = HashEmbeddingBagConfig(
    ...     name="user", embedding_dim=4, num_embeddings=1000, feature_names=["user_id"]
    ... )
    >>> ebc = HashEmbeddingBagCollection(tables=[config])
    >>> apply_optimizer_in_backward(torch.optim.Adagrad, ebc.parameters(), {"lr": 0.1})
    >>> ids = torch.tensor([-7, 2**62, -7])
    >>> batch = KeyedJaggedTensor(["user_id"], ids, lengths=torch.tensor([2, 0, 1]))
    >>> ebc(batch).values().sum().backward()
    >>> len(ebc.tables()["user"])
    2
    """

    def __init__(
        self,
        tables: Sequence[HashEmbeddingBagConfig | EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        """Makes empty tables; on the cpu they take no memory before the first training forward.

        `tables`: configs of this package or of torchrec. torchrec's are translated: each field
        keeps its meaning, except that `num_embeddings` bounds no id; a field that means nothing to
        a hash table must be left at its default. `is_weighted`: batches carry a float32 weight per
        id. `device`: cpu; npu or cuda for rows in device memory; meta for a module that is to be
        sharded. Raises ValueError or TypeError for tables that do not fit together.
        """
        configs = bag_configs(tables, "HashEmbeddingBagCollection")
        made = check_device(device, "HashEmbeddingBagCollection")
        check_switch("HashEmbeddingBagCollection: is_weighted", is_weighted)
        super().__init__(tables=[], is_weighted=is_weighted, device=made)
        for config in configs:
            config.feature_names = config.feature_names or [config.name]
        for rows in TableRows.of_tables(configs, None, made):
            self.embedding_bags[rows.config.name] = rows
        self._embedding_bag_configs = configs
        self._feature_names = [config.feature_names for config in configs]
        self._embedding_names = list(chain.from_iterable(get_embedding_names_by_table(configs)))
        self._lengths_per_embedding = [
            config.embedding_dim for config in configs for _ in config.feature_names
        ]

    @uncompiled
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pools the bags of every feature: a `KeyedTensor` of float32 (B, C).

        `features` may have further features, in any order. Raises TypeError or ValueError for a
        batch that does not fit; RuntimeError in training without an optimizer.
        """
        self._check_usable()
        names = [name for table in self._feature_names for name in table]
        source = features_on_host(features)
        takes = self.data_taken() if self.training else ()
        batch = read_features(source, names, self._is_weighted, takes)
        mapped = self._map(batch, is_sequence=False)
        self._note_outcomes(
            self._embedding_names, mapped.outcomes() if self._keeps_outcomes else None
        )
        return KeyedTensor(
            keys=self._embedding_names,
            length_per_key=self._lengths_per_embedding,
            values=mapped.pooled(),
        )

    def _rows(self) -> list[TableRows]:
        return list(self.embedding_bags.values())


class HashEmbeddingCollection(_Unsharded, EmbeddingCollection):  # type: ignore[misc]
    """torchrec's `EmbeddingCollection` over raw 64-bit ids: a vector for every id of a sequence.

    A drop-in: the same configs, inputs (`KeyedJaggedTensor`), outputs (a dictionary of
    `JaggedTensor` with values float32 (N, D)) and names of parameters,
    `embeddings.<table>.weight`. All tables have one width. All else as in
    `HashEmbeddingBagCollection`.

    >>> import torch
    >>> from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    >>> from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
    >>> config = HashEmbeddingConfig(
    ...     name="item", embedding_dim=4, num_embeddings=1000, feature_names=["history"]
    ... )
    >>> ec = HashEmbeddingCollection(tables=[config])
    >>> apply_optimizer_in_backward(torch.optim.Adagrad, ec.parameters(), {"lr": 0.1})
    >>> ids = torch.tensor([-7, 2**62, -7])
    >>> batch = KeyedJaggedTensor(["history"], ids, lengths=torch.tensor([2, 0, 1]))
    >>> ec(batch)["history"].values().shape
    torch.Size([3, 4])
    """

    def __init__(
        self,
        tables: Sequence[HashEmbeddingConfig | HashEmbeddingBagConfig | EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
    ) -> None:
        """Makes empty tables. `need_indices`: outputs carry the ids as their weights.

        `tables`: also torchrec's `EmbeddingConfig`, and configs with `PoolingType.NONE`.
        `device` and errors as in `HashEmbeddingBagCollection`; ValueError for two widths, too.
        """
        configs = sequence_configs(tables, "HashEmbeddingCollection")
        widths = {config.embedding_dim for config in configs}
        if len(widths) > 1:
            raise ValueError(
                f"HashEmbeddingCollection: all tables need one embedding_dim, got {sorted(widths)}"
            )
        made = check_device(device, "HashEmbeddingCollection")
        check_switch("HashEmbeddingCollection: need_indices", need_indices)
        super().__init__(tables=[], device=made, need_indices=need_indices)
        for config in configs:
            config.feature_names = config.feature_names or [config.name]
        for rows in TableRows.of_tables(configs, None, made):
            self.embeddings[rows.config.name] = rows
        self._embedding_configs = configs
        self._embedding_dim = widths.pop()
        self._feature_names = [config.feature_names for config in configs]
        self._embedding_names_by_table = get_embedding_names_by_table(configs)

    @uncompiled
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """The vectors of every feature's ids, in their order, by name of the embedding.

        `features` may have further features, in any order. Raises as
        `HashEmbeddingBagCollection.forward`.
        """
        self._check_usable()
        names = [name for table in self._feature_names for name in table]
        takes = self.data_taken() if self.training else ()
        batch = read_features(features_on_host(features), names, False, takes)
        every = without_duplicates(batch, drops_duplicates=False)
        mapped = self._map(every, is_sequence=True)
        keys = [name for table in self._embedding_names_by_table for name in table]
        outcomes = mapped.outcomes() if self._keeps_outcomes else None
        vectors = mapped.separate()
        if every.bag_of_sample is not None:
            vectors = mapped.of_samples(vectors, every.bag_of_sample)
            if outcomes is not None:
                sent = every.keys_N.split_with_sizes(every.counts)
                outcomes = list(map(of_repeated, outcomes, sent, every.bag_of_sample))
        self._note_outcomes(keys, outcomes)
        samples = SentSamples(every, self._device, with_keys=self._need_indices)
        samples.open()
        return jagged_tensors(keys, vectors, samples.of_features())

    def _rows(self) -> list[TableRows]:
        return list(self.embeddings.values())
