"""What the test of drift runs on a rank; it returns plain values."""

from __future__ import annotations

import numpy as np
import torch
from loops import plain
from on_ranks import own_batches
from worlds import Setup, collection_of, new_model, optimizer_of, shard, unwrapped

from recsdk_core import Outcome


def train(
    setup: Setup, sizes: list[list[int]], nudged: int | None = None
) -> tuple[list[np.ndarray], int]:
    """Outputs of each step, and how many ids were refused.

    With `nudged` that number of the first dense layer begins as the next greater one.
    """
    model = shard(new_model(setup, "meta"), setup)
    if nudged is not None:
        first = next(p for name, p in model.named_parameters() if "ebc." not in name)
        with torch.no_grad():
            number = first.view(-1)[nudged : nudged + 1]
            number.copy_(torch.nextafter(number, torch.full_like(number, torch.inf)))
    batches = own_batches(sizes, setup.weighted)
    steps = plain(model, optimizer_of(model, setup.dense_lr), batches)
    outputs = [out.detach().cpu().numpy() for out in steps]
    tables = collection_of(unwrapped(model)).tables().values()
    return outputs, sum(table.stats().outcomes[Outcome.REFUSED] for table in tables)
