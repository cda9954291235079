"""torchrec's awaitables of a batch on its way, as far as the host's work goes.

torchrec's own leave marks for a profiler at every wait, also where nobody profiles: five a batch,
which take as long as reading it. The parts of the host's work have marks of their own, see
`recsdk_sharding.exchange.parts`.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torchrec.distributed.embedding_sharding import KJTListAwaitable, KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import Awaitable

from recsdk_core.batch_leases import leave_failed
from recsdk_sharding._batch.uncompiled import uncompiled

__all__ = ["Ready", "StartedInputs", "Unmarked"]

W = TypeVar("W")


class Unmarked(Awaitable[W]):  # type: ignore[misc]
    """Waits without a mark."""

    @uncompiled
    def wait(self) -> W:
        """What is waited for, as the callbacks leave it."""
        found: W = self._wait_impl()
        for callback in self.callbacks:
            found = callback(found)
        return found


class Ready(Unmarked[W]):
    """Something that is there already."""

    def __init__(self, found: W) -> None:
        super().__init__()
        self._found = found

    def _wait_impl(self) -> W:
        return self._found


class _Inputs(Unmarked[Any], KJTListAwaitable):  # type: ignore[misc]
    """The mapped batch of each group of tables."""

    def _wait_impl(self) -> KJTList:
        found: list[Any] = []
        try:
            found.extend(each.wait() for each in self.awaitables)
        except BaseException:
            leave_failed([batch.in_flight for batch in found])
            found.clear()
            for each in self.awaitables:  # one may have been interrupted; the traceback keeps it
                each.drop()
            raise
        return KJTList(found)


class StartedInputs(Unmarked[Any], KJTListSplitsAwaitable[Any]):  # type: ignore[misc]
    """The host's work for each group of tables, which was started."""

    def _wait_impl(self) -> _Inputs:
        return _Inputs([each.wait() for each in self.awaitables], self.ctx)
