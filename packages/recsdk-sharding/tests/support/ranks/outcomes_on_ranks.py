"""What the tests of outcomes run on every rank; each function returns plain values."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from loops import LOOPS
from on_ranks import own_batches
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan
from worlds import (
    Setup,
    collection_of,
    configs_of,
    host_env,
    module_plan,
    new_model,
    optimizer_of,
    shard,
    unwrapped,
    use_nodes_of,
)

from recsdk_sharding import get_default_hybrid_sharders

Outcomes = dict[str, np.ndarray]


def as_arrays(outcomes: dict[str, torch.Tensor]) -> Outcomes:
    """Copies, by name of the embedding."""
    return {name: each.numpy().copy() for name, each in outcomes.items()}


def watch(
    setup: Setup, sizes: list[list[int]], how: str = "plain", drops_duplicates: bool = False
) -> dict[str, Any]:
    """Outcomes of each batch as the model's forward sees them, in training and evaluation."""
    model = _deduplicated(setup) if drops_duplicates else shard(new_model(setup, "meta"), setup)
    ebc = collection_of(unwrapped(model))
    ebc.keep_outcomes()
    seen: list[Outcomes] = []
    unwrapped(model).register_forward_hook(lambda *_: seen.append(as_arrays(ebc.outcomes())))
    batches = own_batches(sizes, setup.weighted)
    list(LOOPS[how](model, optimizer_of(model, setup.dense_lr), batches))
    counts = _counts(ebc)
    if how == "plain":
        model.eval()
        for batch in own_batches(sizes[:1], setup.weighted, seed=9):
            model(batch.to(model.device))
    return {"seen": seen, "counts": counts, "bytes": _bytes_sent(ebc)}


def _deduplicated(setup: Setup) -> DistributedModelParallel:
    """A sharded model whose sequences send an id once."""
    model = new_model(setup, "meta")
    world_size = dist.get_world_size()
    use_nodes_of(world_size)
    sharders = get_default_hybrid_sharders(host_env=host_env(), use_index_dedup=True)
    assert setup.plan is not None
    plan = module_plan(configs_of(model), setup.plan, world_size, world_size, setup.device)
    return DistributedModelParallel(
        model,
        device=torch.device(setup.device),
        plan=ShardingPlan({"ebc": plan}),
        sharders=sharders,
    )


def _counts(ebc: Any) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for table in ebc.tables().values():
        counts.update({kind.name: n for kind, n in table.stats().outcomes.items()})
    return dict(counts)


def _bytes_sent(ebc: Any) -> int:
    return sum(each.bytes_sent for each in ebc._input_dists)


def watch_on_one_rank_only(setup: Setup, sizes: list[list[int]]) -> dict[str, Any]:
    """As `watch`, of rank 0, which turns it on before its second batch; what the others say."""
    model = shard(new_model(setup, "meta"), setup)
    ebc = collection_of(unwrapped(model))
    found = []
    for step, batch in enumerate(own_batches(sizes, setup.weighted)):
        if dist.get_rank() == 0 and step == 1:
            ebc.keep_outcomes()
        model(batch.to(model.device))[0].backward()
        try:
            found.append(as_arrays(ebc.outcomes()))
        except RuntimeError as error:
            found.append(str(error))
    return {"seen": found}


def keep_before_sharding(setup: Setup) -> bool:
    """Whether a sharded module keeps outcomes if the unsharded one did."""
    model = new_model(setup, "meta")
    model.ebc.keep_outcomes()
    sharded = shard(model, setup)
    (batch,) = own_batches([[2] * dist.get_world_size()], setup.weighted)
    sharded(batch)
    return bool(unwrapped(sharded).ebc.outcomes())


def watch_unsharded(setup: Setup, keys: list[list[int]], device: str) -> list[Outcomes]:
    """Outcomes of an unsharded module's forwards on `keys` of feature "user"."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    model = new_model(setup, device)
    model.ebc.keep_outcomes()
    seen = []
    for ids in keys:
        features = KeyedJaggedTensor(
            ["genre", "user", "ad", "shared"],
            torch.tensor([*ids, *ids]),
            lengths=torch.tensor([0, len(ids), len(ids), 0]),
        )
        model.ebc(features)
        seen.append(as_arrays(model.ebc.outcomes()))
    return seen
