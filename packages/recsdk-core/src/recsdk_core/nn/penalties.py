"""Penalties on rows, in place of those on a parameter."""

from __future__ import annotations

import torch
from torch import nn
from torch.fx import _symbolic_trace

from recsdk_core._internal.checks import require_bool
from recsdk_core.nn.function import run
from recsdk_core.nn.modules import HashEmbedding, HashEmbeddingBag
from recsdk_core.nn.operators import is_recorded, seen_by_compilers, squares

__all__ = ["l2"]

_is_traced = getattr(_symbolic_trace, "is_fx_symbolic_tracing", _symbolic_trace.is_fx_tracing)


@seen_by_compilers
def l2(module: nn.Module, *, last_batch: bool = True) -> torch.Tensor:
    """The sum of squares of rows of a model's plain modules, to add to a loss: float32, a scalar.

    Of each `HashEmbedding` and `HashEmbeddingBag` in `module`: with `last_batch` the rows of the
    keys of its forwards in training mode since the last backward or `l2` before them, each once, so
    that no other row moves; without it all rows, as a penalty on `nn.Embedding.weight` has them. A
    key without a row adds nothing, and a model without such modules gives 0. Frozen tables add to
    the value only. Of forwards that no backward can follow (gradients off, or frozen), the last one
    counts, unless others have begun the batch.

    The gradient goes the way of others, to a `RowOptimizer`. A module with an `optimizer` of its
    own would take it as an update for itself: give that optimizer weight_decay, which is twice the
    penalty's factor. For such a module this raises ValueError, unless gradients are off. Raises
    RuntimeError if a module had no forward in training mode, with `last_batch`. Cost: one lookup
    of these rows, and their gradients once more.

    >>> import torch
    >>> from recsdk_core.nn import HashEmbedding, RowOptimizer, l2
    >>> embedding = HashEmbedding.from_pretrained(torch.tensor([7]), torch.ones(1, 4), freeze=False)
    >>> optimizer = RowOptimizer(embedding, torch.optim.SGD, lr=0.1)
    >>> (embedding(torch.tensor([7, 7])).sum() + 0.5 * l2(embedding)).backward()
    >>> embedding.weight.grad.tolist()
    [[3.0, 3.0, 3.0, 3.0]]
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"l2: module must be a torch.nn.Module, got {type(module).__name__}")
    require_bool("l2", last_batch=last_batch)
    tables = [
        each for each in module.modules() if isinstance(each, HashEmbedding | HashEmbeddingBag)
    ]
    zero = torch.zeros((), dtype=torch.float32, device="cpu")
    # Sums with a name would stay in the traceback of a Ctrl-C, and their batches in flight.
    return sum([_squares_of(each, last_batch) for each in tables], zero)


def _squares_of(module: HashEmbedding | HashEmbeddingBag, last_batch: bool) -> torch.Tensor:
    if is_recorded(module.number_1):
        return squares(module, last_batch)
    if _is_traced():
        raise RuntimeError(
            f"torch.fx cannot trace l2, whose rows are those of the keys that "
            f"{type(module).__name__} last looked up: add it to the loss outside of what is traced"
        )
    trains = module.weight.requires_grad and torch.is_grad_enabled()
    node = module.begin_squares(last_batch, trains=trains)
    try:
        return run(node, module.weight)
    except BaseException:
        node.end()  # the error's traceback would hold its lease
        raise
