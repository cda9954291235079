"""Process groups of this package's own."""

from __future__ import annotations

import torch.distributed as dist

from recsdk_sharding._torchrec_compat import timeout_of

__all__ = ["group_beside"]


def group_beside(host: dist.ProcessGroup) -> dist.ProcessGroup:
    """A gloo group of the same ranks, for calls at a time when the host group is busy.

    It has the host group's timeout; torch would give it 30 minutes. All ranks must make it.
    """
    group: dist.ProcessGroup = dist.new_group(
        dist.get_process_group_ranks(host),
        timeout=timeout_of(host),
        backend="gloo",
        use_local_synchronization=True,
    )
    return group
