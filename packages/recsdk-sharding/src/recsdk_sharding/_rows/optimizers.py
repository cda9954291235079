"""From `apply_optimizer_in_backward` to the engine's optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

from torch import nn
from torch.optim import Optimizer

from recsdk_core import optim
from recsdk_sharding._rows.accumulate import ACCUMULATION_ARGUMENTS, TORCH_CLASSES

if TYPE_CHECKING:
    from recsdk_sharding._rows.rows import TableRows

__all__ = [
    "RowOptimizer",
    "arguments_of_class",
    "optimizer_of_parameter",
    "set_learning_rate",
]


class RowOptimizer(Optimizer):
    """Stands for one of `recsdk_core.optim` where torchrec asks for an optimizer's class.

    For optimizers and options that no torch class has: FTRL, clipping, decoupled decay, catching
    up. Tables run it in backward, on any device; its own `step` trains nothing. Raises TypeError if
    `settings` is no optimizer of `recsdk_core.optim`.

    >>> from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    >>> from recsdk_core import optim
    >>> from recsdk_sharding import HashEmbeddingBagCollection, HashEmbeddingBagConfig, RowOptimizer
    >>> config = HashEmbeddingBagConfig(
    ...     name="user", embedding_dim=4, num_embeddings=100, feature_names=["user"]
    ... )
    >>> ebc = HashEmbeddingBagCollection(tables=[config])
    >>> settings = optim.FTRL(lr=0.1, l1_regularization_strength=0.01, clip_norm=1.0)
    >>> apply_optimizer_in_backward(RowOptimizer, ebc.parameters(), {"settings": settings})
    """

    def __init__(self, params: Any, *, settings: optim.Optimizer) -> None:
        if not isinstance(settings, get_args(optim.Optimizer)):
            raise TypeError(
                f"RowOptimizer: settings must be one of recsdk_core.optim, got {settings!r}"
            )
        super().__init__(params, {"lr": settings.lr})

    def step(self, closure: Any = None) -> Any:
        """Does nothing for tables, which update their rows in backward and have no gradient.

        Raises RuntimeError if a parameter has one: it is no table.
        """
        if any(p.grad is not None for group in self.param_groups for p in group["params"]):
            raise RuntimeError(
                "RowOptimizer trains hash tables only, in backward; choose a torch optimizer for "
                "other parameters"
            )


def arguments_of_class(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an optimizer's class, as `apply_optimizer_in_backward` was given them.

    torchrec's own sharders add "optimizer" to the caller's dict, which several parameters may
    share, and call "lr" in it "learning_rate", which is no argument of any class.
    """
    names = {"learning_rate": "lr"}
    return {names.get(name, name): each for name, each in given.items() if name != "optimizer"}


def optimizer_of_parameter(parameter: nn.Parameter, table: str) -> optim.Optimizer | None:
    """The engine's optimizer for what `apply_optimizer_in_backward` left on a parameter.

    Arguments that were not given have the torch class's defaults. None if nothing was applied.
    Raises ValueError, naming the table, for an unsupported class or argument and for two
    optimizers.
    """
    classes: list[type] = getattr(parameter, "_optimizer_classes", [])
    if not classes:
        return None
    if len(classes) > 1:
        names = [cls.__name__ for cls in classes]
        raise ValueError(
            f"table {table!r}: apply_optimizer_in_backward was called more than once: {names}; a "
            "table has one optimizer"
        )
    arguments = arguments_of_class(parameter._optimizer_kwargs[0])  # type: ignore[attr-defined]
    if classes[0] is RowOptimizer:
        settings: optim.Optimizer = arguments["settings"]
        return settings
    for name in ACCUMULATION_ARGUMENTS if classes[0] in TORCH_CLASSES else ():
        arguments.pop(name, None)
    try:
        return optim.from_torch(TORCH_CLASSES.get(classes[0], classes[0]), arguments)
    except ValueError as error:
        raise ValueError(f"table {table!r}: {error}") from error


def set_learning_rate(rows: TableRows, rate: float) -> None:
    """Sets the learning rate of a table, and in the optimizers that hand it theirs."""
    rows.learning_rate = rate
    for each in getattr(rows.weight, "_in_backward_optimizers", []):
        for group in each.param_groups:
            if any(parameter is rows.weight for parameter in group["params"]):
                group["lr"] = rate
