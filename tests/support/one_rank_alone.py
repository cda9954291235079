"""What happens on every rank if one alone is wrong in a call that all ranks make together.

A `Collective` is such a call. `failed_calls` makes it while one rank has a wrong argument, or an
error at one of the functions that it runs, and then makes it again as it should be.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from recsdk_sharding.exchange import calls, failures, host_exchange
from recsdk_sharding.exchange.groups import close_groups

__all__ = ["ERRORS", "Collective", "Outcome", "failed_calls", "is_well", "steps_of"]

SECONDS = 10
"""In which every rank must have raised."""
_SECONDS_FOR_OTHERS = 0.3  # nobody else will come
ERRORS = {"OSError": OSError, "MemoryError": MemoryError}
# What runs before a call has begun to tell of errors, and what tells of them.
_BEFORE = (
    "Call",
    "HostExchange.state",
    "HostExchange.swap",
    "Saver.load",
    "Saver.save",
    "FailsTogether.forward",
    "ShardedHashEmbeddingBag.host_exchange",
    "ShardedHashFeatureProcessedEmbeddingBagCollection.host_exchange",
    "ShardedTables.host_exchange",
    "Results._wait_impl",
    "Telemetry.__init__",
    "Telemetry.report",
    "_GroupRanks.gather",
    "_exchange_of",
    "_Swap",
    "_checking.<locals>.checked",
    "_telling_all.<locals>.adapted",
    "begin",
    "calling",
    "exchanges_of",
    "go_on",
    "export_rows",
    "host_of",
    "import_rows",
    "joint_ranks",
    "made_together",
    "open_call",
    "parallelize",
    "share",
    "together",
)
_TELLING = (
    "recsdk_core.agreement",
    "recsdk_sharding.exchange.collectives",
    "recsdk_sharding.exchange.errors",
    "recsdk_sharding.exchange.failure",
    "recsdk_sharding.exchange.groups",
    "recsdk_sharding.exchange.local_sockets",
    "recsdk_sharding.exchange.watcher",
    "recsdk_sharding.exchange.worker",
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """A call that all ranks make together, in two ways that take turns."""

    arguments: Callable[[int], dict[str, Any]]
    """Good ones, made anew, of turn 0 or 1."""
    call: Callable[..., Any]
    """Makes the call with them."""
    read: Callable[..., Any]
    """Of its result, and the arguments by name, what depends on the turn alone."""
    bad: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Bad values by argument."""
    other: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Good values that ranks must not have each by itself."""
    state: Callable[[], Any] = tuple
    """What a call that failed leaves as it was."""
    last: tuple[str, ...] = ()
    """Functions that run once all ranks are known to be well: an error there undoes nothing."""

    def result(self, turn: int) -> str:
        """What a good call gives."""
        arguments = self.arguments(turn)
        return digest_of(self.read(self.call(**arguments), **arguments))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a call ended on one rank."""

    case: str
    error: str | None
    """Its type and text."""
    seconds: float
    is_unchanged: bool
    """Whether it left what it must leave, if it raised."""
    is_as_twin: bool | None
    """Whether the same call, made next, gave what it gives without a failure; None: not made."""
    is_last: bool
    """Whether the process groups were closed."""


def failed_calls(made: Collective, cases: Sequence[str], guilty: int) -> list[Outcome]:
    """How these cases ended on this rank: all, or up to one after which groups are closed.

    A case: "bad ARGUMENT", "other ARGUMENT", or "ERROR at STEP".
    """
    kept = failures._SECONDS_FOR_OTHERS, calls._SECONDS_FOR_OTHERS
    failures._SECONDS_FOR_OTHERS = calls._SECONDS_FOR_OTHERS = _SECONDS_FOR_OTHERS
    try:
        expected = [made.result(turn) for turn in range(2)]
        found: list[Outcome] = []
        for number, case in enumerate(cases):
            found.append(_failed_call(made, case, guilty, number % 2, expected[number % 2]))
            if found[-1].is_last:
                break
        return found
    finally:
        failures._SECONDS_FOR_OTHERS, calls._SECONDS_FOR_OTHERS = kept


def _failed_call(made: Collective, case: str, guilty: int, turn: int, expected: str) -> Outcome:
    before, arguments = digest_of(made.state()), made.arguments(turn)
    first, _, what = case.partition(" ")
    wrong = failing_at(what.removeprefix("at "), ERRORS[first]) if first in ERRORS else None
    if dist.get_rank() == guilty and wrong is None:
        arguments[what] = {"bad": made.bad, "other": made.other}[first][what]
    start, error = time.monotonic(), None
    with _closing_late():
        try:
            with wrong if wrong is not None and dist.get_rank() == guilty else nullcontext():
                made.call(**arguments)
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"
    seconds = time.monotonic() - start
    is_unchanged = error is None or digest_of(made.state()) == before
    if first in ERRORS and what.partition(":")[2].startswith(made.last):
        is_unchanged = True
    is_last = _must_stop(error is not None)
    is_as_twin = None
    if not is_last:
        is_as_twin = made.result(turn) == expected
    elif error is None:  # this rank needed nothing more of the guilty one
        try:
            made.call(**made.arguments(turn))
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"
    return Outcome(case, error, seconds, is_unchanged, is_as_twin, is_last)


