"""Operators whose gradient exists on the cpu only.

An operator with an autograd kernel for key AutogradCPU and none for other devices gives, on another
device, a result without a gradient. The simulated device runs such operators, gradient included,
on the cpu: torchrec's own modules need some of them, with variable batch sizes for instance. An
operator that has no autograd kernel at all raises, if an input requires a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch.utils._pytree import tree_map

from recsdk_npusim.library import operators

__all__ = ["bridge_gradients", "bridged_operators", "cpu_only_autograd_operators"]

_SUBSTITUTES = ("Autograd", "AutogradPrivateUse1", "CompositeImplicitAutograd")
_libraries: dict[str, torch.library.Library] = {}


def cpu_only_autograd_operators() -> list[str]:
    """Operators of libraries loaded by now that would lose their gradient, by full name."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return sorted(
        name
        for name in torch._C._dispatch_get_all_op_names()
        if has_kernel(name, "AutogradCPU")
        and not any(has_kernel(name, key) for key in _SUBSTITUTES)
    )


def bridged_operators() -> list[str]:
    """Operators that were such, and now have their gradient."""
    return sorted(_libraries)


def bridge_gradients() -> None:
    """Gives a gradient to such operators of libraries loaded by now, and of those loaded later."""
    _bridge_loaded()
    load: Callable[[str], None] = torch.ops.load_library

    @wraps(load)
    def load_and_bridge(path: str) -> None:
        load(path)
        _bridge_loaded()

    torch.ops.load_library = load_and_bridge  # type: ignore[method-assign]


def _bridge_loaded() -> None:
    for name in cpu_only_autograd_operators():
        namespace, _, rest = name.partition("::")
        library = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
        library.impl(rest, _bridge(name), "AutogradPrivateUse1")  # type: ignore[no-untyped-call]
        _libraries[name] = library  # the registration lives as long as this


def _overload(name: str) -> Any:
    namespace, _, rest = name.partition("::")
    operator, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), operator)
    return getattr(packet, overload or "default")


def _bridge(name: str) -> Callable[..., Any]:
    """A kernel that runs the operator on the cpu, between differentiable copies."""

    def bridge(*args: Any, **kwargs: Any) -> Any:
        devices: list[torch.device] = []
        to_cpu = partial(_to_cpu, devices)
        result = _overload(name)(*tree_map(to_cpu, args), **tree_map(to_cpu, kwargs))
        return tree_map(partial(_to_device, devices[0]), result)

    return bridge


def _to_cpu(devices: list[torch.device], value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.device.type != "npu":
        return value
    devices.append(value.device)
    return _AliasOnCpu.apply(value)  # type: ignore[no-untyped-call]


def _to_device(device: torch.device, value: Any) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


class _AliasOnCpu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.device = tensor.device
        alias: torch.Tensor = operators.alias_on_cpu(tensor)
        return alias

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.to(ctx.device)
