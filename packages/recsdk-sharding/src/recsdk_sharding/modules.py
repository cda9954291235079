"""The unsharded collection of hash tables: what a model is written with.

Shape letters: B batch, C columns (the sum of the features' widths).
"""

from __future__ import annotations

from itertools import chain

import torch
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

import recsdk_core
from recsdk_core.nn.function import pool_features
from recsdk_sharding._torchrec_compat import active_data_parallel_size
from recsdk_sharding.configs import HashEmbeddingBagConfig, check_tables
from recsdk_sharding.features import TableInput, map_features, read_features
from recsdk_sharding.rows import TableRows, anchor_of

__all__ = ["HashEmbeddingBagCollection", "check_device"]


def check_device(device: torch.device | str | None, what: str) -> torch.device:
    """The device as a torch.device; ValueError unless it is the cpu or meta."""
    made = torch.device(device if device is not None else "cpu")
    if made.type not in ("cpu", "meta"):
        raise ValueError(
            f"{what}: hash tables are kept on the cpu; got device {str(made)!r}; pass "
            "torch.device('cpu'), or torch.device('meta') before sharding"
        )
    return made


class HashEmbeddingBagCollection(EmbeddingBagCollection):  # type: ignore[misc]
    """torchrec's `EmbeddingBagCollection` over raw 64-bit ids.

    A drop-in: the same configs, inputs (`KeyedJaggedTensor`), outputs (`KeyedTensor` of float32
    (B, C)) and names of parameters, `embedding_bags.<table>.weight`. Any int64 is a legal id. In
    training (`module.training`, whatever the grad mode) an id without a row gets one; in evaluation
    it reads zeros, and nothing is written. An empty bag pools to zeros; MEAN divides by the number
    of ids of the bag, or by the sum of its weights if weighted (0 gives zeros).

    The optimizer given to `apply_optimizer_in_backward` runs in backward, once per table, with the
    torch class's defaults. A parameter is a (0, D) handle that never gets a `.grad`; the rows are
    in `state_dict()`, per table and rank, and are copied by deepcopy and pickle. Two backwards
    through one forward raise RuntimeError.

    Usable as it is on one process, or sharded by `DistributedModelParallel` with the sharders of
    `get_default_hybrid_sharders`. In DistributedDataParallel over more than one rank forward
    raises, since each rank would train tables of its own.

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
        tables: list[HashEmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        """Makes empty tables; they take no memory before the first training forward.

        `is_weighted`: batches carry a float32 weight per id. `device`: cpu, or meta for a module
        that is to be sharded. Raises ValueError or TypeError for tables that do not fit together.
        """
        check_tables(tables)
        made = check_device(device, "HashEmbeddingBagCollection")
        super().__init__(tables=[], is_weighted=is_weighted, device=made)
        for config in tables:
            config.feature_names = config.feature_names or [config.name]
            self.embedding_bags[config.name] = TableRows(config)
        self._embedding_bag_configs = list(tables)
        self._feature_names = [config.feature_names for config in tables]
        self._embedding_names = list(chain.from_iterable(get_embedding_names_by_table(tables)))
        self._lengths_per_embedding = [
            config.embedding_dim for config in tables for _ in config.feature_names
        ]
        self._num_steps = 0

    def tables(self) -> dict[str, recsdk_core.Table]:
        """The engine's tables by name: export, len, stats."""
        return {rows.config.name: rows.table for rows in self.embedding_bags.values()}

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pools the bags of every feature: a `KeyedTensor` of float32 (B, C).

        `features` may have further features, in any order. Raises TypeError or ValueError for a
        batch that does not fit; RuntimeError in training without an optimizer.
        """
        self._check_usable()
        names = [name for table in self._feature_names for name in table]
        batch = read_features(features, names, self._is_weighted)
        if self.training:
            self._check_trainable()
        inputs = self._inputs()
        self._num_steps += self.training
        mapped = map_features(
            inputs, batch, insert=self.training, step=self._num_steps if self.training else None
        )
        num_columns = sum(self._lengths_per_embedding)
        values = pool_features(mapped, batch.batch_size, num_columns, self._anchor())
        return KeyedTensor(
            keys=self._embedding_names,
            length_per_key=self._lengths_per_embedding,
            values=values,
        )

    def _check_usable(self) -> None:
        if self.device.type == "meta":
            raise RuntimeError(
                "this HashEmbeddingBagCollection was built on the meta device: shard it with "
                "DistributedModelParallel, or build it with device=torch.device('cpu')"
            )
        num_ranks = active_data_parallel_size()
        if num_ranks > 1:
            raise RuntimeError(
                f"an unsharded HashEmbeddingBagCollection in DistributedDataParallel over "
                f"{num_ranks} ranks would train other rows on each rank: shard it with "
                "DistributedModelParallel and get_default_hybrid_sharders"
            )

    def _check_trainable(self) -> None:
        for rows in self.embedding_bags.values():
            rows.adopt_optimizer()
            rows.check_trainable()

    def _inputs(self) -> list[TableInput]:
        """What each table reads."""
        inputs: list[TableInput] = []
        position = column = 0
        for rows in self.embedding_bags.values():
            count, width = len(rows.config.feature_names), rows.config.embedding_dim
            inputs.append(
                TableInput(
                    table=rows.table,
                    features=list(range(position, position + count)),
                    columns=[column + index * width for index in range(count)],
                    pooling=rows.config.pooling.value.lower(),
                )
            )
            position, column = position + count, column + count * width
        return inputs

    def _anchor(self) -> torch.Tensor:
        return anchor_of(list(self.embedding_bags.values()))

    def reset_parameters(self) -> None:
        """Does nothing: rows are made when their ids first show up."""
