"""The collections of frozen tables, which torchrec's quantization makes of those of hash tables.

Shape letters: N keys, B samples, C columns, G bags of a feature, D row width.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, TypeVar

import torch
from torch import nn
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    dtype_to_data_type,
)
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recsdk_core.serving import ServingTable, freeze_tables, open_tables, pool_serving
from recsdk_core.serving.manifest import FrozenDType
from recsdk_sharding._batch.features import Features, features_on_host, read_features
from recsdk_sharding._batch.sequences import (
    Samples,
    jagged_tensors,
    samples_of,
    without_duplicates,
)
from recsdk_sharding._configs.checking import check_switch
from recsdk_sharding._configs.translating import bag_configs, sequence_configs
from recsdk_sharding._modules.exporting import is_exporting, readers_of, recorded_bags
from recsdk_sharding._modules.unsharded import HashEmbeddingBagCollection, HashEmbeddingCollection

__all__ = ["QuantHashEmbeddingBagCollection", "QuantHashEmbeddingCollection"]

_Module = TypeVar("_Module", bound="_Frozen")

_DTYPES: dict[DataType, FrozenDType] = {
    DataType.FP32: "float32",
    DataType.FP16: "float16",
    DataType.BF16: "bfloat16",
    DataType.INT8: "int8",
    DataType.UINT8: "int8",
    DataType.INT4: "int4",
}


def _remove_in(process: int, path: str) -> None:
    """Removes a folder in the process that made it: one that was forked from it only reads it."""
    if process == os.getpid():
        shutil.rmtree(path, ignore_errors=True)


class _Folder:
    """A folder of frozen tables that goes with the last module that reads it."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix="recsdk_frozen_")
        weakref.finalize(self, _remove_in, os.getpid(), self.path)

    def __deepcopy__(self, memo: Any) -> _Folder:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "tables that were quantized in memory lie in a folder that goes with the process; "
            "freeze a checkpoint with `recsdk freeze`, and make the module with its path"
        )


class _Frozen(nn.Module):
    """What both have in common. Tables are no parameters, and have no entry in a state_dict."""

    _of_features: Sequence[BaseEmbeddingConfig]

    def _open(
        self, configs: Sequence[BaseEmbeddingConfig], path: Any, output_dtype: torch.dtype
    ) -> None:
        if not isinstance(output_dtype, torch.dtype) or not output_dtype.is_floating_point:
            raise TypeError(
                f"{type(self).__name__}: output_dtype must be a torch.dtype of floats, got "
                f"{output_dtype!r:.100}"
            )
        self._output_dtype = output_dtype
        self._folder: _Folder | None = None
        self._tables = open_tables(path, [config.name for config in configs])
        self._readers = readers_of(configs, self._tables)
        for config in configs:
            table = self._tables[config.name]
            if table.dim != config.embedding_dim:
                raise ValueError(
                    f"table {config.name!r} at {table.path} has width {table.dim}, and its config "
                    f"embedding_dim={config.embedding_dim}; give the config that it was trained by"
                )

    def serving_tables(self) -> dict[str, ServingTable]:
        """The frozen tables by name: `follow`, `stats`, `preload`."""
        return dict(self._tables)

    def configs_of_features(self) -> list[Any]:
        """The config of each feature's table, in the order of the vectors."""
        return list(self._of_features)

    def output_dtype(self) -> torch.dtype:
        """The dtype of the vectors."""
        return self._output_dtype

    @property
    def device(self) -> torch.device:
        """The cpu."""
        return torch.device("cpu")

    def extra_repr(self) -> str:
        return ", ".join(repr(table) for table in self._tables.values())


def _check_trained(cls: type, module: Any, kind: type) -> None:
    if not isinstance(module, kind):
        raise TypeError(
            f"{cls.__name__}.from_float: module must be a {kind.__name__}, got "
            f"{type(module).__name__}"
        )


def _of_trained(
    cls: type[_Module], module: Any, configs: Sequence[BaseEmbeddingConfig], **options: Any
) -> _Module:
    """Freezes the tables of a trained module, as its `qconfig` says, and opens them."""
    qconfig = getattr(module, "qconfig", None)
    if qconfig is None:
        raise ValueError(
            f"{cls.__name__}.from_float: the module has no qconfig; call quantize_embeddings or "
            "quantize_inference_model"
        )
    if module.device.type != "cpu":
        raise ValueError(
            f"{cls.__name__}.from_float: rows are on {module.device}; move the module to the cpu, "
            "or freeze a checkpoint"
        )
    folder = _Folder()
    tables = module.tables()
    dtypes = {config.name: _frozen_dtype(qconfig, config.name) for config in configs}
    freeze_tables(list(tables.values()), folder.path, dtype=dtypes, overwrite=True)
    made = cls(list(configs), path=folder.path, output_dtype=qconfig.activation().dtype, **options)
    made._folder = folder
    return made.eval()


