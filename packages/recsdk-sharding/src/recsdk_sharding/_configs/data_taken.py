"""What tables take of what comes with ids, for their rules of admission and eviction."""

from __future__ import annotations

import torch

from recsdk_core import Admit, Evict

__all__ = ["DTYPES", "evicts_by_time", "taken_by"]

DTYPES = {"times": torch.int64, "scores": torch.float32, "counts": torch.int64}
"""What may come with ids, by its name in `recsdk_core.KeyData`."""


def evicts_by_time(rule: Evict | None) -> bool:
    """Whether a rule goes by times."""
    return rule is not None and rule.by == "time"


def taken_by(eviction: Evict | None, admission: Admit | None) -> tuple[str, ...]:
    """What the rules of a table take, in the order of `DTYPES`."""
    takes = {
        "times": evicts_by_time(eviction),
        "scores": eviction is not None and eviction.order == "score",
        "counts": admission is not None or (eviction is not None and eviction.alpha is not None),
    }
    return tuple(name for name in DTYPES if takes[name])
