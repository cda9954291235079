"""Batches on their way from a DataLoader's worker: copied once, into memory that is lent again."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, TypeAlias

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsdk_pipeline._internal.lending import Lender, Loan, borrow
from recsdk_pipeline._internal.lengths import lengths_of_one

_MOST_LENT = 256 << 20
"""Bytes that may be under way from a worker; what is more goes torch's way."""
_ALIGNED = 64

_Place: TypeAlias = "tuple[int, torch.dtype, tuple[int, ...]] | None"
"""(First byte, dtype, shape); None: there is no such tensor."""


class Sent(NamedTuple):
    """A batch, as it is pickled."""

    loan: Loan
    features: list[str]
    places: list[_Place]
    """Of the ids, the lengths (None: each is one), the weights and what is beside."""


def sent(sparse: KeyedJaggedTensor, beside: Sequence[torch.Tensor | None]) -> Sent | None:
    """A copy of a batch of tensors on the CPU, for `received`; None: it has to go torch's way."""
    lender = _LENDER.here()
    if lender is None or not _is_plain_batch(sparse):
        return None
    tensors = [sparse.values(), _lengths(sparse), sparse.weights_or_none(), *beside]
    if not all(each is None or _is_plain(each) for each in tensors):
        return None
    places, size = _places(tensors)
    lent = lender.lend(size)
    if lent is None:
        return None
    loan, memory = lent
    for place, tensor in zip(places, tensors, strict=True):
        if place is not None and tensor is not None:
            # Not by torch, whose threads would spin.
            bytes_ = tensor.view(-1).view(torch.uint8).numpy()
            memory[place[0] : place[0] + len(bytes_)] = bytes_
    return Sent(loan, sparse.keys(), places)


def received(batch: Sent) -> tuple[KeyedJaggedTensor, list[torch.Tensor | None]]:
    """What was sent, where it was written. Once a batch."""
    memory = torch.from_numpy(borrow(batch.loan))
    values, lengths, weights, *beside = [_tensor(memory, place) for place in batch.places]
    assert values is not None
    if lengths is None:
        lengths = lengths_of_one(len(values))
    return KeyedJaggedTensor(batch.features, values, weights, lengths), beside


def _is_plain_batch(sparse: KeyedJaggedTensor) -> bool:
    """Whether it is its features, ids, lengths and weights, and no more."""
    return (
        type(sparse) is KeyedJaggedTensor
        and bool(sparse.keys())
        and not sparse.variable_stride_per_key()
        and sparse.inverse_indices_or_none() is None
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.requires_grad
    )


def _lengths(sparse: KeyedJaggedTensor) -> torch.Tensor | None:
    """None: it is the tensor of ones that batches share."""
    lengths = sparse.lengths()
    size = len(sparse.values())
    return None if len(lengths) == size and lengths is lengths_of_one(size) else lengths


def _places(tensors: Sequence[torch.Tensor | None]) -> tuple[list[_Place], int]:
    """Where each is to lie, one after the other, and the size of all."""
    places: list[_Place] = []
    end = 0
    for each in tensors:
        if each is None:
            places.append(None)
            continue
        places.append((end, each.dtype, tuple(each.shape)))
        end += -(-each.nbytes // _ALIGNED) * _ALIGNED
    return places, end


def _tensor(memory: torch.Tensor, place: _Place) -> torch.Tensor | None:
    if place is None:
        return None
    start, dtype, shape = place
    size = math.prod(shape) * dtype.itemsize
    return memory[start : start + size].view(dtype).view(shape)


class _Here:
    """The lender of this process."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew, as in a forked process, which must not lend the memory of another."""
        self._lock = threading.Lock()
        self._lender: Lender | None = None
        self._is_made = False

    def here(self) -> Lender | None:
        """None: the system has no such memory, or does not let a process open another's."""
        with self._lock:
            if not self._is_made:
                self._is_made = True
                with suppress(OSError):
                    os.readlink(f"/proc/{os.getppid()}/exe")  # reading it takes the same right
                    self._lender = Lender(_MOST_LENT)
            return self._lender


_LENDER = _Here()
os.register_at_fork(after_in_child=_LENDER.forget)
