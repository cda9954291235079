"""The host's process group, over which ids travel."""

from __future__ import annotations

import torch.distributed as dist
from torchrec.distributed.types import ShardingEnv

from recsdk_sharding._batch.context import HostGroup
from recsdk_sharding.exchange import exchange_of_group
from recsdk_sharding.placement.ranks import RankMap, RankRule

__all__ = ["check_env", "check_groups", "make_host_group"]


def make_host_group(host_env: ShardingEnv, rank_rule: RankRule) -> HostGroup:
    """The group of a `host_env`. Raises TypeError or ValueError if it cannot carry ids.

    An exchange of modules before, which failed or is about to, goes on once its jobs have ended:
    whether it still exists, and refuses all that comes, is another matter on each rank.
    """
    group = _check_host_env(host_env)
    exchange = exchange_of_group(group)
    exchange.reopen()
    return HostGroup(exchange, RankMap(host_env.world_size, rank_rule))


def _check_host_env(host_env: ShardingEnv) -> dist.ProcessGroup:
    """The host process group; raises if it cannot carry ids."""
    make = 'dist.new_group(backend="gloo")'
    if not isinstance(host_env, ShardingEnv):
        raise TypeError(
            f"host_env must be a torchrec ShardingEnv, got {type(host_env).__name__}; pass "
            f"ShardingEnv(world_size=..., rank=..., pg={make})"
        )
    group: dist.ProcessGroup | None = host_env.process_group
    if group is None:
        raise ValueError(
            f"host_env has no process group; pass ShardingEnv(world_size=..., rank=..., pg={make})"
        )
    backend = dist.get_backend(group)
    if backend != "gloo":
        raise ValueError(
            f"host_env must be on a gloo group, since ids are exchanged on the host; got a "
            f"{backend} group; make one with {make}"
        )
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if (host_env.world_size, host_env.rank) != (size, rank):
        raise ValueError(
            f"host_env must have the rank and size of its group, {rank} of {size}, got "
            f"{host_env.rank} of {host_env.world_size}; give it those"
        )
    if group is dist.GroupMember.WORLD:
        raise ValueError(
            "host_env must be on a group of its own, since its collectives run in the background; "
            f"got the default group; make one with {make}"
        )
    return group


def check_env(env: ShardingEnv) -> None:
    """Raises TypeError unless it says which ranks a module is sharded over."""
    if not isinstance(env, ShardingEnv):
        raise TypeError(f"env must be a torchrec ShardingEnv, got {type(env).__name__}")


def check_groups(host: HostGroup, env: ShardingEnv) -> None:
    """Raises if the module's ranks are not the host group's."""
    exchange = host.exchange
    if (env.world_size, env.rank) != (exchange.world_size, exchange.rank):
        raise ValueError(
            f"the module is sharded as rank {env.rank} of {env.world_size}, but host_env is rank "
            f"{exchange.rank} of {exchange.world_size}; both must be the same ranks"
        )
    if env.process_group is exchange.group:
        raise ValueError(
            "host_env and the sharded module use the same process group; give host_env its own: "
            'dist.new_group(backend="gloo")'
        )
