"""Every collective of "hccl" on device tensors; run on two or more ranks, as by torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

NPU = torch.device("npu")


def filled(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=NPU)


def check(found: torch.Tensor, *expected: float) -> None:
    assert found.device.type == "npu"
    assert found.tolist() == list(expected), (found, expected)


def reductions(rank: int, size: int) -> None:
    ranks = float(sum(range(size)))
    tensor = filled(rank, 1.0)
    dist.all_reduce(tensor)
    check(tensor, ranks, size)
    tensor = filled(rank)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, async_op=True).wait()
    check(tensor, size - 1)
    tensor = filled(rank)
    dist.reduce(tensor, dst=0)
    if rank == 0:
        check(tensor, ranks)
    output = filled(0.0)
    dist.reduce_scatter_single(output, torch.arange(float(size), device=NPU))
    check(output, size * rank)
    parts = [filled(*[1.0] * (index + 1)) for index in range(size)]
    output = torch.empty(rank + 1, device=NPU)
    dist.reduce_scatter(output, parts)
    check(output, *[size] * (rank + 1))


def gathers(rank: int, size: int) -> None:
    tensor = filled(rank)
    dist.broadcast(tensor, src=size - 1)
    check(tensor, size - 1)
    parts = [torch.empty(index + 1, device=NPU) for index in range(size)]
    dist.all_gather(parts, torch.full((rank + 1,), float(rank), device=NPU))
    for index, part in enumerate(parts):
        check(part, *[index] * (index + 1))
    output = torch.empty(size, device=NPU)
    dist.all_gather_single(output, filled(rank))
    check(output, *range(size))
    parts = [torch.empty(1, device=NPU) for _ in range(size)] if rank == 0 else None
    dist.gather(filled(rank), parts, dst=0)
    if parts is not None:
        check(torch.cat(parts), *range(size))
    output = filled(-1.0)
    dist.scatter(output, [filled(index) for index in range(size)] if rank == 0 else None, src=0)
    check(output, rank)


def exchanges(rank: int, size: int) -> None:
    sends = [index + 1 for index in range(size)]
    sent = torch.full((sum(sends), 2), float(rank), device=NPU)
    received = torch.empty(size * (rank + 1), 2, device=NPU)
    work = dist.all_to_all_single(received, sent, [rank + 1] * size, sends, async_op=True)
    work.wait()
    check(received[:, 0].contiguous(), *[index for index in range(size) for _ in range(rank + 1)])
    outputs = [torch.empty(1, device=NPU) for _ in range(size)]
    dist.all_to_all(outputs, [filled(10 * rank + index) for index in range(size)])
    check(torch.cat(outputs), *[10 * index + rank for index in range(size)])
    nothing = torch.empty(0, device=NPU)
    dist.all_to_all_single(nothing, nothing.clone(), [0] * size, [0] * size)
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": index} for index in range(size)]


def functional(rank: int, size: int) -> None:
    """What DTensor is made of."""
    own = torch.arange(2.0, device=NPU).view(1, 2) + rank
    everyones = [value + index for index in range(size) for value in (0.0, 1.0)]
    group = dist.GroupMember.WORLD
    check(funcol.all_gather_single(own, 0, group).flatten(), *everyones)
    check(funcol.all_gather_single(own, 1, group).flatten(), *everyones)
    parts = torch.arange(float(2 * size), device=NPU)
    own_part = slice(2 * rank, 2 * rank + 2)
    summed = (parts * size)[own_part].tolist()
    check(funcol.reduce_scatter_tensor(parts, "sum", 0, group), *summed)
    check(funcol.reduce_scatter_tensor(parts, "avg", 0, group), *parts[own_part].tolist())
    check(funcol.all_reduce(filled(rank), "max", group), size - 1)
    (gathered,) = funcol.all_gather_into_tensor_coalesced([own], group)
    check(gathered.flatten(), *everyones)
    received = funcol.all_to_all_single(filled(*[rank] * size), None, None, group)
    check(received, *range(size))


def meshes(rank: int, size: int) -> None:
    """A layer cut over a mesh learns what it learns uncut."""
    mesh = init_device_mesh("npu", (1, size), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(5)
    inputs = torch.randn(3, 4, device=NPU)
    grads = []
    for is_cut in (False, True):
        torch.manual_seed(6)
        layers = nn.Sequential(nn.Linear(4, 2 * size), nn.Linear(2 * size, 1)).to(NPU)
        if is_cut:
            plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
            parallelize_module(layers, mesh["tensor"], plan)
        layers(inputs).sum().backward()
        found = [parameter.grad for parameter in layers.parameters()]
        grads.append([g.full_tensor() if isinstance(g, DTensor) else g for g in found])
    for expected, found in zip(*grads, strict=True):
        torch.testing.assert_close(found.cpu(), expected.cpu())


def host_tensors_are_refused(rank: int, size: int) -> None:
    with pytest.raises((ValueError, RuntimeError), match="npu"):
        dist.all_reduce(torch.ones(1))


def data_parallel(rank: int, size: int) -> None:
    torch.manual_seed(rank)
    module = DistributedDataParallel(nn.Linear(2, 1, bias=False).to(NPU))
    module(torch.full((1, 2), float(rank), device=NPU)).sum().backward()
    gradient = module.module.weight.grad
    assert gradient is not None
    check(gradient[0], *[sum(range(size)) / size] * 2)
    weights = [torch.empty(1, 2, device=NPU) for _ in range(size)]
    dist.all_gather(weights, module.module.weight.detach())
    assert all(torch.equal(weights[0], each) for each in weights)


def threads_of_gloo() -> list[str]:
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]


def main() -> None:
    dist.init_process_group("hccl")
    assert dist.get_backend() == "hccl"
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.npu.set_device(rank)
    cases = (reductions, gathers, exchanges, functional, meshes, data_parallel)
    for case in (*cases, host_tensors_are_refused):
        case(rank, size)
        dist.barrier()
    assert threads_of_gloo()
    dist.destroy_process_group()
    assert not threads_of_gloo()


if __name__ == "__main__":
    main()
