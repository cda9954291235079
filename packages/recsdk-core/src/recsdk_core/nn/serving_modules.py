"""Torch modules that read frozen tables, and what makes them of a trained model.

Shape letters: N keys, B bags, L keys of a bag, D row width.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from recsdk_core._internal.checks import require_bool
from recsdk_core.nn.bag_arguments import check_bags, require_tensor
from recsdk_core.nn.embedding_arguments import padding_among, padding_of
from recsdk_core.nn.modules import HashEmbedding, HashEmbeddingBag
from recsdk_core.nn.operators import is_recorded, leaf, not_compiled
from recsdk_core.nn.serving_operators import (
    lookup_recorded,
    number_of_table,
    place_of_table,
    pool_bags,
    pool_recorded,
)
from recsdk_core.serving import ServingTable, freeze_tables, open_tables
from recsdk_core.serving.manifest import FrozenDType

__all__ = ["ServingEmbedding", "ServingEmbeddingBag", "freeze"]

_Model = TypeVar("_Model", bound=nn.Module)


class _ServingModule(nn.Module):
    """A module over one frozen table; it has no parameter, and no entry in a state_dict."""

    anchor: torch.Tensor

    def __init__(self, table: ServingTable, *, padding_idx: int | None, dtype: torch.dtype) -> None:
        super().__init__()
        kind = type(self).__name__
        if not isinstance(table, ServingTable):
            raise TypeError(
                f"{kind}: table must be a recsdk_core.serving.ServingTable, got "
                f"{type(table).__name__}; open a frozen checkpoint with it"
            )
        self.table = table
        self.padding_idx, self.padding = padding_of(kind, padding_idx)
        # What `to` converts, so that outputs have its dtype.
        self.register_buffer("anchor", torch.empty(0, table.dim, dtype=dtype), persistent=False)
        self._attach()

    def _attach(self) -> None:
        """Gives a copy its own number."""
        self.number = number_of_table(self.table)
        self.place = place_of_table(self.table, self.number)
        self.number_1 = torch.tensor([self.number], device="cpu")  # what compiled code takes

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._attach()

    def __prepare_scriptable__(self) -> Any:
        """What torch.jit.script asks for."""
        raise not_compiled(self, "torch.jit.script")

    def _refuse_trace(self) -> None:
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            raise not_compiled(self, "torch.jit.trace")

    def extra_repr(self) -> str:
        return repr(self.table)


class ServingEmbedding(_ServingModule):
    """Reads one vector of a frozen table for each raw key, as `HashEmbedding` does in evaluation.

    A key without a row reads the table's default value; `padding_idx`, any key, reads zeros.
    Outputs have `dtype`, float32, until `module.to` changes it. The module has no parameters and
    nothing in a `state_dict`: what it reads is the files at `table.path`. A pickle has the path
    only, a deepcopy shares the table. torch.compile and torch.export take it as an operator; an
    exported program opens the path in another process. torch.jit.script and torch.jit.trace raise
    RuntimeError. Thread safety: as `ServingTable`; any number of threads may call it.

    >>> import tempfile, torch
    >>> from recsdk_core.nn import HashEmbedding, ServingEmbedding, freeze
    >>> trained = HashEmbedding(4, name="item")
    >>> rows = trained(torch.tensor([-5, 123456789012345678]))
    >>> served = freeze(trained, tempfile.mkdtemp() + "/served")
    >>> torch.equal(served(torch.tensor([-5, 123456789012345678])), rows)
    True
    """

    def __init__(
        self,
        table: ServingTable,
        *,
        padding_idx: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(table, padding_idx=padding_idx, dtype=dtype)

    def forward(self, keys: torch.Tensor) -> torch.Tensor:
        """keys of any shape, int64 -> (*shape, D); ValueError or TypeError for another tensor."""
        if isinstance(keys, torch.fx.Proxy):
            return leaf(self, keys)
        require_tensor("keys", keys)
        self._refuse_trace()
        if is_recorded(keys):
            vectors = lookup_recorded(self, keys)
        else:
            vectors = self.table.lookup(keys.reshape(-1).contiguous())
            vectors = vectors.view(*keys.shape, self.table.dim)
        is_padding = padding_among(keys, self.padding)
        if is_padding is not None:
            vectors = vectors.masked_fill(is_padding.unsqueeze(-1), 0.0)
        return vectors.to(self.anchor.dtype)


class ServingEmbeddingBag(_ServingModule):
    """Pools bags of raw keys from a frozen table, as `HashEmbeddingBag` does in evaluation.

    `mode` is "sum", the default, "mean" or "max", which takes no weights. With
    `include_last_offset` offsets are (B + 1,), else (B,). Bags are pooled without `padding_idx`; an
    empty bag pools to zeros. A backward to per_sample_weights raises RuntimeError, another mode
    ValueError. Otherwise as `ServingEmbedding`.
    """

    def __init__(
        self,
        table: ServingTable,
        *,
        mode: Literal["sum", "mean", "max"] = "sum",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        require_bool("ServingEmbeddingBag", include_last_offset=include_last_offset)
        if not isinstance(mode, str) or mode not in ("sum", "mean", "max"):
            raise ValueError(f"mode must be 'sum', 'mean' or 'max', got {mode!r}")
        super().__init__(table, padding_idx=padding_idx, dtype=dtype)
        self.mode, self.include_last_offset = mode, include_last_offset

    def forward(
        self,
        keys: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """keys (N,) with offsets, or (B, L) without, and weights of the same shape -> (B, D).

        Raises ValueError or TypeError for tensors that do not fit.
        """
        if isinstance(keys, torch.fx.Proxy):
            return leaf(self, keys, offsets, per_sample_weights)
        check_bags(keys, offsets)
        self._refuse_trace()
        weights = self._weights(keys, per_sample_weights)
        wants_grad = weights is not None and weights.requires_grad and torch.is_grad_enabled()
        if wants_grad or is_recorded(keys):
            pooled = pool_recorded(self, keys, offsets, weights, self._num_bags(keys, offsets))
        else:
            how = (self.mode, self.include_last_offset, self.padding)
            pooled = pool_bags(self.table, keys, offsets, weights, *how)
        return pooled.to(self.anchor.dtype)

    def _num_bags(self, keys: torch.Tensor, offsets: torch.Tensor | None) -> int:
        if offsets is None:
            return keys.shape[0]
        return offsets.shape[0] - int(self.include_last_offset)  # older compilers subtract no bool

    def _weights(self, keys: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor | None:
        """The weights, with 0 for padding."""
        if weights is not None:
            require_tensor("per_sample_weights", weights)
            if self.mode == "max":
                raise ValueError("per_sample_weights do not go with mode='max'; leave them out")
            if weights.shape != keys.shape:
                raise ValueError(
                    f"per_sample_weights must have the shape of keys, {tuple(keys.shape)}, got "
                    f"{tuple(weights.shape)}"
                )
            weights = weights.float()
        is_padding = None if self.mode == "max" else padding_among(keys, self.padding)
        if is_padding is None:
            return weights
        given = torch.ones_like(keys, dtype=torch.float32) if weights is None else weights
        return given.masked_fill(is_padding, 0.0)


def freeze(
    model: _Model,
    folder: Any,
    *,
    dtype: FrozenDType | Mapping[str, FrozenDType] = "float32",
    num_shards: int = 1,
    overwrite: bool = False,
) -> _Model:
    """A copy of a trained model for serving, in evaluation mode, whose tables are frozen files.

    Each `HashEmbedding` and `HashEmbeddingBag` of the model becomes a `ServingEmbedding` or
    `ServingEmbeddingBag` under its name; all else is copied, forward hooks of these modules
    excepted. Collections of recsdk_sharding stay as they are: quantize the result by torchrec's
    `quantize_embeddings`. The model itself is left as it is and can go on training. `folder` gets
    one frozen checkpoint with all tables; `dtype`, one or by the name of a table, `num_shards` and
    `overwrite` are those of `recsdk_core.serving.freeze`. With float32 the copy gives what the
    model gives in evaluation mode, bit for bit.

    Cost: a pass over the rows; disk as `freeze`; memory for all but the tables. Nothing may train
    meanwhile. Raises ValueError for a model without such modules, for a module with `max_norm` or
    of a class derived from these, and as `recsdk_core.serving.freeze_tables`; then `folder` is as
    it was. Raises CheckpointError if another freeze replaces this one before its tables are open.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"freeze: model must be a torch.nn.Module, got {type(model).__name__}")
    trained = _trained_modules(model)
    tables = {id(module.table): module.table for module in trained}
    written = freeze_tables(
        list(tables.values()), folder, dtype=dtype, num_shards=num_shards, overwrite=overwrite
    )
    opened = open_tables(folder, token=written.token)
    served = {key: opened[table.name] for key, table in tables.items()}
    copies: dict[int, Any] = {id(each): _served(each, served[id(each.table)]) for each in trained}
    return copy.deepcopy(model, copies).eval()


