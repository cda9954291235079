"""Integers and floats of numpy in place of Python's, for every argument that is a number.

Arguments are found by their annotations. `faults_of_numbers` calls with a good value, with the same
as numbers of other types, and with what is no such number, and says what differs.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch

from odd_arguments import Call, Case, Surface, fault_of_refusal, good_call

__all__ = ["NumberCase", "faults_of_numbers", "number_cases"]

_INTS: tuple[Callable[[Any], Any], ...] = (
    *(np.int64, np.int32, np.uint64, np.int8),
    *(np.array, torch.tensor),
)
_FLOATS: tuple[Callable[[Any], Any], ...] = (np.float64, np.float32)
_BOOLS: Mapping[str, Callable[[], Any]] = {
    "True": lambda: True,
    "numpy bool": lambda: np.bool_(True),
    "array of a bool": lambda: np.array(True),
    "tensor of a bool": lambda: torch.tensor(True),
}
_NO_INTS: Mapping[str, Callable[[], Any]] = {
    **_BOOLS,
    "1.0": lambda: 1.0,
    "numpy 1.0": lambda: np.float64(1.0),
    "tensor without data": lambda: torch.empty((), dtype=torch.int64, device="meta"),
}
_GUESSES = (1, 2, 3, 0, 8, 64)
"""Of arguments whose good value is None."""
_DEPTH = 5
_OPAQUE = (type, ModuleType, threading.Thread)


@dataclasses.dataclass(frozen=True)
class NumberCase:
    """A parameter that is a number, or has numbers."""

    name: str
    parameter: str
    is_int: bool

    def __str__(self) -> str:
        return f"{self.name}({self.parameter})"


def number_cases(surface: Surface) -> list[NumberCase]:
    """The parameters of a package's callables that are annotated as ints or floats."""
    found = []
    for name, each in sorted(surface.callables.items()):
        for parameter, told in each.parameters(surface).items():
            kinds = _kinds_of(str(told.annotation))
            if kinds & {"int", "float"} and not _is_left_out(surface, name, parameter):
                found.append(NumberCase(name, parameter, "float" not in kinds))
    return found


def _is_left_out(surface: Surface, name: str, parameter: str) -> bool:
    return any(
        re.fullmatch(pattern, f"{name}({parameter}={how})")
        for pattern in surface.left_out
        for how in ("number", "0")
    )


def _kinds_of(annotation: str) -> set[str]:
    """The names of a union, those in brackets of a sequence too."""
    within = re.sub(r"\b(Callable|Mapping|dict|NDArray|Literal)\[.*\]", "", annotation)
    return set(re.findall(r"\w+", within))


def faults_of_numbers(surface: Surface, case: NumberCase, turn: int) -> list[str]:
    """What is wrong with how a callable takes numbers; `turn` chooses among types."""
    good = _good_value(surface, case)
    if good is None:
        return [f"{case}: give its surface a number"]
    faults = []
    expected: dict[str, Any] = {}
    for kind in _kinds(good, case.is_int, turn):
        given = _as(kind, good)
        same = _as(int if kind in _INTS else float, given)
        if repr(same) not in expected:
            expected[repr(same)] = _outcome(surface, case, same)
        wanted, got = expected[repr(same)], _outcome(surface, case, given)
        if isinstance(wanted, str):
            faults.append(f"{case}: {same!r} is no good value: {wanted}")
        elif got != wanted:
            different = _difference(wanted, _outcome(surface, case, same), got)
            if different is not None:
                faults.append(f"{case}: {given!r} differs from {same!r}: {different}")
    for label, make in (_NO_INTS if case.is_int else _BOOLS).items():
        bad = _within(good, make())
        refused = Case(case.name, case.parameter, label)
        fault = fault_of_refusal(surface, refused, _call(surface, case), bad)
        if fault is not None:
            faults.append(f"{case}: {label} {fault}")
    return faults


def _kinds(good: Any, is_int: bool, turn: int) -> list[Callable[[Any], Any]]:
    """numpy's usual type, and another."""
    if not is_int:
        is_whole = all(float(each).is_integer() for each in _numbers(good))
        return [*_FLOATS, np.int64] if is_whole else list(_FLOATS)
    first, *others = (kind for kind in _INTS if _is_able(kind, good))
    return [first, others[turn % len(others)]]


def _is_able(kind: Callable[[Any], Any], good: Any) -> bool:
    """Whether the type holds the integers."""
    try:
        return all(int(kind(each)) == each for each in _numbers(good))
    except (OverflowError, RuntimeError):
        return False


