"""What test_clipping.py runs on every rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from loops import LOOPS
from on_ranks import own_batches
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import KeyedOptimizer, OptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from worlds import Setup, dense_of, new_model, optimizer_of, rows_of, shard, unwrapped

MOST = 1e-2
"""Far below what the gradients of the dense layers have."""


class _Clipped(OptimizerWrapper):
    """Clips the gradients of some parameters before each step, as a loop does by hand."""

    def __init__(
        self, optimizer: KeyedOptimizer, parameters: Iterable[nn.Parameter], how: GradientClipping
    ) -> None:
        super().__init__(optimizer)
        self._parameters, self._how = list(parameters), how

    def step(self, closure: Any = None) -> None:
        if self._how is GradientClipping.NORM:
            clip_grad_norm_(self._parameters, MOST)
        elif self._how is GradientClipping.VALUE:
            clip_grad_value_(self._parameters, MOST)
        super().step(closure)


def train(setup: Setup, loop: str, how: str, which: str) -> dict[str, Any]:
    """Trains with gradients clipped of all parameters, the dense ones, or by torchrec."""
    model = shard(new_model(setup, "meta"), setup)
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer: Any = optimizer_of(model, 0.5)
    if which == "torchrec":
        optimizer = GradientClippingOptimizer(optimizer, GradientClipping(how), MOST)
    else:
        clipped = dense.values() if which == "dense" else model.parameters()
        optimizer = _Clipped(optimizer, clipped, GradientClipping(how))
    batches = own_batches([[3, 5], [0, 2], [4, 4], [2, 1]], weighted=False)
    outputs = [out.detach().cpu().numpy() for out in LOOPS[loop](model, optimizer, batches)]
    return {
        "outputs": outputs,
        "rows": rows_of(unwrapped(model).ebc.tables()),
        "dense": dense_of(model),
        "with gradients": [
            name
            for name, parameter in model.named_parameters()
            if name not in dense and parameter.grad is not None
        ],
    }
