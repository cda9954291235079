"""All-gathers of DTensors on the cpu, under a name that gloo can write without harm.

The two threads of a gloo group write the name of the last collective into one `std::string`,
without a lock. That does no harm while names fit into the string itself, 15 letters, as nearly all
do. torch's functional all-gather, which DTensors use, is an ALLGATHER_COALESCED: if one of the
threads is late, each may free the memory that the other writes to, and the process crashes in
malloc. Source: torch 2.13, `ProcessGroupGloo::runLoop` and `opTypeToString`.

The fault is torch's: plain torch without recsdk crashed in one of five worlds. This program makes
the same calls, under torchrun with two or more ranks. It is a race, so a run that ends well shows
nothing:

    from torch.distributed import _functional_collectives as functional
    dist.init_process_group("gloo")
    own = torch.ones(8)
    for _ in range(100_000):
        functional.wait_tensor(functional.all_gather_tensor(own, 0, dist.group.WORLD))
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_work, _resolve_process_group
from torch.library import Library

__all__ = ["gather_under_a_short_name"]

# torch 2.11 and 2.12 have it under the older name only, 2.13 warns of that one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@cache
def gather_under_a_short_name() -> Library:
    """Replaces functional all-gathers of cpu tensors by those of `dist`, an ALLGATHER to gloo.

    For the rest of the process's life. Results and the order of collectives are the same.
    """
    library = Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call]
    library.impl(  # type: ignore[no-untyped-call]
        "all_gather_into_tensor", _all_gather_into_tensor, "CPU"
    )
    return library


def _all_gather_into_tensor(own: torch.Tensor, group_size: int, group_name: Any) -> torch.Tensor:
    gathered = own.new_empty((group_size * own.shape[0], *own.shape[1:]))
    group = _resolve_process_group(group_name)
    work = _all_gather(gathered, own, group=group, async_op=True)
    _register_work(gathered, work)
    return gathered
