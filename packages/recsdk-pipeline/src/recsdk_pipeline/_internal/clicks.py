"""Clicks of a batch's samples, for tables that go by shows and clicks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsdk_sharding import with_clicks

__all__ = ["giving_clicks", "takes_clicks", "with_clicks_of"]


def takes_clicks(module: nn.Module) -> bool:
    """Whether a table of the module goes by clicks."""
    data_taken = getattr(module, "data_taken", None)
    return data_taken is not None and "clicks" in data_taken()


def with_clicks_of(batch: Any, features: Any) -> Any:
    """Features of a batch with the clicks of its `click_labels`, if it has such."""
    labels = getattr(batch, "click_labels", None)
    if labels is None or not isinstance(features, KeyedJaggedTensor):
        return features
    return with_clicks(features, labels)


@contextmanager
def giving_clicks(model: nn.Module, batch: Any) -> Iterator[None]:
    """Inside, collections that run in the model's forward get the clicks of the batch."""
    with ExitStack() as hooks:
        if getattr(batch, "click_labels", None) is not None:
            for module in model.modules():
                if takes_clicks(module):
                    handle = module.register_forward_pre_hook(_hook_of(batch), with_kwargs=True)
                    hooks.callback(handle.remove)
        yield


def _hook_of(batch: Any) -> Any:
    def add(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = {name: with_clicks_of(batch, each) for name, each in kwargs.items()}
        return tuple(with_clicks_of(batch, each) for each in args), given

    return add
