"""Makes all ranks raise where one of them cannot plan.

torchrec's `collective_plan` plans on rank 0 and sends the plan to the others. If planning raises
there, or is interrupted, nothing is sent, and they wait until their process group times out; and
what the others were given is not looked at. So importing the package makes rank 0 send what it
raised, and all ranks tell each other whether the plan is for what they were given. For models
without hash tables nothing changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torchrec.distributed.planner import planners

from recsdk_core.agreement import attempt, known, raise_together, text_of
from recsdk_sharding._adapt.arguments import check_model_arguments
from recsdk_sharding._modules.making_models import has_hash_modules
from recsdk_sharding.exchange.errors import PeerError
from recsdk_sharding.exchange.failures import failing_together
from recsdk_sharding.exchange.groups import ranks_of

__all__ = ["adapt_collective_plans"]


def adapt_collective_plans() -> None:
    """Makes torchrec's planners tell all ranks what one raised."""
    invoke = planners.invoke_on_rank_and_broadcast_result
    planners.invoke_on_rank_and_broadcast_result = _telling_all(invoke)


@dataclass(frozen=True)
class _Planned:
    """What the rank that plans sends, for a model with hash tables."""

    plan: Any
    text: str | None
    """What it raised."""


def _telling_all(invoke: Any) -> Any:
    @functools.wraps(invoke)
    def adapted(group: Any, rank: int, plan: Any, module: Any, *args: Any) -> Any:
        own: BaseException | None = None

        def planned() -> Any:
            nonlocal own
            if not has_hash_modules(module):
                return plan(module, *args)
            try:
                return _Planned(plan(module, *args), None)
            except BaseException as error:  # the user's interrupt too
                own = error
                return _Planned(None, text_of(error))

        made = invoke(group, rank, planned)
        if not isinstance(made, _Planned):
            return made
        with failing_together(group):  # other ranks may do more with these than to plan
            if own is not None:
                raise known(own)
            if made.text is not None:
                raise known(PeerError(rank, made.text))
            _together(group, lambda: _check(module, made.plan, *args))
        return made.plan

    return adapted


def _check(module: Any, plan: Any, *args: Any) -> None:
    """Raises TypeError or ValueError unless a plan is for a model and sharders."""
    given = {"module": module, "plan": plan, "sharders": args[0] if args else None}
    check_model_arguments(given, "collective_plan")


def _together(group: Any, call: Callable[[], None]) -> None:
    """Makes a call on all ranks; if it raises on one, all raise."""
    _, error = attempt(call)
    texts: list[str | None] = [None] * group.size()
    own = None if error is None else text_of(error)
    if group.size() > 1:
        dist.all_gather_object(texts, own, group=group)
    raise_together(error, texts, PeerError, ranks_of(group))
