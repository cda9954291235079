"""Torch modules that look like nn.Embedding and nn.EmbeddingBag but take raw 64-bit keys.

Shape letters: N keys, B bags, D row width.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from recsdk_core.nn.bag_arguments import bag_offsets, check_bags, require_tensor
from recsdk_core.nn.embedding_arguments import (
    NO_MARKS,
    Marks,
    check_ends,
    left_out,
    marks_of,
    padding_among,
)
from recsdk_core.nn.function import Node, run
from recsdk_core.nn.operators import is_recorded, leaf, lookup, pool, seen_by_compilers
from recsdk_core.nn.rows_parameter import facts_of
from recsdk_core.nn.table_module import TableModule

__all__ = ["HashEmbedding", "HashEmbeddingBag"]


class HashEmbedding(TableModule):
    """Looks up one vector for each raw key, as nn.Embedding does for dense indexes.

    In training mode (`module.training`) an unseen key gets a row. In evaluation mode, and beyond
    `max_rows`, a key without a row reads `default`. The gradient mode does not matter for
    this. In either mode a backward applies one update of the fused optimizer to the rows that its
    forward found, as torch trains its own modules. A second backward through one forward raises
    RuntimeError. A forward in evaluation mode changes nothing but the counters in `table.stats()`.

    `HashEmbedding(D)` and `HashEmbedding(num_embeddings, D)` are the same module: num_embeddings is
    what a planner is told, and limits nothing (`max_rows` does). `padding_idx`, any key, reads
    zeros, never gets a row and is never trained; bags are pooled without it. `scale_grad_by_freq`
    divides the gradient of a key by how often it is in the forward. With `max_norm` a lookup in
    training mode scales back, in the table, the rows whose `norm_type`-norm exceeds it. A lookup
    in evaluation mode reads such rows scaled, and only a backward through it writes them. Outputs
    have the dtype of `weight`, float32 until `module.to` changes it; rows stay as `dtype` says.
    Arguments of nn.Embedding that cannot be honoured (sparse, device) raise ValueError and say why.

    `name` and `seed` identify the first rows of ids: modules with equal ones have equal first rows.
    Without a name the module draws one from torch's generator, as nn.Embedding draws its rows: no
    two such modules have equal rows, and `torch.manual_seed` repeats them. The draw is in the
    `state_dict`, and loading one takes it over. What goes by names, sharding and recsdk-sharding's
    Saver, refuses a drawn one.

    `optimizer` is one of recsdk_core.optim, or a torch or torchrec optimizer class with its
    `optimizer_kwargs`. Leave it out if a `RowOptimizer` trains the table in the loop's `step`.
    Without either, or `table.set_optimizer`, a backward raises RuntimeError. The gradients of
    `accumulate_steps` backwards are applied as one update; a `state_dict` lacks the gradients that
    wait for it. A backward counts once, however many lookups of the table it reaches; that
    of a reentrant checkpoint is one of its own.

    With `eviction` each forward in training mode is a step of the table: keys leave a full group
    for those that come, see `Evict`, and two forwards before a backward are two steps. A row that
    leaves while a backward is to come is trained by it, and given to another key only afterwards;
    a key that comes back meanwhile has a new row. `times`, `scores` and `clicks` of keys are
    arguments of forward; `table.time` is the time of forwards that bring none. A forward that a
    checkpoint repeats in backward is no step, and raises RuntimeError if keys have no row by then.

    With `admission` too each forward in training mode is a step: new keys get a row when the rule
    lets them in, see `Admit`. Others read `default`, and no gradient is kept of them. `counts`
    and `clicks` of keys are arguments of forward. A checkpoint's repeated forward counts nothing.

    Other arguments are those of `Table`. `state_dict()` holds keys, weights, optimizer state and
    update count; deepcopy and pickle copy the rows, and torch's AveragedModel averages them.
    torch.distributed.checkpoint saves the module once for all ranks, and refuses if ranks have
    different rows; it loads into a module with any rows. What torch's or torchrec's
    `apply_optimizer_in_backward` gives to `weight` is taken at the next forward, as `optimizer` is;
    ValueError if the module has one. Raises RuntimeError under DistributedDataParallel with more
    than one rank, under `torch.jit.trace`, for `torch.jit.script` and for `share_memory`.

    >>> import torch
    >>> from recsdk_core.nn import HashEmbedding
    >>> embedding = HashEmbedding(4, optimizer=torch.optim.Adagrad, optimizer_kwargs={"lr": 0.1})
    >>> embedding(torch.tensor([[-5, 123456789012345678]])).sum().backward()
    >>> len(embedding.table)
    2
    """

    @seen_by_compilers
    def forward(
        self,
        keys: torch.Tensor,
        times: torch.Tensor | int | None = None,
        scores: torch.Tensor | None = None,
        counts: torch.Tensor | int | None = None,
        clicks: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """keys of any shape, int64 -> (*shape, D) in the dtype of `weight`.

        `times` int64 and `scores` float32 have the shape of keys and are for `eviction`, `counts`
        int64 for `admission`, `clicks` int64 for rules of shows and clicks, see `Table.map`; all
        but scores may be one for all. Evaluation uses none of them. Raises ValueError or TypeError
        for tensors that do not fit, and in training mode what `Table.map` raises.
        """
        given = marks_of(times, scores, counts, clicks)
        if isinstance(keys, torch.fx.Proxy):
            recorded = leaf(self, keys)
            self._refuse_marks(given)
            return recorded
        require_tensor("keys", keys)
        weight = self.weight
        requires_grad, dtype = facts_of(weight)
        if is_recorded(keys):
            self._refuse_marks(given)
            return self._shown(lookup(self, keys), keys, dtype)
        marks = self._marks(keys, given)
        trains = requires_grad and torch.is_grad_enabled()
        node = self.begin(keys, insert=self.training, trains=trains, marks=marks)
        try:
            vectors = run(node, weight).view(*keys.shape, self.table.dim)
            return self._shown(vectors, keys, dtype)
        except BaseException:
            node.end()  # the error's traceback would hold its batch
            raise

    def _shown(self, vectors: torch.Tensor, keys: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Vectors without those of padding, in a dtype."""
        is_padding = padding_among(keys, self._padding)
        if is_padding is not None:
            vectors = vectors.masked_fill(is_padding.unsqueeze(-1), 0.0)
        return vectors if dtype is torch.float32 else vectors.to(dtype)

    def begin(
        self, keys: torch.Tensor, *, insert: bool, trains: bool, marks: Marks = NO_MARKS
    ) -> Node:
        """Maps the keys; the node gives one vector for each of them."""
        return self._begin(keys.reshape(-1).contiguous(), None, None, insert, trains, marks)


