"""Data parallelism for models in which some dense parameters are DTensors.

Shape letters: W ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torchrec.distributed.model_parallel import (
    DefaultDataParallelWrapper,
    DistributedModelParallel,
)
from torchrec.distributed.types import ShardingEnv

from recsdk_sharding.tensor_parallel.gathering import gather_under_a_short_name

__all__ = ["TensorParallelWrapper", "check_mesh"]


class TensorParallelWrapper(DefaultDataParallelWrapper):  # type: ignore[misc]
    """torchrec's data parallel wrapper, which leaves DTensors to their mesh.

    Give it to `DistributedModelParallel` after `parallelize_module`. DDP, which fails on DTensors,
    gets all other dense parameters. A DTensor's gradient is the sum over the batches of its
    tensor-parallel ranks; it is summed over the data-parallel ranks too and divided by W, so that
    the loss is the mean over all ranks, as for DDP and for tables. All ranks start from the values
    of the first rank. `load_state_dict` takes whole tensors for DTensors.

    Every rank must have a batch of its own: layers take their input, and give their output, cut
    along the batch (`Shard(0)`). Cost beside that of tensor parallelism: with two dimensions one
    all-reduce for each DTensor parameter in backward, after its gradient, not overlapped.
    """

    _additional_params_to_ignore: set[str]

    def __init__(self, mesh: DeviceMesh, **options: Any) -> None:
        """`mesh`: over all ranks; one dimension, tensor, or two, data and tensor.

        `options` are those of torchrec's `DefaultDataParallelWrapper`. Raises TypeError or
        ValueError for another mesh.
        """
        check_mesh(mesh)
        if mesh.device_type == "cpu":
            gather_under_a_short_name()
        super().__init__(**options)
        self._mesh = mesh

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Called by `DistributedModelParallel`."""
        modules = [
            module
            for module in dmp.module.modules()
            if any(isinstance(p, DTensor) for p in module.parameters(recurse=False))
        ]
        cut = {name: p for name, p in dmp.named_parameters() if isinstance(p, DTensor)}
        data_group = self._mesh.get_group(0) if self._mesh.ndim == 2 else None
        for parameter in cut.values():
            _start_equal(parameter, data_group)
        self._additional_params_to_ignore = self._additional_params_to_ignore.union(cut)
        super().wrap(dmp, env, device)
        # Not before: moving a model to its device drops the hooks of DTensors.
        for parameter in cut.values():
            _hook_gradient(parameter, _Averaging(parameter, self._mesh.size(), data_group))
        for module in modules:
            module.register_load_state_dict_pre_hook(_distribute_whole_tensors)
            module.register_forward_pre_hook(_have_gradient_waited_for, prepend=True)


def check_mesh(mesh: DeviceMesh) -> None:
    """Raises TypeError or ValueError for a mesh that tables and DTensors cannot share."""
    make = 'init_device_mesh(device_type, (data, tensor), mesh_dim_names=("data", "tensor"))'
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a torch DeviceMesh, got {type(mesh).__name__}: use {make}")
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"mesh must have one dimension, tensor, or two, data and tensor; got {mesh.ndim}: use "
            f"{make}"
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise ValueError(f"the dimensions of a mesh of two need names: use {make}")
    if mesh.size() != dist.get_world_size():
        raise ValueError(
            f"mesh has {mesh.size()} of {dist.get_world_size()} ranks, but tables are spread over "
            f"all of them, and so must the mesh be: use {make}"
        )
    _check_backends(mesh)


def _check_backends(mesh: DeviceMesh) -> None:
    """Raises ValueError for functional collectives of device tensors over gloo, which crash."""
    if mesh.device_type == "cpu":
        return
    for group in mesh.get_all_groups():
        backends = dict(each.split(":") for each in dist.get_backend_config(group).split(","))
        found = backends.get(mesh.device_type)
        if found in (None, "gloo"):
            raise ValueError(
                f"a mesh of device type {mesh.device_type!r} is over a process group of backends "
                f"{backends}, but the functional collectives that cut layers are made of need one "
                f"for {mesh.device_type!r} other than gloo, over which plain torch crashes: use "
                "nccl on cuda, hccl on npu, as init_process_group('cpu:gloo,cuda:nccl')"
            )


@torch.no_grad()
def _start_equal(parameter: DTensor, data_group: dist.ProcessGroup | None) -> None:
    if data_group is not None:
        dist.broadcast(parameter.to_local().detach(), group=data_group, group_src=0)


def _hook_gradient(parameter: DTensor, hook: _Averaging) -> None:
    """Registers a hook, also of a frozen parameter, which may be trained later."""
    is_trained = parameter.requires_grad
    parameter.requires_grad_(True)
    parameter.register_hook(hook)  # type: ignore[no-untyped-call]
    parameter.requires_grad_(is_trained)


class _Averaging:
    """Makes the gradient of a DTensor that of the mean loss of all ranks.

    It is a hook on the gradient before it is accumulated, so that gradients of several backwards
    add up.
    """

    def __init__(
        self, parameter: DTensor, num_ranks: int, data_group: dist.ProcessGroup | None
    ) -> None:
        self._placements = parameter.placements
        self._num_ranks = num_ranks
        self._data_group = data_group

    def __call__(self, grad: DTensor) -> DTensor:
        whole = grad.redistribute(placements=self._placements)
        local = whole.to_local() / self._num_ranks
        if self._data_group is not None:
            dist.all_reduce(local, group=self._data_group)
        return DTensor.from_local(
            local,
            whole.device_mesh,
            self._placements,
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )


def _have_gradient_waited_for(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Waits for the gradient that a cut layer gives to what is before it.

    The gradient of a DTensor may still be on its way, as a tensor that only torch's operators wait
    for; torchrec's collectives and the engine read memory.
    """
    for given in args:
        if isinstance(given, torch.Tensor) and given.requires_grad and not given.is_leaf:
            given.register_hook(_waited_for)  # type: ignore[no-untyped-call]


def _waited_for(grad: torch.Tensor) -> torch.Tensor:
    return grad.wait() if isinstance(grad, AsyncCollectiveTensor) else grad


def _distribute_whole_tensors(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any
) -> None:
    """Cuts whole tensors, as of a model without DTensors, for the DTensors that take them.

    torchrec drops errors of tensors that do not fit, so they are raised here.
    """
    parameters: Mapping[str, Any] = dict(module.named_parameters(recurse=False))
    for name, parameter in parameters.items():
        entry = state_dict.get(prefix + name)
        if entry is None or not isinstance(parameter, DTensor):
            continue
        if entry.shape != parameter.shape:
            raise ValueError(
                f"{prefix}{name} is {tuple(parameter.shape)} over all ranks; the entry of the "
                f"state_dict is {tuple(entry.shape)}"
            )
        if not isinstance(entry, DTensor):
            state_dict[prefix + name] = distribute_tensor(
                entry.to(parameter.device_mesh.device_type),
                parameter.device_mesh,
                parameter.placements,
                src_data_rank=None,
            )
