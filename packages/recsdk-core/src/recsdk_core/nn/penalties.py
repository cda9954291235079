"""Penalties on rows, in place of those on a parameter.

Shape letters: U distinct rows, D row width.
"""

from __future__ import annotations

import torch
from torch import nn

from recsdk_core.combine import distinct_keys
from recsdk_core.nn.function import FeatureBags, TableBags, gather_features
from recsdk_core.nn.row_gradients import RowGradients
from recsdk_core.nn.rows_parameter import RowsParameter
from recsdk_core.outcome import Outcome

__all__ = ["l2"]


# It reads keys that a compiled forward has not noted where compilers see it.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def l2(module: nn.Module, last_batch: bool = True) -> torch.Tensor:
    """The sum of squares of rows of a model's plain modules, to add to a loss: float32, a scalar.

    Of each `HashEmbedding` and `HashEmbeddingBag` in `module`: with `last_batch` the rows of the
    keys of its last forward in training mode, each once, so that no other row moves; without it all
    rows, as a penalty on `nn.Embedding.weight` has them. A key without a row adds nothing, and a
    model without such modules gives 0. Frozen tables add to the value only.

    The gradient goes the way of others, to a `RowOptimizer`. A module with an `optimizer` of its
    own would take it as an update for itself: give that optimizer weight_decay, which is twice the
    penalty's factor. So it raises ValueError, unless gradients are off. Raises RuntimeError if
    `last_batch` and a module had no forward in training mode. Cost: one lookup of these rows, and
    another part of their gradients.

    >>> import torch
    >>> from recsdk_core.nn import HashEmbedding, RowOptimizer, l2
    >>> embedding = HashEmbedding.from_pretrained(torch.tensor([7]), torch.ones(1, 4), freeze=False)
    >>> optimizer = RowOptimizer(embedding, torch.optim.SGD, lr=0.1)
    >>> (embedding(torch.tensor([7, 7])).sum() + 0.5 * l2(embedding)).backward()
    >>> embedding.weight.grad.tolist()
    [[3.0, 3.0, 3.0, 3.0]]
    """
    weights = [
        each
        for each in module.parameters()
        if isinstance(each, RowsParameter) and each.gradients is not None
    ]
    total = torch.zeros((), dtype=torch.float32)
    for weight in weights:
        assert weight.gradients is not None
        total = total + _rows_of(weight, weight.gradients, last_batch).square().sum()
    return total


def _rows_of(weight: RowsParameter, gradients: RowGradients, last_batch: bool) -> torch.Tensor:
    """(U, D) rows, whose gradients reach the table."""
    table = gradients.table
    assert table is not None
    if weight.requires_grad and torch.is_grad_enabled():
        _check_waits(gradients, table.name)
    keys = gradients.keys_of_last_batch() if last_batch else _all_keys(gradients)
    lease = table.lease()
    rows_N, outcomes_N = table.map(keys, False, lease=lease)
    rows_U, _ = distinct_keys(rows_N[outcomes_N <= int(Outcome.INSERTED)])
    found = torch.full(rows_U.shape, int(Outcome.FOUND), dtype=torch.uint8)
    bags = TableBags(
        table=table,
        features=[FeatureBags(rows=rows_U, outcomes=found)],
        lease=lease,
        gradients=None if gradients.is_fused else gradients,
    )
    return gather_features([bags], weight)


def _check_waits(gradients: RowGradients, name: str) -> None:
    gradients.check_trained()
    if not gradients.waits:
        raise ValueError(
            f"table {name!r}: l2 would be an update of its own, since its module's optimizer "
            "updates rows in backward: give that optimizer weight_decay, or train the module by a "
            "RowOptimizer"
        )
    gradients.check_owner()


def _all_keys(gradients: RowGradients) -> torch.Tensor:
    assert gradients.table is not None
    batches = [torch.from_numpy(each.keys) for each in gradients.table.export(state=False)]
    return torch.cat([torch.empty(0, dtype=torch.int64), *batches])
