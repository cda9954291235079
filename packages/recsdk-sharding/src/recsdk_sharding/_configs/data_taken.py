"""What tables take of what comes with ids, for their rules of admission and eviction."""

from __future__ import annotations

import torch

from recsdk_core import Admit, Evict

__all__ = ["DTYPES", "evicts_by_time", "needed_by", "taken_by"]

DTYPES = {
    "times": torch.int64,
    "scores": torch.float32,
    "counts": torch.int64,
    "clicks": torch.int64,
}
"""What may come with ids, by its name in `recsdk_core.KeyData`."""


def evicts_by_time(rule: Evict | None) -> bool:
    """Whether a rule goes by times."""
    return rule is not None and rule.by == "time"


def taken_by(eviction: Evict | None, admission: Admit | None) -> tuple[str, ...]:
    """What the rules of a table take, in the order of `DTYPES`."""
    by_clicks = eviction is not None and eviction.takes_clicks
    takes = {
        "times": evicts_by_time(eviction),
        "scores": eviction is not None
        and (eviction.order == "score" or "score" in eviction.columns),
        "counts": by_clicks or admission is not None,
        "clicks": by_clicks or (admission is not None and admission.takes_clicks),
    }
    return tuple(name for name in DTYPES if takes[name])


def needed_by(eviction: Evict | None, admission: Admit | None) -> dict[str, str]:
    """What keys must bring, and the rule that needs it, in its words."""
    needed = {}
    if eviction is not None and eviction.order == "score":
        needed["scores"] = "Evict.score()"
    if admission is not None and admission.needs_clicks:
        kind = next(term.kind for term in admission.terms() if term.beta)
        needed["clicks"] = f"Admit.{kind}() with beta above 0"
    if eviction is not None and eviction.needs_clicks:
        needed["clicks"] = f"Evict.{eviction.order}() with beta above 0"
    return needed
