"""Adapts torchrec to models on an Ascend NPU (device type "npu").

torchrec plans for "cpu", "cuda" and "mtia" only, and takes arguments that do not go with hybrid
sharding. So importing the package adapts some of its functions, for device type npu only.
`Topology(compute_device="npu")`, also from `TopologyFactory`, plans as for cuda; the plan's
placements then name npu devices; and `DistributedModelParallel` checks its arguments.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torchrec.distributed import shard
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import planners
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import KernelConfig, Topology
from torchrec.distributed.types import ShardingPlan

from recsdk_sharding._adapt.arguments import (
    check_constraint_types,
    check_model_arguments,
    check_modules_arguments,
    check_planned,
    with_whole_groups,
)
from recsdk_sharding._modules.making_models import made_together
from recsdk_sharding._modules.sharders import are_hybrid_sharders
from recsdk_sharding.tensor_parallel.wrapper import TensorParallelWrapper

__all__ = ["adapt_torchrec", "check_npu_arguments", "compute_device_of"]

_DEVICE = "npu"
_PLANNED_AS = "cuda"
_MARK = "_recsdk_compute_device"
_CONSTRAINTS = "_recsdk_constraints"

# Arguments of DistributedModelParallel that have one possible value on npu.
_FIXED: Mapping[str, Any] = {
    "env": None,
    "init_data_parallel": True,
    "init_parameters": True,
    "data_parallel_wrapper": None,
    "model_tracker_configs": None,
}


def check_npu_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises ValueError if arguments of DistributedModelParallel do not go with device type npu.

    `env`, `init_data_parallel`, `init_parameters`, `data_parallel_wrapper` (or a
    `TensorParallelWrapper`) and `model_tracker_configs` must be at their defaults, the sharders
    those of `get_default_hybrid_sharders`.
    """
    for name, value in _FIXED.items():
        got = arguments.get(name, value)
        if name == "data_parallel_wrapper" and isinstance(got, TensorParallelWrapper):
            continue
        if got is not value:
            allowed = repr(value)
            if name == "data_parallel_wrapper":
                allowed += " or a recsdk_sharding.tensor_parallel.TensorParallelWrapper"
            raise ValueError(
                f"DistributedModelParallel on npu: {name} must be {allowed}, got {got!r}; "
                "leave it out"
            )
    sharders = arguments.get("sharders")
    if not are_hybrid_sharders(sharders):
        kinds = None if sharders is None else [type(sharder).__name__ for sharder in sharders]
        raise ValueError(
            "DistributedModelParallel on npu: sharders must be those of "
            f"recsdk_sharding.get_default_hybrid_sharders(host_env=...), got {kinds}"
        )


def adapt_torchrec() -> None:
    """Adapts torchrec to device type npu; other device types are left as they were.

    On every device torchrec then checks its arguments for models with hash tables.
    """
    DistributedModelParallel.__init__ = _checking(DistributedModelParallel.__init__)
    shard._shard_modules = _checking_modules(shard._shard_modules)
    Topology.__init__ = _planning_as_cuda(Topology.__init__)
    KernelConfig.validate = _valid_for_npu(KernelConfig.validate)
    EmbeddingEnumerator.__init__ = _for_groups_of_npus(EmbeddingEnumerator.__init__)
    EmbeddingEnumerator.enumerate = _checking_constraints(EmbeddingEnumerator.enumerate)
    planners.to_sharding_plan = _placing_on_npu(planners.to_sharding_plan)


def compute_device_of(topology: Topology) -> str:
    """The device type that a topology was made with."""
    return str(getattr(topology, _MARK, topology.compute_device))


def _checking(construct: Any) -> Any:
    signature = inspect.signature(construct)

    @functools.wraps(construct)
    def checked(*args: Any, **kwargs: Any) -> None:
        arguments = signature.bind(*args, **kwargs).arguments

        def check() -> dict[str, Any]:
            if _type_of(arguments.get("device")) == _DEVICE:
                check_npu_arguments(arguments)
            check_model_arguments(arguments)
            return {}

        with made_together("DistributedModelParallel", arguments, check):
            construct(*args, **kwargs)

    return checked


def _checking_modules(shard_modules: Any) -> Any:
    signature = inspect.signature(shard_modules)

    @functools.wraps(shard_modules)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check_modules_arguments(signature.bind(*args, **kwargs).arguments)
        return shard_modules(*args, **kwargs)

    return checked


def _type_of(device: torch.device | str | None) -> str | None:
    if device is None:
        return None
    return device.type if isinstance(device, torch.device) else str(device).partition(":")[0]


def _planning_as_cuda(construct: Any) -> Any:
    @functools.wraps(construct)
    def adapted(self: Any, world_size: int, compute_device: str, *args: Any, **kwargs: Any) -> None:
        planned_as = _PLANNED_AS if compute_device == _DEVICE else compute_device
        construct(self, world_size, planned_as, *args, **kwargs)
        setattr(self, _MARK, compute_device)

    return adapted


def _valid_for_npu(validate: Any) -> Any:
    @functools.wraps(validate)
    def adapted(self: Any) -> None:
        is_npu = self.compute_device == _DEVICE
        validate(replace(self, compute_device=_PLANNED_AS) if is_npu else self)

    return adapted


def _for_groups_of_npus(construct: Any) -> Any:
    """Turns constraints for the device group "npu" into those for the planned device type."""
    signature = inspect.signature(construct)

    @functools.wraps(construct)
    def adapted(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        self, topology = bound.arguments["self"], bound.arguments["topology"]
        given = bound.arguments.get("constraints")
        check_constraint_types(given)
        setattr(self, _MARK, compute_device_of(topology))
        setattr(self, _CONSTRAINTS, given)
        if compute_device_of(topology) == _DEVICE and isinstance(given, Mapping):
            bound.arguments["constraints"] = {
                name: replace(each, device_group=_PLANNED_AS)
                if getattr(each, "device_group", None) == _DEVICE
                else each
                for name, each in given.items()
            }
        construct(*bound.args, **bound.kwargs)

    return adapted


def _checking_constraints(enumerate_options: Any) -> Any:
    @functools.wraps(enumerate_options)
    def adapted(self: Any, module: Any, sharders: Any) -> Any:
        check_planned(module, sharders, getattr(self, _CONSTRAINTS), getattr(self, _MARK))
        return with_whole_groups(enumerate_options(self, module, sharders))

    return adapted


def _placing_on_npu(to_sharding_plan: Any) -> Any:
    @functools.wraps(to_sharding_plan)
    def adapted(sharding_options: Sequence[Any], topology: Any) -> ShardingPlan:
        plan: ShardingPlan = to_sharding_plan(sharding_options, topology)
        if compute_device_of(topology) == _DEVICE:
            for module in plan.plan.values():
                for parameter in module.values():
                    _move_shards(parameter)
        return plan

    return adapted


def _move_shards(parameter: Any) -> None:
    """Rewrites the placements of a planned parameter."""
    if parameter.sharding_spec is not None:
        for shard in parameter.sharding_spec.shards:
            moved = str(shard.placement).replace(_PLANNED_AS, _DEVICE)
            shard.placement = type(shard.placement)(moved)