def _must_stop(has_raised: bool) -> bool:
    """Whether the groups are closed, or only some ranks have raised."""
    told: list[Any] = [None] * dist.get_world_size()
    world = failures._world()
    assert world is not None
    if world._failure is not None:
        return True
    try:
        dist.all_gather_object(told, has_raised)
    except RuntimeError:
        return True
    return len(set(told)) > 1


def is_well(outcomes: Sequence[Outcome], guilty: int) -> str | None:
    """What is wrong with how a case ended on all ranks; None if nothing is."""
    case = outcomes[0].case
    errors = [each.error for each in outcomes]
    if all(error is None for error in errors) and " at " in case:
        return None if all(each.is_as_twin for each in outcomes) else "another result"
    if None in errors:
        return f"not all ranks raised: {errors}"
    if any(each.seconds > SECONDS for each in outcomes):
        return f"it took {[round(each.seconds) for each in outcomes]} s: {errors}"
    if not all(each.is_unchanged for each in outcomes):
        return f"something is half done: {errors}"
    if any(each.is_as_twin is False for each in outcomes):
        return f"the next call gave something else: {errors}"
    what = case.partition(" ")[2]
    for rank, error in enumerate(errors):
        is_named = rank == guilty or f"rank {guilty}" in error
        if not is_named or (case.startswith("other") and what not in error):
            return f"rank {rank} is not told which rank or argument: {error}"
    return None


@contextmanager
def _closing_late() -> Iterator[None]:
    """Closes the groups if the body takes too long: nobody waits for their timeout."""
    timer = threading.Timer(SECONDS, close_groups)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# ---- errors at steps ---------------------------------------------------------------------------


def steps_of(made: Collective) -> list[str]:
    """The functions of the packages that the call runs on this rank, as they first run."""
    found: dict[str, None] = {}

    def note(step: str) -> None:
        found.setdefault(step)

    made.call(**made.arguments(0))
    arguments = made.arguments(1)
    with _watching(note):
        made.call(**arguments)
    return list(found)


@contextmanager
def failing_at(step: str, kind: type[Exception]) -> Iterator[None]:
    """Inside, a function raises where it is called first, on whatever thread."""
    is_over = False

    def fail(called: str) -> None:
        nonlocal is_over
        if called == step and not is_over:
            is_over = True
            raise kind(f"no more at {step}")

    with _watching(fail):
        yield


@contextmanager
def _watching(note: Callable[[str], None]) -> Iterator[None]:
    """Inside, a function is told of all calls of the packages, also on threads of exchanges."""
    is_open = True

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and is_open:
            module = frame.f_globals.get("__name__", "")
            code = frame.f_code
            name = getattr(code, "co_qualname", code.co_name)
            if _is_step(module, name):
                note(f"{module}:{name}")

    _renew_threads()
    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        yield
    finally:
        is_open = False
        sys.setprofile(None)
        threading.setprofile(None)
        _renew_threads()


def _is_step(module: str, name: str) -> bool:
    function = re.sub(r"(\.<locals>\.<\w+(?<!lambda)>)+$", "", name)  # with its comprehensions
    outer = function.rpartition(".<locals>")[0]  # what is made in one runs later
    is_telling = module.startswith(_TELLING) or any(
        f"{function}.".startswith(f"{each}.") and not outer.startswith(each) for each in _BEFORE
    )
    is_ours = module.startswith("recsdk_")
    return is_ours and not is_telling and not name.endswith(("__del__", "__repr__"))


def _renew_threads() -> None:
    """Has exchanges start threads anew, with the profile function of that time."""
    for exchange in list(host_exchange._exchanges.values()):
        if not exchange._is_broken:
            exchange.shutdown(1.0)


# ---- comparing ---------------------------------------------------------------------------------


def digest_of(value: Any) -> str:
    """Equal for values that are equal to the bit."""
    return hashlib.sha256(repr(_plain(value)).encode()).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.detach().numpy()
    if isinstance(value, np.ndarray):
        return value.tobytes(), str(value.dtype), value.shape
    if isinstance(value, Mapping):
        return sorted((str(key), _plain(each)) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value
