"""Refuses losses that a GradScaler has scaled, before they reach a table's rows.

A scaler unscales gradients, and looks for infinite ones, between backward and the optimizer's step.
A table has no such moment: its update runs in backward, and the scale would multiply it. A gradient
does not show that it is scaled. So this module replaces `torch.amp.GradScaler.scale` by a method
that does the same and also notes the backward passes from its results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.hooks import unserializable_hook

__all__ = ["refuse_scaled_loss"]

_MOST_PASSES = 64  # those that failed are left over
_scaler_of_pass: dict[int, Any] = {}
"""By the number that torch's engine gives a backward pass."""


def refuse_scaled_loss(tables: Iterable[str]) -> None:
    """Raises RuntimeError if the running backward pass began at a scaled loss.

    `tables` are names of those that train in backward. It does not notice the backward of a
    reentrant checkpoint, which is a pass of its own, nor one under compiled autograd.
    """
    scaler = _scaler_of_pass.get(torch._C._current_graph_task_id())
    if scaler is None:
        return
    names = sorted(tables)
    if names:
        raise RuntimeError(
            f"a GradScaler has scaled the loss that trains tables {names}: its scale is "
            f"{scaler.get_scale():g}, and rows are updated in backward, before a scaler can "
            "unscale: train plain modules by a RowOptimizer, or under torch.autocast with "
            "bfloat16, which needs no scaler, or pass enabled=False to the GradScaler"
        )


def _note(scaler: Any, result: Any) -> Any:
    """Notes backward passes from the tensors of a result; returns the result."""
    if isinstance(result, torch.Tensor):
        if result.requires_grad:
            hook = unserializable_hook(functools.partial(_begin_pass, scaler))  # type: ignore[no-untyped-call]
            result.register_hook(hook)  # type: ignore[no-untyped-call]
    elif isinstance(result, (list, tuple)):
        for each in result:
            _note(scaler, each)
    elif isinstance(result, Iterator):
        return (_note(scaler, each) for each in result)
    return result


def _begin_pass(scaler: Any, grad: torch.Tensor) -> None:
    if torch.compiler.is_compiling():
        return  # compiled autograd traces hooks, and cannot trace what follows
    number = torch._C._current_graph_task_id()
    for old in list(_scaler_of_pass)[: 1 - _MOST_PASSES]:
        _scaler_of_pass.pop(old, None)
    _scaler_of_pass[number] = scaler
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: _scaler_of_pass.pop(number, None))


def _watched(scale: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    @functools.wraps(scale)
    def watched(self: Any, outputs: torch.Tensor | Iterable[torch.Tensor]) -> Any:
        result = scale(self, outputs)
        return _note(self, result) if self.is_enabled() else result

    watched._is_watched = True  # type: ignore[attr-defined]
    return watched


def _watch(kind: type[Any]) -> None:
    """Watches the method `scale` of a class, and of each subclass that has its own."""
    own = vars(kind).get("scale")
    if own is not None and not hasattr(own, "_is_watched"):
        kind.scale = _watched(own)
    subclasses: list[type[Any]] = kind.__subclasses__()
    for each in subclasses:
        _watch(each)


def _watch_subclass(kind: type[Any], /, **kwargs: Any) -> None:
    super(torch.amp.GradScaler, kind).__init_subclass__(**kwargs)
    _watch(kind)


_watch(torch.amp.GradScaler)
torch.amp.GradScaler.__init_subclass__ = classmethod(_watch_subclass)  # type: ignore[method-assign, assignment]
