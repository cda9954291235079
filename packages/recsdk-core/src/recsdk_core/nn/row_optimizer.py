"""A torch optimizer over the tables of a model, for loops that call `step` themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from recsdk_core.nn.row_gradients import RowGradients
from recsdk_core.nn.rows_parameter import RowsParameter
from recsdk_core.optim import Optimizer, from_torch
from recsdk_core.tables import update_tables

__all__ = ["RowOptimizer"]


class RowOptimizer(torch.optim.Optimizer):
    """Trains the tables of plain modules by the loop's own `backward`, `step` and `zero_grad`.

    `params`: a model, of which it takes the tables, or parameters or groups of them, all of which
    must be `weight` of a `HashEmbedding` or `HashEmbeddingBag`. `optimizer_class` is one that
    `recsdk_core.optim.from_torch` takes, with its arguments as `kwargs`.

    From then on a backward through these modules updates no row. It adds its gradients up per row
    in `weight.grad`, float32 (U, D) of the U rows touched since the last `zero_grad`, which
    GradScaler and the functions clip_grad_norm_ and clip_grad_value_ read and scale as they do
    others. `step` gives each table with gradients one update, in the engine. A scheduler may change
    `lr`; another option that changes makes `step` raise ValueError. Rows and their optimizer state
    are in the model's `state_dict`, not in this one's; make the optimizer before loading them.

    Making it gives each table this optimizer with fresh state. Raises ValueError for a parameter
    that is no table, a module that was given an `optimizer` of its own, and an argument that the
    engine does not know; BusyError while outputs of earlier forwards live, or gradients of
    another RowOptimizer wait. Cost of a backward: the rows touched since `zero_grad`.

    >>> import torch
    >>> from recsdk_core.nn import HashEmbedding, RowOptimizer
    >>> embedding = HashEmbedding(4, name="item")
    >>> optimizer = RowOptimizer(embedding, torch.optim.Adagrad, lr=0.1)
    >>> embedding(torch.tensor([7, 7, -1])).sum().backward()
    >>> embedding.weight.grad.tolist()
    [[2.0, 2.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0]]
    >>> optimizer.step()
    >>> optimizer.zero_grad()
    """

    def __init__(self, params: nn.Module | Iterable[Any], optimizer_class: type, **kwargs: Any):
        self._kind = optimizer_class
        self._mark = object()
        defaults = {"lr": from_torch(optimizer_class, kwargs).lr, **kwargs}
        self._options = list(defaults)
        super().__init__(_tables_of(params), defaults)
        self._is_made = True
        gradients = [(each, group) for group in self.param_groups for each in _rows(group)]
        for each, _ in gradients:
            each.table.check_idle()  # type: ignore[union-attr]
        for each, group in gradients:
            self._take(each, group)

    def _take(self, gradients: RowGradients, group: dict[str, Any]) -> None:
        assert gradients.table is not None
        gradients.drop()
        gradients.table.set_optimizer(self._settings(group))
        gradients.waits, gradients.owner = True, self._mark

    def _settings(self, group: dict[str, Any]) -> Optimizer:
        return from_torch(self._kind, {name: group[name] for name in self._options})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the optimizer is made."""
        if hasattr(self, "_is_made"):
            raise ValueError(
                "RowOptimizer takes no further group; make another RowOptimizer for these tables"
            )
        _check_group(param_group)
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients; with `set_to_none=False` too, since a row takes memory."""
        for group in self.param_groups:
            for each in _rows(group):
                each.drop()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of each table that has gradients; calls `closure` first, returns its result.

        Raises ValueError for an option that changed, other than lr, and RuntimeError if another
        RowOptimizer has taken a table; then no row has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        calls: list[Any] = []
        rates: list[tuple[RowGradients, float]] = []
        for group in self.param_groups:
            for each in _rows(group):
                rates.append((each, self._check(each, group).lr))
                if each.values is not None:
                    calls.append((each.table, [(each.bags(), each.values.contiguous(), 0)]))
        for each, rate in rates:
            each.table.learning_rate = rate  # type: ignore[union-attr]
        update_tables(calls)
        return loss

    def _check(self, each: RowGradients, group: dict[str, Any]) -> Optimizer:
        """What the group asks for; raises unless the table has it but for the learning rate."""
        table = each.table
        assert table is not None
        if each.owner is not self._mark:
            raise RuntimeError(
                f"table {table.name!r}: another RowOptimizer trains it since; step that one"
            )
        asked = self._settings(group)
        if replace(table.optimizer, lr=asked.lr) != asked:
            raise ValueError(
                f"table {table.name!r}: of an option's group only lr may change: it was made with "
                f"{table.optimizer}, and the group asks for {asked}; a scheduler that moves betas "
                "or momentum takes cycle_momentum=False"
            )
        return asked


def _rows(group: dict[str, Any]) -> list[RowGradients]:
    return [parameter.gradients for parameter in group["params"]]


def _tables_of(params: Any) -> Any:
    if not isinstance(params, nn.Module):
        return params
    found = [each for each in params.parameters() if isinstance(each, RowsParameter)]
    if not found:
        raise ValueError(f"RowOptimizer found no table in {type(params).__name__}")
    return found


def _check_group(group: dict[str, Any]) -> None:
    params = group["params"]
    params = [params] if isinstance(params, torch.Tensor) else list(params)
    for each in params:
        gradients = getattr(each, "gradients", None)
        if gradients is None:
            raise ValueError(
                f"RowOptimizer takes weights of HashEmbedding and HashEmbeddingBag, got "
                f"{type(each).__name__} {tuple(each.size())}; give it a torch optimizer of its own"
            )
        if gradients.is_fused:
            raise ValueError(
                f"table {each.table_name!r} was given an optimizer where its module is made, "
                "which updates rows in backward; leave that out, or the RowOptimizer"
            )
    group["params"] = params
