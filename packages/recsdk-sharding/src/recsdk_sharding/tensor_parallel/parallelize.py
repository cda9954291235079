"""One call that cuts dense layers and tables over ranks, and refuses what would go wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ModuleSharder, ShardedModule, ShardingPlan

from recsdk_sharding._modules.making_models import made_together, shown_alike
from recsdk_sharding._modules.sharded_tables import ShardedTables
from recsdk_sharding.tensor_parallel.layers import Layer, LayoutCheck, check_batch_sizes
from recsdk_sharding.tensor_parallel.wrapper import TensorParallelWrapper, check_mesh

__all__ = ["parallelize"]


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    dense_plan: Mapping[str, ParallelStyle],
    sharders: Sequence[ModuleSharder[nn.Module]],
    sparse_plan: ShardingPlan,
) -> DistributedModelParallel:
    """Cuts dense layers over the ranks of a mesh, and tables over all ranks.

    `mesh`, over all ranks, has one dimension (tensor) or two (data, tensor), in this order.
    `dense_plan` has torch's styles by name of module, as `parallelize_module` takes them (`*` and
    `?` match within a name). `sharders` and `sparse_plan` are those of `DistributedModelParallel`.
    Layers in neither plan are data-parallel.

    Each rank has a batch of its own, as with torchrec, and all ranks of a row of the mesh must
    have batches of equal size. The loss is the mean over all ranks. The result is a model as
    `DistributedModelParallel` makes it: pipelines, optimizers, `state_dict` and
    `torch.distributed.checkpoint` take it as such. Make optimizers after this call.

    Raises TypeError or ValueError, before anything changes, for a model that is parallelized
    already, a mesh or plan that does not fit, and cut layers on the meta device. The first forward
    raises ValueError on all ranks if layers do not cut the batch (`Shard(0)`) where they must.
    Batches of unequal size raise `RecsdkError` on all ranks in their step (ValueError if the model
    has no hash tables).
    """
    layers: list[Layer] = []

    def check() -> dict[str, Any]:
        check_mesh(mesh)
        _check_kinds(model, sharders)
        _check_order(model)
        if not isinstance(sparse_plan, ShardingPlan):
            raise TypeError(
                f"sparse_plan must be a torchrec ShardingPlan, got {type(sparse_plan).__name__}; "
                "make one with planner.collective_plan(model, sharders, dist.GroupMember.WORLD)"
            )
        layers.extend(_layers_of(model, dense_plan))
        for layer in layers:
            _check_layer(layer, sparse_plan)
        return {
            "dense_plan": {name: shown_alike(style) for name, style in dense_plan.items()},
            "the shape of mesh": list(mesh.shape),
        }

    arguments = {"module": model, "sharders": sharders, "plan": sparse_plan}
    with made_together("parallelize", arguments, check):
        return _parallelized(model, mesh, dense_plan, sharders, sparse_plan, layers)


def _parallelized(
    model: nn.Module,
    mesh: DeviceMesh,
    dense_plan: Mapping[str, ParallelStyle],
    sharders: Sequence[ModuleSharder[nn.Module]],
    sparse_plan: ShardingPlan,
    layers: Sequence[Layer],
) -> DistributedModelParallel:
    tensor_mesh = mesh if mesh.ndim == 1 else mesh[_names(mesh)[-1]]
    parallelize_module(model, tensor_mesh, dict(dense_plan))
    parallel = DistributedModelParallel(
        model,
        device=torch.device(mesh.device_type),
        plan=sparse_plan,
        sharders=list(sharders),
        data_parallel_wrapper=TensorParallelWrapper(mesh),
    )
    _watch(parallel, layers, mesh, tensor_mesh)
    return parallel


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    assert mesh.mesh_dim_names is not None
    return mesh.mesh_dim_names


def _check_kinds(model: Any, sharders: Any) -> None:
    """Raises TypeError for what is no model, and for what are no sharders."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    each_is_one = isinstance(sharders, (list, tuple)) and all(
        isinstance(each, ModuleSharder) for each in sharders
    )
    if not each_is_one:
        raise TypeError(
            "sharders must be a list of sharders, as of get_default_hybrid_sharders, got "
            f"{sharders!r:.100}"
        )


def _check_order(model: nn.Module) -> None:
    """Raises if any part of the model is parallelized already."""
    wrappers = (DistributedModelParallel, DistributedDataParallel, FullyShardedDataParallel)
    if isinstance(model, wrappers):
        raise ValueError(
            f"model is a {type(model).__name__} already: dense layers have to be cut before; pass "
            "the model as it was built, parallelize wraps it"
        )
    for path, module in model.named_modules():
        if isinstance(module, ShardedModule):
            raise ValueError(
                f"{path!r} is sharded already: dense layers have to be cut before tables; pass the "
                "model as it was built, parallelize does both"
            )
    cut = [name for name, p in model.named_parameters() if isinstance(p, DTensor)]
    if cut:
        raise ValueError(
            f"parameters {cut} are DTensors already: pass the model as it was built, parallelize "
            "calls parallelize_module"
        )


def _layers_of(model: nn.Module, dense_plan: Mapping[str, ParallelStyle]) -> list[Layer]:
    """The modules that a plan names. Raises for names that no module has."""
    if not isinstance(dense_plan, Mapping) or not dense_plan:
        raise TypeError(
            "dense_plan must be a dict of styles by name of module, not empty, got "
            f"{dense_plan!r}; without layers to cut use DistributedModelParallel"
        )
    layers: list[Layer] = []
    for pattern, style in dense_plan.items():
        if not isinstance(style, ParallelStyle):
            raise TypeError(
                f"dense_plan[{pattern!r}] must be a style of torch.distributed.tensor.parallel, "
                f"got {style!r}"
            )
        found = [(p, m) for p, m in model.named_modules() if _matches(p, pattern)]
        if not found:
            names = [path for path, _ in model.named_modules() if path]
            raise ValueError(f"dense_plan: the model has no module {pattern!r}; it has {names}")
        layers.extend(Layer(path, module, style) for path, module in found)
    return layers


def _matches(path: str, pattern: str) -> bool:
    names, wanted = path.split("."), pattern.split(".")
    return len(names) == len(wanted) and all(map(fnmatch, names, wanted))


def _check_layer(layer: Layer, sparse_plan: ShardingPlan) -> None:
    for path in sparse_plan.plan:
        if layer.path == path or layer.path.startswith(f"{path}."):
            raise ValueError(
                f"dense_plan names {layer.path!r}, which sparse_plan shards as tables: leave it to "
                "sparse_plan"
            )
    on_meta = [n for n, p in layer.module.named_parameters() if p.device.type == "meta"]
    if on_meta:
        raise ValueError(
            f"parameters {on_meta} of {layer.path!r} are on the meta device, where a cut layer "
            "cannot be initialized: build the dense part on a real device, and only the tables "
            "with device=torch.device('meta')"
        )


def _watch(
    parallel: DistributedModelParallel,
    layers: Sequence[Layer],
    mesh: DeviceMesh,
    tensor_mesh: DeviceMesh,
) -> None:
    """Makes forward check layouts and batch sizes."""
    group = tensor_mesh.get_group()
    rows: Any = mesh.mesh.reshape(-1, tensor_mesh.size()).tolist()
    tables = [m for m in parallel.module.modules() if isinstance(m, ShardedTables)]
    for module in tables:
        module.require_equal_batches([tuple(row) for row in rows])
    if not tables:
        check_batch_sizes(layers, group)
    LayoutCheck(parallel, layers, group)
