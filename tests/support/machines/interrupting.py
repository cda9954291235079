"""A Ctrl-C at a chosen moment of a call, the same each time."""

from __future__ import annotations

import dis
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import recsdk_core

__all__ = ["Interrupting"]

_PLACES = (str(Path(recsdk_core.__file__).parent),)
_ENDS = ("CALL", "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
"""Python looks for signals after these instructions only."""


class Interrupting:
    """Sends SIGINT at one moment of the calls inside `coming`, counted from 0.

    A moment is one at which Python looks for signals, in a function of these packages. `has_come`
    says whether there were so many; `num_moments` how many there were before.
    """

    def __init__(self, moment: int, places: tuple[str, ...] = _PLACES) -> None:
        self._moment = moment
        self._places = places
        self.num_moments = 0
        self.where = ""
        """File and line of the moment."""
        self.has_come = False

    @contextmanager
    def coming(self) -> Iterator[None]:
        """Inside, the interrupt comes; afterwards all is as before."""
        tracer = sys.gettrace()
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(tracer)
            signal.signal(signal.SIGINT, before)

    def call(self, work: Callable[[], Any]) -> Any:
        """What `work` returns; KeyboardInterrupt if that came out of it."""
        with self.coming():
            return work()

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        if self.has_come or not frame.f_code.co_filename.startswith(self._places):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._look

    def _look(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode" and frame.f_lasti in _moments_of(frame.f_code):
            self.num_moments += 1
            if self.num_moments > self._moment and not self.has_come:
                self.has_come = True
                self.where = _where(frame)
                signal.raise_signal(signal.SIGINT)
        return self._look


def _where(frame: FrameType) -> str:
    code = frame.f_code
    is_start = frame.f_lineno == code.co_firstlineno or frame.f_lasti == min(_moments_of(code))
    start = ", at its start" if is_start else ""
    return f"{code.co_filename}:{frame.f_lineno}, {code.co_name}{start}"


@cache
def _moments_of(code: CodeType) -> frozenset[int]:
    """Where what follows such an instruction begins, if an error there goes the same way."""
    steps = [each for each in dis.get_instructions(code) if each.opname != "CACHE"]
    moments = {
        after.offset
        for before, after in pairwise(steps)
        if before.opname.startswith(_ENDS)
        and _handler_of(code, before.offset) == _handler_of(code, after.offset)
    }
    return frozenset(moments)


@cache
def _handlers_of(code: CodeType) -> tuple[tuple[int, int, int], ...]:
    parsed = getattr(dis, "_parse_exception_table", lambda _: ())(code)  # none before Python 3.11
    return tuple((each.start, each.end, each.target) for each in parsed)


def _handler_of(code: CodeType, offset: int) -> int | None:
    found = (target for start, end, target in _handlers_of(code) if start <= offset < end)
    return next(found, None)