class HashEmbeddingBag(TableModule):
    """Pools bags of raw keys, as nn.EmbeddingBag does for dense indexes.

    `mode` is "sum", the default, "mean" or "max". The mean divides by the number of keys of the
    bag, or by the sum of its weights. "max" costs a vector for each key and takes no
    weights; `scale_grad_by_freq` takes them with "sum" only. With `include_last_offset` offsets are
    (B + 1,), else (B,), as in torch. An empty bag pools to zeros. Raises ValueError for another
    mode, and for "max" with `scale_grad_by_freq`. Otherwise as `HashEmbedding`.

    >>> import torch
    >>> from recsdk_core.nn import HashEmbeddingBag
    >>> bag = HashEmbeddingBag(8, mode="mean", name="item")
    >>> bag(torch.tensor([7, 7, -1]), torch.tensor([0, 2, 2])).shape
    torch.Size([3, 8])
    """

    def __init__(
        self,
        *sizes: int,
        mode: Literal["sum", "mean", "max"] = "sum",
        include_last_offset: bool = False,
        **kwargs: Any,
    ) -> None:
        """`kwargs` are the keyword arguments of `HashEmbedding`."""
        if mode not in ("sum", "mean", "max"):
            raise ValueError(f"mode must be 'sum', 'mean' or 'max', got {mode!r}")
        super().__init__(*sizes, **kwargs)
        if mode == "max" and self.scale_grad_by_freq:
            raise ValueError(
                "HashEmbeddingBag: mode='max' does not go with scale_grad_by_freq; as in "
                "nn.EmbeddingBag, take one of them"
            )
        self.mode = mode
        self.include_last_offset = include_last_offset

    def _asked_for(self) -> dict[str, Any]:
        own = {"mode": self.mode, "include_last_offset": self.include_last_offset}
        return {**own, **super()._asked_for()}

    @seen_by_compilers
    def forward(
        self,
        keys: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
        times: torch.Tensor | int | None = None,
        scores: torch.Tensor | None = None,
        counts: torch.Tensor | int | None = None,
        clicks: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """keys (N,) with offsets, or (B, L) without, and weights of the same shape -> (B, D).

        `times`, `scores`, `counts`, `clicks` and errors as those of `HashEmbedding`.
        """
        given = marks_of(times, scores, counts, clicks)
        if isinstance(keys, torch.fx.Proxy):
            recorded = leaf(self, keys, offsets, per_sample_weights)
            self._refuse_marks(given)
            return recorded
        if is_recorded(keys):
            self._refuse_marks(given)
            return self._pool_recorded(keys, offsets, per_sample_weights)
        if per_sample_weights is not None:
            self._check_weights(per_sample_weights, keys)
        weights = self._without_padding(keys, per_sample_weights)
        marks = self._marks(keys, given)
        weight = self.weight
        requires_grad, dtype = facts_of(weight)
        trains = requires_grad and torch.is_grad_enabled()
        node = self.begin(keys, offsets, weights, insert=self.training, trains=trains, marks=marks)
        try:
            pooled = run(node, weight)
            return pooled if dtype is torch.float32 else pooled.to(dtype)
        except BaseException:
            node.end()  # the error's traceback would hold its batch
            raise

    def _without_padding(
        self, keys: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor | None:
        is_padding = None if self.mode == "max" else padding_among(keys, self._padding)
        if is_padding is None:
            return weights
        # What has no weight is left out of a sum, and of what a mean divides by.
        given = torch.ones_like(keys, dtype=torch.float32) if weights is None else weights
        return given.masked_fill(is_padding, 0.0)

    def _pool_recorded(
        self, keys: torch.Tensor, offsets: torch.Tensor | None, weights: torch.Tensor | None
    ) -> torch.Tensor:
        check_bags(keys, offsets)
        if weights is not None:
            self._check_weights(weights, keys)
        num_bags = keys.shape[0] if offsets is None else offsets.shape[0]
        if offsets is not None and self.include_last_offset:
            num_bags -= 1
        weights = self._without_padding(keys, weights)
        weights = None if weights is None else weights.float()
        return pool(self, keys, offsets, weights, num_bags).to(self.weight.dtype)

    def _check_weights(self, weights: torch.Tensor, keys: torch.Tensor) -> None:
        require_tensor("per_sample_weights", weights)
        if self.mode == "max" or (self.scale_grad_by_freq and self.mode != "sum"):
            raise ValueError(
                "per_sample_weights go with mode='sum' where mode is 'max' or scale_grad_by_freq "
                f"is set, as in nn.EmbeddingBag; got mode={self.mode!r}"
            )
        if weights.shape != keys.shape:
            raise ValueError(
                f"per_sample_weights must have the shape of keys, {tuple(keys.shape)}, got "
                f"{tuple(weights.shape)}"
            )

    def begin(
        self,
        keys: torch.Tensor,
        offsets: torch.Tensor | None,
        weights: torch.Tensor | None,
        *,
        insert: bool,
        trains: bool,
        marks: Marks = NO_MARKS,
    ) -> Node:
        """Maps the keys; the node gives one vector for each bag."""
        ends = bag_offsets(keys, offsets, self.include_last_offset).contiguous()
        if offsets is not None:
            check_ends(ends, len(keys))  # before keys get rows
        keys = keys.reshape(-1).contiguous()
        if self.mode == "max":
            is_padding = padding_among(keys, self._padding)
            marks = marks if is_padding is None else marks.at(~is_padding)
            keys, ends = left_out(keys, ends, self._padding)
        if weights is not None:
            weights = weights.reshape(-1).float().contiguous()
        return self._begin(keys, ends, weights, insert, trains, marks)