def _frozen_dtype(qconfig: Any, name: str) -> FrozenDType:
    """How rows of a table are stored: by its own dtype, or by that of all."""
    per_table: Mapping[str, torch.dtype] = getattr(qconfig, "per_table_weight_dtype", None) or {}
    dtype = per_table.get(name, qconfig.weight().dtype)
    data_type = dtype_to_data_type(dtype)
    if data_type not in _DTYPES:
        raise ValueError(
            f"table {name!r} cannot be quantized to {dtype}; choose one of torch.qint8, "
            "torch.quint4x2, torch.float16, torch.bfloat16 and torch.float32"
        )
    return _DTYPES[data_type]


class QuantHashEmbeddingBagCollection(_Frozen, EmbeddingBagCollectionInterface):  # type: ignore[misc]
    """torchrec's quantized `EmbeddingBagCollection` over raw 64-bit ids, for inference on the cpu.

    `torchrec.inference.modules.quantize_embeddings` and `quantize_inference_model` make it of each
    `HashEmbeddingBagCollection` of a model; it reads what that reads in evaluation, from rows that
    are stored in another dtype. An id without a row reads zeros. Inputs and outputs are those of
    the trained module, in `output_dtype`. The tables are frozen files: in a folder that goes with
    the module, or at `path`. They are no parameters and not in a `state_dict`; a deepcopy shares
    them. `serving_tables()` gives them, to follow a chain of deltas. A pickle needs a `path`.

    Thread safety: any number of threads may call it.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        is_weighted: bool = False,
        *,
        path: Any,
        output_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Opens the tables of a frozen checkpoint, by `recsdk freeze`, at a local path.

        `tables`: the configs of training. Raises CheckpointError for what is not there, ValueError
        for configs that do not fit it.
        """
        super().__init__()
        self._configs = bag_configs(tables, type(self).__name__)
        check_switch(f"{type(self).__name__}: is_weighted", is_weighted)
        self._is_weighted = is_weighted
        self._open(self._configs, path, output_dtype)
        for config in self._configs:
            config.feature_names = config.feature_names or [config.name]
        self._of_features = [config for config in self._configs for _ in config.feature_names]
        self._features = list(chain.from_iterable(c.feature_names for c in self._configs))
        self._names = list(chain.from_iterable(get_embedding_names_by_table(self._configs)))

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pools the bags of every feature: a `KeyedTensor` (B, C). Raises as the trained module."""
        widths = [config.embedding_dim for config in self._of_features]
        if is_exporting():
            values = self._recorded(features)
        else:
            batch = read_features(features_on_host(features), self._features, self._is_weighted)
            values = self._pooled(batch, widths).to(self._output_dtype)
        return KeyedTensor(keys=self._names, length_per_key=widths, values=values)

    def _recorded(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """What torch.export records: the vectors of all samples (B, C)."""
        every = recorded_bags(features, self._features, self._is_weighted)
        pooled = [
            self._readers[config.name](bags.keys_N, bags.offsets(), bags.weights_N)
            for config, bags in zip(self._of_features, every, strict=True)
        ]
        return torch.cat(pooled, 1).to(self._output_dtype)

    def _pooled(self, batch: Features, widths: list[int]) -> torch.Tensor:
        """The vectors of all samples, float32 (B, C)."""
        columns = list(accumulate(widths, initial=0))
        bags = batch.bag_of_sample
        size = batch.batch_size if bags is None else max(batch.num_bags, default=0)
        out = torch.zeros(size, columns[-1], dtype=torch.float32, device="cpu")
        counts = batch.counts
        keys = batch.keys_N.split_with_sizes(counts)
        offsets = batch.offsets()
        weights: list[Any] = [None] * len(keys)
        if batch.weights_N is not None:
            weights = list(batch.weights_N.detach().split_with_sizes(counts))
        calls = []
        for f, config in enumerate(self._of_features):
            pooling = "mean" if config.pooling == PoolingType.MEAN else "sum"
            table = self._tables[config.name]
            own = keys[f].contiguous()
            calls.append((table, own, offsets[f], out, columns[f], weights[f], pooling))
        pool_serving(calls)
        if bags is None:
            return out
        parts = out.split_with_sizes(widths, dim=1)
        return torch.cat([part[bag] for part, bag in zip(parts, bags, strict=True)], dim=1)

    @classmethod
    def from_float(
        cls, module: HashEmbeddingBagCollection, use_precomputed_fake_quant: bool = False
    ) -> QuantHashEmbeddingBagCollection:
        """What torch's `convert` calls. Cost: a pass over the rows."""
        _check_trained(cls, module, HashEmbeddingBagCollection)
        configs = module.embedding_bag_configs()
        return _of_trained(cls, module, configs, is_weighted=module.is_weighted())

    def embedding_bag_configs(self) -> list[Any]:
        """The configs."""
        return self._configs

    def embedding_names(self) -> list[str]:
        """The names of the vectors of each feature."""
        return list(self._names)

    def is_weighted(self) -> bool:
        """Whether batches carry a weight per id."""
        return self._is_weighted


