"""Learns, from one batch and by object identity, which part of a batch each sharded module reads.

The first batch runs through the plain model, while a hook on each sharded module looks at its
input. If the input is the same object as some part of the batch, it is a feed: from the second
batch on that part goes to the module's input exchange ahead of time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torchrec.distributed.types import ShardedModule

from recsdk_pipeline._internal.clicks import takes_clicks
from recsdk_sharding.exchange import HostExchange, exchanges_of

Way = tuple[tuple[str, Any], ...]
"""How to get from a batch to its part: ("item", key) or ("attribute", name), outermost first."""

_DEEPEST = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Feed:
    """One sharded module and the part of the batch that it reads."""

    name: str
    module: ShardedModule[Any, Any, Any, Any]
    way: Way
    exchange: HostExchange | None
    """Where the module's host work runs; None for a stock module."""
    takes_clicks: bool = False
    """Whether a table of the module goes by clicks."""

    def part_of(self, batch: Any) -> Any:
        """Return the part of `batch` that the module reads."""
        part = batch
        for kind, step in self.way:
            part = part[step] if kind == "item" else getattr(part, step)
        return part


@dataclasses.dataclass(frozen=True, kw_only=True)
class Feeds:
    """What was learned about a model."""

    feeds: tuple[Feed, ...] = ()
    can_look_ahead: bool = False
    """False if host work of some module can only start inside the model's forward."""


def find_way(whole: Any, wanted: Any) -> Way | None:
    """Return the way from `whole` to the object `wanted`, or None if it is no part of it."""
    level: list[tuple[Way, Any]] = [((), whole)]
    for _ in range(_DEEPEST):
        for way, part in level:
            if part is wanted:
                return way
        level = [((*way, step), inner) for way, part in level for step, inner in _parts(part)]
    return None


class FeedSpy:
    """Watches the inputs of the sharded modules of `model` while it runs on `batch`."""

    def __init__(self, model: nn.Module, batch: Any) -> None:
        self._batch = batch
        self._modules = dict(_sharded_modules(model))
        self._calls: dict[str, list[Way | None]] = {name: [] for name in self._modules}
        self._handles: list[Any] = []

    def __enter__(self) -> FeedSpy:
        for name, module in self._modules.items():
            hook = module.register_forward_pre_hook(self._hook(name), with_kwargs=True)
            self._handles.append(hook)
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def feeds(self) -> Feeds:
        """Return the modules that read exactly one part of the batch, in the order of calls."""
        called = [(name, ways) for name, ways in self._calls.items() if ways]
        matched = [self._feed(name, ways[0]) for name, ways in called if len(ways) == 1]
        feeds = tuple(feed for feed in matched if feed is not None)
        fed = {feed.name for feed in feeds}
        if any(_exchange(self._modules[name]) for name in self._modules if name not in fed):
            # Its exchange runs jobs in one order on all ranks; inside forward, the module would
            # come after jobs of later batches.
            return Feeds()
        return Feeds(feeds=feeds, can_look_ahead=True)

    def _hook(self, name: str) -> Callable[..., None]:
        def look(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = (*args, *kwargs.values())
            way = find_way(self._batch, given[0]) if len(given) == 1 else None
            self._calls[name].append(way)

        return look

    def _feed(self, name: str, way: Way | None) -> Feed | None:
        module = self._modules[name]
        if way is None:
            return None
        return Feed(
            name=name,
            module=module,
            way=way,
            exchange=_exchange(module),
            takes_clicks=takes_clicks(module),
        )


def _sharded_modules(
    model: nn.Module, name: str = ""
) -> Iterator[tuple[str, ShardedModule[Any, Any, Any, Any]]]:
    """The outermost sharded modules; those inside another run as part of it."""
    if isinstance(model, ShardedModule):
        yield name, model
        return
    for child_name, child in model.named_children():
        yield from _sharded_modules(child, f"{name}.{child_name}" if name else child_name)


def _exchange(module: nn.Module) -> HostExchange | None:
    return next(iter(exchanges_of(module)), None)


def _parts(value: Any) -> Iterator[tuple[tuple[str, Any], Any]]:
    if isinstance(value, torch.Tensor | str | bytes):
        return
    if isinstance(value, Mapping):
        yield from ((("item", key), part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((("item", index), part) for index, part in enumerate(value))
    else:
        names = [*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())]
        yield from ((("attribute", n), getattr(value, n)) for n in names if hasattr(value, n))
