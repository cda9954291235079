"""Training in which many samples or ids share vectors; each function returns plain values."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from random_models import Case, bags_of, kjt_of, new_module, shard
from worlds import rows_of


def train(case: Case, is_sharded: bool) -> dict[str, Any]:
    """Rows after training with gradients that differ from sample to sample and id to id."""
    module = shard(new_module(case, "meta"), case) if is_sharded else new_module(case, case.device)
    rank = dist.get_rank()
    for step in range(len(case.sizes)):
        result = module(kjt_of(case, bags_of(case, step, rank)).to(torch.device(case.device)))
        found = result.wait() if is_sharded else result
        values = (
            [each.values() for each in found.values()] if case.is_sequence else [found.values()]
        )
        rng = np.random.default_rng([step, rank])
        losses = [
            (each * torch.from_numpy(rng.normal(size=tuple(each.shape))).to(each)).sum()
            for each in values
        ]
        sum(losses).backward()  # type: ignore[union-attr]
    return {"rows": rows_of(module.tables())}