class QuantHashEmbeddingCollection(_Frozen, EmbeddingCollectionInterface):  # type: ignore[misc]
    """torchrec's quantized `EmbeddingCollection` over raw 64-bit ids, for inference on the cpu.

    A vector for every id of a sequence, as `HashEmbeddingCollection` in evaluation; all else as in
    `QuantHashEmbeddingBagCollection`.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        need_indices: bool = False,
        *,
        path: Any,
        output_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Opens the tables of a frozen checkpoint; `need_indices`: outputs carry the ids."""
        super().__init__()
        self._configs = sequence_configs(tables, type(self).__name__)
        check_switch(f"{type(self).__name__}: need_indices", need_indices)
        self._need_indices = need_indices
        self._open(self._configs, path, output_dtype)
        for config in self._configs:
            config.feature_names = config.feature_names or [config.name]
        self._of_features = [config for config in self._configs for _ in config.feature_names]
        self._features = list(chain.from_iterable(c.feature_names for c in self._configs))
        self._names_by_table: list[list[str]] = get_embedding_names_by_table(self._configs)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """The vectors of every feature's ids, in their order, by name of the embedding."""
        if is_exporting():
            return self._recorded(features)
        batch = read_features(features_on_host(features), self._features, is_weighted=False)
        every = without_duplicates(batch, drops_duplicates=False)
        keys = every.keys_N.split_with_sizes(every.num_bags)
        vectors = [
            self._tables[config.name].lookup(part.contiguous()).to(self._output_dtype)
            for config, part in zip(self._of_features, keys, strict=True)
        ]
        if every.bag_of_sample is not None:
            pairs = zip(vectors, every.bag_of_sample, strict=True)
            vectors = [each[bags] for each, bags in pairs]
        return self._named(vectors, samples_of(every, with_keys=self._need_indices))

    def _recorded(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """What torch.export records."""
        every = recorded_bags(features, self._features, is_weighted=False)
        vectors = [
            self._readers[config.name](bags.keys_N).to(self._output_dtype)
            for config, bags in zip(self._of_features, every, strict=True)
        ]
        wants = self._need_indices
        samples: list[Samples] = [(b.lengths_B, b.keys_N if wants else None) for b in every]
        return self._named(vectors, samples)

    def _named(
        self, vectors: Sequence[torch.Tensor], samples: Sequence[Samples]
    ) -> dict[str, JaggedTensor]:
        names = [name for table in self._names_by_table for name in table]
        return jagged_tensors(names, vectors, samples)

    @classmethod
    def from_float(
        cls, module: HashEmbeddingCollection, use_precomputed_fake_quant: bool = False
    ) -> QuantHashEmbeddingCollection:
        """What torch's `convert` calls. Cost: a pass over the rows."""
        _check_trained(cls, module, HashEmbeddingCollection)
        configs = module.embedding_configs()
        return _of_trained(cls, module, configs, need_indices=module.need_indices())

    def embedding_configs(self) -> list[Any]:
        """The configs."""
        return self._configs

    def embedding_names_by_table(self) -> list[list[str]]:
        """The names of the embeddings of each table."""
        return self._names_by_table

    def embedding_dim(self) -> int:
        """The width of all tables."""
        return int(self._configs[0].embedding_dim)

    def need_indices(self) -> bool:
        """Whether outputs carry the ids."""
        return self._need_indices
