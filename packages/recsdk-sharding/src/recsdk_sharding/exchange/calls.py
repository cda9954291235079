"""Calls that all ranks make together, with the same arguments, and that fail on all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from recsdk_core import RecsdkError
from recsdk_core.agreement import attempt, is_known, known, raise_together, text_of
from recsdk_sharding.exchange.errors import PeerError
from recsdk_sharding.exchange.failures import failing_together
from recsdk_sharding.exchange.host_exchange import HostExchange, require_all_met

__all__ = ["Call", "calling", "open_call"]

T = TypeVar("T")

_SECONDS_FOR_OTHERS = 3.0
"""How long a rank that failed waits for the others to come to where they agree."""
_open = threading.local()


class Call:
    """One call on all ranks of an exchange, between its batches."""

    def __init__(self, name: str, exchange: HostExchange) -> None:
        self._name = name
        self._exchange = exchange
        self._is_over = False

    def begin(self, check: Callable[[], Mapping[str, Any]]) -> None:
        """Checks the arguments on every rank; raises on every rank if that fails on one.

        `check` gives those that all must be given alike, as plain data.
        """
        self._agree(check)

    def meet(self) -> None:
        """Waits until all ranks have come here; raises if one has failed before.

        Call it before work that other ranks cannot interrupt.
        """
        self._agree(dict)

    def end(self) -> None:
        """As `meet`, once: from here on the call fails as `failing_together` says."""
        if not self._is_over:
            self._agree(dict)
            self._is_over = True

    def fail(self, error: BaseException) -> None:
        """Tells the others, where they meet, unless they know."""
        if self._is_over or is_known(error, self._exchange.ranks):
            return

        def again() -> Mapping[str, Any]:
            raise error

        with suppress(Exception):
            self._agree(again, _SECONDS_FOR_OTHERS)

    def _agree(self, check: Callable[[], Mapping[str, Any]], timeout: float | None = None) -> None:
        exchange = self._exchange
        given, error = attempt(check)
        own = (None if error is None else text_of(error), self._name, given, exchange.num_modules)
        told = exchange.swap(own, timeout)
        require_all_met(told)
        try:
            texts = [text for text, *_ in told]
            raise_together(error, texts, PeerError, exchange.ranks)
            _refuse_different([(name, each) for _, name, each, _ in told])
        except BaseException:
            exchange.note_modules(max(count for *_, count in told))
            raise


def _refuse_different(told: list[tuple[str, Mapping[str, Any]]]) -> None:
    """Raises RecsdkError, on every rank, unless all make one call with the same arguments."""
    first_name, first = told[0]
    for rank, (name, given) in enumerate(told):
        if name != first_name:
            text = f"rank 0 calls {first_name} while rank {rank} calls {name}"
            raise known(RecsdkError(f"{text}; all ranks must make the same calls in one order"))
        for argument, value in first.items():
            if given.get(argument) != value:
                raise known(
                    RecsdkError(
                        f"{name}: {argument} is {value!r} on rank 0 and {given.get(argument)!r} on "
                        f"rank {rank}; all ranks must pass the same"
                    )
                )


@contextmanager
def calling(name: str, exchange: HostExchange) -> Iterator[Call]:
    """Inside, one rank's exception ends the call on all ranks.

    Until `Call.end`, at which the ranks meet, all of them can make the call again. A rank that
    fails then, or that the others do not meet within seconds, closes the process groups.
    """
    with failing_together(exchange.group):
        _open.call = call = Call(name, exchange)
        try:
            yield call
            call.end()
        except Exception as error:
            call.fail(error)
            raise
        finally:
            _open.call = None


def open_call() -> Call | None:
    """The call in which this thread is now."""
    found: Call | None = getattr(_open, "call", None)
    return found
