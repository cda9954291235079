"""Returns vectors to the ranks whose samples they are of, and takes their gradients back.

What travels is the vectors of bags that have keys on the sending rank, which both sides know from
the keys; so a rank never sends more than in torchrec's dense exchanges, and with one key a bag it
sends W times less than a reduce-scatter. Both directions are one all-to-all, which takes any sizes,
also 0. torchrec's codecs make the numbers smaller. Ranks of one host send nothing on the cpu: each
reads the vectors where the others have pooled them, and writes their gradients there.

Shape letters: W ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.embedding_sharding import BaseEmbeddingDist
from torchrec.distributed.types import Awaitable, NoWait, QuantizedCommCodecs

from recsdk_core import in_huge_pages
from recsdk_sharding._batch.assembly import Assembly, HostAssembly, ResultRoom, Results
from recsdk_sharding._batch.context import HashShardingContext
from recsdk_sharding._batch.uncompiled import uncompiled
from recsdk_sharding.exchange.failures import failing_together
from recsdk_sharding.exchange.shared_memory import Claim, SharedMemory

__all__ = [
    "ExchangeStats",
    "HashOutputDist",
    "Transfer",
    "check_codecs",
    "multiple_of",
    "return_results",
]


@dataclass(frozen=True)
class ExchangeStats:
    """What one rank has sent to other ranks so far, in bytes."""

    id_bytes: int = 0
    """Ids, lengths of bags and weights, between hosts."""
    forward_bytes: int = 0
    """Vectors."""
    backward_bytes: int = 0
    """Gradients."""


def multiple_of(codecs: QuantizedCommCodecs | None) -> int:
    """What the numbers for each rank have to be a multiple of, for the codecs to take them."""
    if codecs is None:
        return 1
    contexts = [codecs.forward.create_context(), codecs.backward.create_context()]
    multiples = [context.row_dim for context in contexts if context is not None]
    return math.lcm(*(multiple for multiple in multiples if multiple > 0))


def check_codecs(codecs: QuantizedCommCodecs, operation: str, device: torch.device) -> None:
    """Raises ValueError for codecs that cannot encode on a device, as FP8 cannot on a cpu."""
    zeros = torch.zeros(multiple_of(codecs), dtype=torch.float32, device=device)
    for direction in ("forward", "backward"):
        codec = getattr(codecs, direction)
        context = codec.create_context()
        try:
            codec.decode(codec.encode(zeros, context), context)
        except (RuntimeError, ValueError, AssertionError) as error:
            reason, *_ = str(error).splitlines() or [type(error).__name__]
            raise ValueError(
                f"qcomm_codecs_registry: the {direction} codec of {operation} fails on "
                f"{device.type}: {reason}; take FP16, BF16, INT8 or MX4"
            ) from error


class HashOutputDist(BaseEmbeddingDist[Any, Any, Any]):  # type: ignore[misc]
    """Starts the return of one group's vectors; the awaitable gives a `Transfer`."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        codecs: QuantizedCommCodecs | None,
        memory: SharedMemory | None,
        *,
        is_replicated: bool,
        may_combine: bool,
    ) -> None:
        """`memory`: that the ranks share, through which vectors and gradients then go.

        `may_combine`: whether other ranks may send gradients of combined keys.
        """
        super().__init__()
        self._make: Callable[..., Transfer] = _Replication if is_replicated else _AllToAll
        if memory is not None and not is_replicated:
            self._make = partial(_InPlace, memory)
        own = None if is_replicated else codecs
        self._wire = _Wire(group, dist.get_rank(group), own, memory, may_combine)
        self._exact_wire = replace(self._wire, codecs=None)

    def stats_with(self, id_bytes: int) -> ExchangeStats:
        """What this rank has sent so far."""
        sent = self._wire.bytes_sent
        return ExchangeStats(id_bytes, sent["forward"], sent["backward"])

    def send_weights(
        self,
        numbers: torch.Tensor,
        sends: list[int],
        receives: list[int],
        direction: Literal["forward", "backward"],
    ) -> Callable[[], torch.Tensor]:
        """Sends weights of ids, or their gradients; the function waits for what the ranks sent."""
        return self._exact_wire.start(numbers, sends, receives, direction)

    def share(self, gradient: torch.Tensor, num_values: Sequence[int]) -> list[torch.Tensor]:
        """The gradients of all ranks, of one dimension, divided like those that are sent back.

        `num_values`: numbers in each. All ranks must call it in the same order.
        """
        if get_gradient_division():
            gradient /= len(num_values)
        return list(self._wire.swap(gradient, num_values).split_with_sizes(list(num_values)))

    def forward(
        self, local_embs: torch.Tensor, sharding_ctx: HashShardingContext | None = None
    ) -> Awaitable[Transfer]:
        """Starts sending; all ranks must call it in the same order."""
        assert sharding_ctx is not None
        return NoWait(self._make(self._wire, local_embs, sharding_ctx))


