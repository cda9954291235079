"""Streams of ids whose popular ones change. Shape letter: N keys."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recsdk_core import Evict

Batch: TypeAlias = tuple[NDArray[np.int64], dict[str, Any]]
"""int64 (N,), and what the rule takes beside the keys."""


def drifting(rule: Evict, num_steps: int, num_keys: int) -> list[Batch]:
    """`num_keys` power-law keys a step, with what the rule takes; the same each time."""
    random = np.random.default_rng(7)
    batches = []
    for step in range(num_steps):
        keys = (random.zipf(1.2, num_keys) % 20_000 + 97 * step) * 0x9E3779B97F4A7C1
        more: dict[str, Any] = {}
        if rule.by == "time":
            more["times"] = random.integers(0, 5, len(keys)) + 3 * step
        if rule.order == "score" or "score" in rule.columns:
            more["scores"] = random.integers(-3, 3, len(keys)).astype(np.float32)
        if rule.needs_clicks:
            more["clicks"] = random.integers(0, 4, len(keys)) // 3
        batches.append((keys, more))
    return batches
