"""What makes all ranks raise where one alone fails with a batch of a sharded module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torchrec.distributed.types import LazyAwaitable

from recsdk_sharding._batch.uncompiled import uncompiled
from recsdk_sharding.exchange import HostExchange
from recsdk_sharding.exchange.failures import failing_together

__all__ = ["FailsTogether", "Results"]

T = TypeVar("T")


class FailsTogether:
    """Mixed into sharded modules, before torchrec's: the ranks that have the module fail together.

    Pipelines call the three stages by themselves, some batches ahead. What fails while they wait
    for a batch is raised at its turn, so they tell of it, not this.
    """

    @property
    def host_exchange(self) -> HostExchange:
        """Where this module's host jobs run."""
        raise NotImplementedError

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """All three stages, one after the other."""
        with failing_together(self.host_exchange.group):
            return super().forward(*args, **kwargs)  # type: ignore[misc]

    @uncompiled
    def compute_and_output_dist(self, ctx: Any, input: Any) -> Any:
        """Pools, and starts the return of the results."""
        with failing_together(self.host_exchange.group):  # the others wait for what is sent here
            return self.output_dist(ctx, self.compute(ctx, input))  # type: ignore[attr-defined]


class Results(LazyAwaitable[T]):  # type: ignore[misc]
    """The result of a function, which runs when it is asked for."""

    def __init__(self, make: Callable[[], T], exchange: HostExchange) -> None:
        """`exchange`: of the ranks that make such results."""
        super().__init__()
        self._make = make
        self._group = exchange.group

    @uncompiled
    def _wait_impl(self) -> T:
        with failing_together(self._group):
            result = self._make()
        del self._make  # it keeps what has been sent
        return result