@dataclass(frozen=True)
class _Wire:
    """How numbers travel."""

    group: dist.ProcessGroup
    rank: int
    codecs: QuantizedCommCodecs | None
    memory: SharedMemory | None
    """That the ranks share."""
    may_combine: bool
    """Whether other ranks may send gradients of combined keys."""
    bytes_sent: dict[str, int] = field(default_factory=lambda: {"forward": 0, "backward": 0})
    """To other ranks."""

    def start(
        self,
        numbers: torch.Tensor,
        sends: list[int],
        receives: list[int],
        direction: Literal["forward", "backward"],
    ) -> Callable[[], torch.Tensor]:
        """Sends numbers to each rank; the function waits for what the ranks sent, float32."""
        codec = None if self.codecs is None else getattr(self.codecs, direction)
        context = None if codec is None else codec.create_context()
        sent = numbers
        if codec is not None:
            sent = codec.encode(numbers, context)
            sends = [codec.calc_quantized_size(count, context) for count in sends]
            receives = [codec.calc_quantized_size(count, context) for count in receives]
        if codec is None and len(sends) == 1:
            return lambda: numbers
        self.count(direction, sends, sent.element_size())
        received = in_huge_pages(sent.new_empty(sum(receives)))
        work = dist.all_to_all_single(
            received, sent, receives, sends, group=self.group, async_op=True
        )

        def finish() -> torch.Tensor:
            work.wait()
            if codec is None:
                return received
            decoded: torch.Tensor = codec.decode(received, context)
            return decoded.to(torch.float32)

        return finish

    def count(
        self, direction: Literal["forward", "backward"], sends: Sequence[int], size: int = 4
    ) -> None:
        """Counts numbers of so many bytes for each rank."""
        self.bytes_sent[direction] += size * (sum(sends) - sends[self.rank])

    def swap(self, own: torch.Tensor, num_values: Sequence[int]) -> torch.Tensor:
        """What all ranks have to say, rank by rank; each says the same to every rank."""
        if self.memory is not None:
            self.bytes_sent["backward"] += 4 * len(own) * (len(num_values) - 1)
            return self.memory.swap(own, num_values)
        swapped = in_huge_pages(own.new_empty(sum(num_values)))
        works: list[Any] = []
        for rank, part in enumerate(swapped.split_with_sizes(list(num_values))):
            if rank == self.rank:
                part.copy_(own)
                continue
            if len(own):
                works.append(dist.isend(own, group=self.group, group_dst=rank))
                self.bytes_sent["backward"] += own.element_size() * len(own)
            if len(part):
                works.append(dist.irecv(part, group=self.group, group_src=rank))
        for work in works:
            work.wait()
        return swapped