def _numbers(good: Any) -> Sequence[Any]:
    return good if isinstance(good, (list, tuple)) else [good]


def _as(kind: Callable[[Any], Any], good: Any) -> Any:
    return type(good)(map(kind, good)) if isinstance(good, (list, tuple)) else kind(good)


def _within(good: Any, bad: Any) -> Any:
    return type(good)([bad, *good[1:]]) if isinstance(good, (list, tuple)) else bad


def _call(surface: Surface, case: NumberCase) -> Call:
    """A good call, in which the number is one if the surface gives it."""
    call = good_call(surface, surface.callables[case.name])
    made = surface.together.get(f"{case.name}.{case.parameter}")
    others = {} if made is None else made()
    if "self" in others:
        call.receiver = [others.pop("self")]
    call.arguments.update(others)
    return call


def _good_value(surface: Surface, case: NumberCase) -> Any:
    """What the surface gives; where that is None, what the callable takes."""
    given = _call(surface, case).arguments[case.parameter]
    if _is_number(given) or (
        isinstance(given, (list, tuple)) and given and all(map(_is_number, given))
    ):
        return given
    for guess in _GUESSES:
        call = _call(surface, case)
        call.arguments[case.parameter] = guess if case.is_int else float(guess)
        try:
            call()
        except surface.errors:
            continue
        return call.arguments[case.parameter]
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _outcome(surface: Surface, case: NumberCase, value: Any) -> Any:
    """What a call returns and leaves, in plain values that name their types; or what it raises."""
    call = _call(surface, case)
    call.arguments[case.parameter] = value
    try:
        result = call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return plain(result), plain(call.receiver)


def plain(value: Any, depth: int = _DEPTH) -> Any:
    """A value as types and reprs, that of an object by its attributes and properties."""
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return type(value).__name__, str(value.dtype), tuple(value.shape), _content(value)
    if value is None or isinstance(value, (bool, int, float, str, bytes, enum.Enum, np.generic)):
        return type(value).__name__, repr(value)
    if depth == 0 or isinstance(value, _OPAQUE) or inspect.isroutine(value):
        return type(value).__name__
    if isinstance(value, Mapping):
        return [(plain(key, 1), plain(each, depth - 1)) for key, each in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value).__name__, [plain(each, depth - 1) for each in value]
    return type(value).__name__, dict(_attributes(value, depth - 1))


def _content(value: Any) -> Any:
    return None if getattr(value, "is_meta", False) else value.tolist()


def _attributes(value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """Those that it has, and the properties of our classes, which may raise."""
    names = set(getattr(value, "__dict__", {})) | set(getattr(type(value), "__slots__", ()))
    if type(value).__module__.startswith("recsdk_"):
        names |= {
            name
            for name, each in inspect.getmembers_static(type(value))
            if isinstance(each, property) and not name.startswith("_")
        }
    for name in sorted(names):
        yield name, _attribute(value, name, depth)


def _attribute(value: Any, name: str, depth: int) -> Any:
    try:
        return plain(getattr(value, name), depth)
    except Exception as error:
        return type(error).__name__


def _difference(expected: Any, again: Any, got: Any) -> str | None:
    """The first place in which a plain value differs from those of two calls; what these have
    differently, such as a name that is drawn, need only be of the same type."""
    if got in (expected, again):
        return None
    parts = None if _is_leaf(expected) else _parts(expected, again, got)
    if parts is not None:
        found = (_difference(*each) for each in parts)
        return next((each for each in found if each is not None), None)
    if expected != again and _type_of(got) in (_type_of(expected), _type_of(again)):
        return None
    return f"{expected!r:.200} became {got!r:.200}"


def _is_leaf(value: Any) -> bool:
    """Whether it is the type and the repr of a value without parts."""
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], str)


def _type_of(value: Any) -> str:
    named = value[0] if _is_leaf(value) else None
    return named if isinstance(named, str) else type(value).__name__


def _parts(*values: Any) -> list[tuple[Any, ...]] | None:
    """What several values have in one place each; None if they are of different forms."""
    if all(isinstance(each, dict) and each.keys() == values[0].keys() for each in values):
        return [tuple(each[name] for each in values) for name in values[0]]
    if all(isinstance(each, (list, tuple)) and len(each) == len(values[0]) for each in values):
        return list(zip(*values, strict=True))
    return None
