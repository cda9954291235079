"""Process group backend "hccl": gloo, run on the bytes of device tensors."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from recsdk_npusim.library import operators

__all__ = ["register"]

_NAME = "hccl"
_UNUSED_TAG = 2**30
_ProcessGroup: Any = dist.ProcessGroup  # its types leave out much of what torch calls
_create_work_from_future: Any = vars(c10d)["_create_work_from_future"]


def register() -> None:
    """Makes `init_process_group("hccl")` work."""
    if dist.is_available():
        dist.Backend.register_backend(_NAME, SimulatedHccl, devices=["npu"])
        _register_functional()


def _on_cpu(value: Any) -> Any:
    """The same bytes as cpu tensors, through lists."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "npu":
            raise ValueError(f"hccl takes tensors on npu, got one on {value.device}")
        alias: torch.Tensor = operators.alias_on_cpu(value.detach())
        return alias
    return [_on_cpu(each) for each in value]


def _flat(value: Any) -> list[torch.Tensor]:
    """The tensors in nested lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for each in value for tensor in _flat(each)]


def _done(result: Any) -> Any:
    """A work that has ended."""
    future: Any = torch.futures.Future()
    future.set_result(_flat(result))
    return _create_work_from_future(future)


class SimulatedHccl(_ProcessGroup):  # type: ignore[misc]
    """Runs each collective on gloo, over the bytes of its arguments.

    A collective drains the current stream and then runs at once, on the caller's thread; its work
    has ended when it is returned. There is no send and recv.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._rank = rank
        self._size = size
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._group_name = ""

    # ---- what torch asks of a group ------------------------------------------------------------

    def name(self) -> str:
        return _NAME

    getBackendName = name

    @property
    def pg_name(self) -> str:
        return self._group_name

    @property
    def group_name(self) -> Any:
        return self._group_name

    def _set_group_name(self, name: Any) -> None:
        self._group_name = name

    def _set_group_desc(self, desc: str) -> None:
        pass

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("npu")]

    def shutdown(self) -> None:
        """Ends gloo's threads, which else outlive the group.

        One of them that lets go of a tensor while Python ends would end the process by SIGABRT.
        """
        self._gloo = None

    def abort(self) -> None:
        """Ends the collectives of this rank, now and later, and by that those of the others."""
        peer = (self._rank + 1) % self._size
        with suppress(RuntimeError):  # gloo closes all connections when a wait runs out
            self._gloo.recv([torch.zeros(1)], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))

    # ---- collectives ---------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        options = dist.AllreduceOptions() if opts is None else opts
        self._gloo.allreduce(_on_cpu(tensors), options).wait()
        return _done(tensors)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        self._gloo.allreduce_coalesced(_on_cpu(tensors), opts).wait()
        return _done(tensors)

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        self._gloo.broadcast(_on_cpu(tensors), opts).wait()
        return _done(tensors)

    def reduce(self, tensors: Any, opts: Any) -> Any:
        self._gloo.reduce(_on_cpu(tensors), opts).wait()
        return _done(tensors)

    def allgather(self, output: Any, inputs: Any, opts: Any = None) -> Any:
        """One broadcast per rank, since gloo's all-gather needs equal sizes."""
        (outputs,), (own,) = output, inputs
        outputs[self._rank].copy_(own)
        options = dist.BroadcastOptions()
        for rank, tensor in enumerate(outputs):
            options.rootRank = rank
            self._gloo.broadcast([_on_cpu(tensor)], options).wait()
        return _done(output)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        if output.numel():
            self.allgather([list(output.view(-1).chunk(self._size))], [input.reshape(-1)])
        return _done(output)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for pair in zip(outputs, inputs, strict=True):
            self.all_gather_single(*pair)
        return _done(outputs)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """A sum of everything, of which each rank takes its part."""
        (output,), (parts,) = outputs, inputs
        total = torch.cat([part.detach().reshape(-1) for part in parts])
        options = dist.AllreduceOptions()
        if opts is not None:
            options.reduceOp = opts.reduceOp
        self.allreduce([total], options)
        first = sum(part.numel() for part in parts[: self._rank])
        output.copy_(total[first : first + output.numel()].view_as(output))
        return _done(output)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> Any:
        if output.numel():
            self.reduce_scatter([output], [input.reshape(-1).chunk(self._size)], opts)
        return _done(output)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for pair in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(*pair, opts)
        return _done(outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> Any:
        sizes = [list(output_split_sizes), list(input_split_sizes)]
        self._gloo.alltoall_base(_on_cpu(output), _on_cpu(input), *sizes).wait()
        return _done(output)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        sent = torch.cat([each.detach().reshape(-1) for each in inputs])
        sizes = [[each.numel() for each in tensors] for tensors in (outputs, inputs)]
        received = sent.new_empty(sum(sizes[0]))
        self.all_to_all_single(received, sent, *sizes)
        for each, part in zip(outputs, received.split_with_sizes(sizes[0]), strict=True):
            each.copy_(part.view_as(each))
        return _done(outputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        self._gloo.gather(_on_cpu(outputs), _on_cpu(inputs), opts).wait()
        return _done([outputs, inputs])

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        self._gloo.scatter(_on_cpu(outputs), _on_cpu(inputs), opts).wait()
        return _done(outputs)

    def barrier(self, opts: Any = None) -> Any:
        torch.npu.synchronize()  # type: ignore[attr-defined]
        self._gloo.barrier().wait()
        return _done([torch.zeros(1, device="npu")])


# ---- functional collectives, which tensors cut over a mesh are made of -------------------------

_functional: Any = None  # kept: with the library its kernels would go


def _register_functional() -> None:
    """Gives torch's functional collectives what a group written in Python cannot override."""
    global _functional
    make: Any = torch.library.Library
    _functional = make("_c10d_functional", "IMPL")
    _functional.impl("all_gather_into_tensor", _all_gather, "PrivateUse1")
    _functional.impl("reduce_scatter_tensor", _reduce_scatter, "PrivateUse1")


def _group_of(name: Any) -> Any:
    return c10d._resolve_process_group(name)


def _all_gather(input: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    output = input.new_empty(input.shape[0] * group_size, *input.shape[1:])
    _group_of(group_name).all_gather_single(output, input.contiguous())
    return output


def _reduce_scatter(
    input: torch.Tensor, reduce_op: str, group_size: int, group_name: str
) -> torch.Tensor:
    output = input.new_empty(input.shape[0] // group_size, *input.shape[1:])
    options = dist.ReduceScatterOptions()
    averages = reduce_op == "avg"
    options.reduceOp = getattr(dist.ReduceOp, "SUM" if averages else reduce_op.upper())
    _group_of(group_name).reduce_scatter_single(output, input.contiguous(), options)
    return output.div_(group_size) if averages else output
