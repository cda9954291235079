"""One sharded collection through turns in any order: it trains, is read, is left, and fails.

From turn to turn the ids, the ranks' samples, the forms of bags, and what is asked for change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from random_models import (
    Bags,
    Case,
    filled,
    kjt_of,
    loss_of,
    new_module,
    plain,
    shard,
    weight_grads,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from worlds import rows_of

Form = Literal["any", "one", "none", "one on average"]
"""How many ids a feature's bags have: from 0 to 3, each one, none, or as many ids as bags."""


@dataclass(frozen=True)
class Turn:
    """One call of the collection on all ranks."""

    kind: Literal["train", "leave", "read", "fail"]
    """A batch that is left is looked up in training and has no backward."""
    sizes: tuple[int, ...]
    """Samples of each rank."""
    forms: tuple[tuple[Form, ...], ...]
    """Of each rank's features."""
    batches_vary: bool
    learns_weights: tuple[bool, ...]
    """Of each rank, where ids have weights."""
    keeps_outcomes: tuple[bool, ...]
    """Of each rank."""
    has_stranger: bool
    """Whether a feature that no table reads comes too, and the features in another order."""
    seed: int
    guilty: int = 0
    """The rank whose batch is wrong, where the turn fails."""


def learning(case: Case, turn: Turn, rank: int) -> Case:
    """The settings of a rank's batch."""
    learns = turn.kind == "train" and case.is_weighted and turn.learns_weights[rank]
    return replace(case, batches_vary=turn.batches_vary, learns_weights=learns)


def bags_of(case: Case, turn: Turn, rank: int) -> dict[str, Bags]:
    """A rank's batch."""
    rng = np.random.default_rng([turn.seed, rank])
    size = turn.sizes[rank]
    found = {}
    for name, form in zip(case.feature_names, turn.forms[rank], strict=True):
        num_bags = int(rng.integers(1, 4)) if turn.batches_vary else size
        lengths = {
            "any": rng.integers(0, 4, num_bags),
            "one": np.ones(num_bags, np.int64),
            "none": np.zeros(num_bags, np.int64),
            "one on average": rng.permutation([2, 0] * (num_bags // 2) + [1] * (num_bags % 2)),
        }[form].astype(np.int64)
        found[name] = filled(learning(case, turn, rank), rng, lengths, size, 0.5)
    return found


def batch_of(case: Case, turn: Turn, rank: int) -> KeyedJaggedTensor:
    """The same as torchrec has it."""
    bags = bags_of(case, turn, rank)
    if turn.has_stranger:
        size = turn.sizes[rank]
        stranger = Bags(
            np.arange(size), np.ones(size, np.int64), np.ones(size, np.float32), np.arange(size)
        )
        names = np.random.default_rng(turn.seed).permutation([*bags, "stranger"]).tolist()
        bags = {name: bags.get(name, stranger) for name in names}
    return kjt_of(learning(case, turn, rank), bags)


def drive(case: Case, turns: list[Turn]) -> dict[str, Any]:
    """Takes this rank through all turns; what each gave, and the rows at the end."""
    module = shard(new_module(case, "meta"), case)
    rank = dist.get_rank()
    seen = []
    for turn in turns:
        module.train(turn.kind != "read")
        module.keep_outcomes(turn.keeps_outcomes[rank])
        if turn.kind == "fail":
            seen.append(_fail(module, batch_of(case, turn, rank), case, rank == turn.guilty))
        else:
            seen.append(_call(module, case, turn, rank))
    return {"seen": seen, "rows": rows_of(module.tables())}


def _call(module: Any, case: Case, turn: Turn, rank: int) -> dict[str, Any]:
    batch = batch_of(case, turn, rank)
    with torch.set_grad_enabled(turn.kind != "read"):
        result = module(batch.to(torch.device(case.device))).wait()
    if turn.kind == "train":
        loss_of(result, case.is_sequence).backward()
    told = None
    if turn.keeps_outcomes[rank]:
        told = {name: each.numpy().copy() for name, each in module.outcomes().items()}
    grads = weight_grads(learning(case, turn, rank), batch, case.world_size)
    return {"output": plain(result, case.is_sequence), "outcomes": told, "weight_grads": grads}


def _fail(module: Any, batch: KeyedJaggedTensor, case: Case, is_guilty: bool) -> str:
    """The name of the error; afterwards the module works again."""
    if is_guilty:
        batch = KeyedJaggedTensor(["nobody's"], torch.arange(2), lengths=torch.ones(2).long())
    said = "nothing"
    try:
        module(batch.to(torch.device(case.device))).wait()
    except (ValueError, RuntimeError) as error:
        said = type(error).__name__
    module.host_exchange.meet()
    dist.barrier()
    module.host_exchange.reset()
    dist.barrier()
    return said