def _trained_modules(model: nn.Module) -> list[Any]:
    named = [
        (name or "the model", module)
        for name, module in model.named_modules()
        if isinstance(module, HashEmbedding | HashEmbeddingBag)
    ]
    if not named:
        raise ValueError(
            "freeze: the model has no HashEmbedding or HashEmbeddingBag; pass one that has, or for "
            "collections of recsdk_sharding call torchrec's quantize_embeddings"
        )
    for name, module in named:
        if type(module) not in (HashEmbedding, HashEmbeddingBag):
            raise ValueError(
                f"freeze: {name} is a {type(module).__name__}, whose forward may differ from that "
                "of the class it derives from; freeze its table with freeze_tables"
            )
        if module.max_norm is not None:
            raise ValueError(
                f"freeze: {name} has max_norm={module.max_norm}, and a frozen table gives rows as "
                "they are; train without it to freeze the model"
            )
    return [module for _, module in named]


def _served(module: Any, table: ServingTable) -> nn.Module:
    kwargs = {"padding_idx": module.padding_idx, "dtype": module.weight.dtype}
    if isinstance(module, HashEmbedding):
        return ServingEmbedding(table, **kwargs).eval()
    bags = {"mode": module.mode, "include_last_offset": module.include_last_offset}
    return ServingEmbeddingBag(table, **bags, **kwargs).eval()