class Transfer:
    """The vectors of one batch and group on their way."""

    def __init__(self, wire: _Wire, numbers: torch.Tensor, context: HashShardingContext) -> None:
        assembly = context.done.assembly
        assert assembly is not None
        self.numbers = numbers
        """What this rank pooled, with its autograd graph."""
        self.assembly: Assembly = assembly
        """What is to be made of what comes."""
        self.is_exact = wire.codecs is None
        """Whether numbers travel as they are."""
        self.divisor = len(self.assembly.num_values) if get_gradient_division() else 1
        """What gradients are divided by."""
        self.group = wire.group
        """The ranks between which they travel."""
        self._wire = wire
        self._sends = context.done.num_values_sent

    def put(self, room: ResultRoom, group: int) -> Sequence[torch.Tensor]:
        """The results of a group's features, made of what the ranks have sent."""
        return self.assembly.put(self._receive(), room, group)

    def start_back(self, grads: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Sends the gradients of the features' results; the function waits for `numbers`'."""
        taken = self.assembly.take(grads, self.divisor if self.is_exact else 1)
        return self._send_back(taken)

    def _receive(self) -> torch.Tensor:
        """What the ranks have sent."""
        raise NotImplementedError

    def _send_back(self, grads: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Sends the gradients of what was received; the function waits for those of `numbers`."""
        raise NotImplementedError


class _InPlace(Transfer):
    """Every rank reads the vectors where they were pooled, and writes their gradients there.

    Nobody else reads or writes what is for one rank, so neither waits for the other's reading.
    """

    def __init__(
        self,
        memory: SharedMemory,
        wire: _Wire,
        numbers: torch.Tensor,
        context: HashShardingContext,
    ) -> None:
        super().__init__(wire, numbers, context)
        self._memory = memory
        self._block = memory.block_of(numbers.detach())
        self._finish = memory.send(self._block, self._sends)
        self._claim: Claim | None = None

    def put(self, room: ResultRoom, group: int) -> Sequence[torch.Tensor]:
        assert isinstance(self.assembly, HostAssembly)
        places = self._finish()
        self._claim = self._memory.claim(places)
        self._number = places[0].number
        self._begins_W = np.array([place.begins[self._wire.rank] for place in places], np.int64)
        del self._finish, self.numbers
        self._wire.count("forward", self._sends)
        return self.assembly.put(self._memory.numbers, room, group, self._begins_W)

    def start_back(self, grads: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
        assert isinstance(self.assembly, HostAssembly)
        memory, block = self._memory, self._block
        self.assembly.take_into(memory.numbers, grads, self.divisor, self._begins_W)
        self._wire.count("backward", self.assembly.num_values)
        answered = memory.answer(self._number)

        def finish() -> torch.Tensor:
            answered()
            return memory.tensor_of(block)

        return finish


class _AllToAll(Transfer):
    """Every rank sends what each rank asked for."""

    def __init__(self, wire: _Wire, numbers: torch.Tensor, context: HashShardingContext) -> None:
        super().__init__(wire, numbers, context)
        receives = self.assembly.num_values
        self._finish = wire.start(numbers.detach(), self._sends, receives, "forward")

    def _receive(self) -> torch.Tensor:
        received = self._finish()
        del self._finish, self.numbers  # their memory is not needed in backward
        return received

    def _send_back(self, grads: torch.Tensor) -> Callable[[], torch.Tensor]:
        return self._wire.start(grads, self.assembly.num_values, self._sends, "backward")


class _Replication(Transfer):
    """Every rank has its own vectors already; every rank needs all gradients."""

    def _receive(self) -> torch.Tensor:
        rank = self._wire.rank
        own = self.numbers.detach().narrow(0, sum(self._sends[:rank]), self._sends[rank])
        del self.numbers
        return own

    def _send_back(self, grads: torch.Tensor) -> Callable[[], torch.Tensor]:
        if self._wire.may_combine:
            return partial(self._wire.swap, grads, self._sends)
        world_size = len(self._sends)
        sends = [len(grads)] * world_size
        return self._wire.start(grads.repeat(world_size), sends, self._sends, "backward")


def return_results(transfers: Sequence[Transfer], results: Results) -> list[torch.Tensor]:
    """The results of all groups, as one autograd node.

    In backward every rank gets the gradients of what it sent, divided by W as in torchrec (unless
    its gradient division is off), so that the loss is the mean over the ranks.
    """
    apply: Callable[..., tuple[torch.Tensor, ...]] = _Return.apply
    return list(apply(transfers, results, *(transfer.numbers for transfer in transfers)))


class _Return(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, transfers: Sequence[Transfer], results: Results, *numbers: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.transfers, ctx.results = transfers, results
        room = ResultRoom(results)
        parts = [transfer.put(room, group) for group, transfer in enumerate(transfers)]
        return tuple(room.taken(parts))

    @staticmethod
    @uncompiled
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        if ctx.transfers is None:
            raise RuntimeError(
                "this forward's backward has run already, whether it ended or raised: each forward "
                "takes one backward; run forward again"
            )
        transfers, parts_of = ctx.transfers, ctx.results.parts_of
        ctx.transfers = ctx.results = None  # the graph may live on: a loss that is kept, say
        started = []
        with failing_together(transfers[0].group):
            dense = [grad.contiguous() for grad in grads]
            for transfer, parts in zip(transfers, parts_of(dense), strict=True):
                started.append(transfer.start_back(parts))
            back = [finish() for finish in started]
        for transfer, grad in zip(transfers, back, strict=True):
            if not transfer.is_exact:  # codecs see gradients at their full size, as torchrec's do
                grad /= transfer.divisor
        return None, None, *back
