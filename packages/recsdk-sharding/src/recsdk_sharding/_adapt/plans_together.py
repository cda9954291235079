"""Makes all ranks raise where the one that plans for them cannot.

torchrec's `collective_plan` plans on rank 0 and sends the plan to the others. If planning raises
there, or is interrupted, nothing is sent, and they wait until their process group times out. So
importing the package makes rank 0 send what it raised. For models without hash tables nothing
changes.
"""

from __future__ import annotations

import functools
from typing import Any

from torchrec.distributed.planner import planners

from recsdk_core.agreement import text_of
from recsdk_sharding._adapt.arguments import has_hash_modules
from recsdk_sharding.exchange.errors import PeerError, known

__all__ = ["adapt_collective_plans"]


def adapt_collective_plans() -> None:
    """Makes torchrec's planners tell all ranks what rank 0 raised."""
    invoke = planners.invoke_on_rank_and_broadcast_result
    planners.invoke_on_rank_and_broadcast_result = _telling_all(invoke)


def _telling_all(invoke: Any) -> Any:
    @functools.wraps(invoke)
    def adapted(group: Any, rank: int, plan: Any, module: Any, *args: Any) -> Any:
        if not has_hash_modules(module):
            return invoke(group, rank, plan, module, *args)
        own: BaseException | None = None

        def planned() -> tuple[Any, str | None]:
            nonlocal own
            try:
                return plan(module, *args), None
            except BaseException as error:  # the user's interrupt too
                own = error
                return None, text_of(error)

        made, text = invoke(group, rank, planned)
        if own is not None:
            raise known(own)
        if text is not None:
            raise PeerError(rank, text)
        return made

    return adapted
