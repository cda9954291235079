"""What test_scaled_shards.py runs on every rank."""

from __future__ import annotations

from typing import Any

import torch
from worlds import Setup, make_batch, new_model, optimizer_of, rows_of, shard, unwrapped


def scaled_step(setup: Setup) -> dict[str, Any]:
    """A step, and a backward from a scaled loss, after which DistributedDataParallel is spent."""
    model = shard(new_model(setup, "meta"), setup)
    optimizer, tables = optimizer_of(model, 0.1), unwrapped(model).ebc.tables()
    batch = make_batch(3, 4).to(torch.device(setup.device))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    found: dict[str, Any] = {"counts": []}
    for is_scaled in (False, True):
        optimizer.zero_grad()
        loss = model(batch)[0]
        before = rows_of(tables)
        try:
            (scaler.scale(loss) if is_scaled else loss).backward()
        except RuntimeError as error:
            found["message"], found["before"], found["after"] = str(error), before, rows_of(tables)
        else:
            optimizer.step()
        found["counts"] += [{table.update_count for table in tables.values()}]
    return found
