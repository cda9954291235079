"""Checks of arguments, with messages that name them. Imports neither torch nor pyarrow."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

__all__ = [
    "check_switch",
    "check_text",
    "int_of",
    "int_within",
    "list_of",
    "number_of",
    "options_of",
]


def int_of(name: str, given: Any) -> int:
    """Any integer as Python's; raise TypeError for what is none, which True and False are not."""
    try:
        if "bool" not in str(getattr(given, "dtype", type(given).__name__)):
            return operator.index(given)
    except (TypeError, RuntimeError):  # torch raises the latter for a tensor without data
        pass
    raise TypeError(f"{name} must be an int, got {given!r}")


def int_within(name: str, given: Any, low: int, high: int | None = None) -> int:
    """As `int_of`; raise ValueError for one outside [low, high)."""
    number = int_of(name, given)
    if number < low:
        raise ValueError(f"{name} must be at least {low}, got {number}")
    if high is not None and number >= high:
        raise ValueError(f"{name} must be at most {high - 1}, got {number}")
    return number


def number_of(name: str, given: Any) -> float:
    """Any number as Python's int or float; raise TypeError for what is none."""
    if isinstance(given, bool) or not isinstance(given, Real):
        raise TypeError(f"{name} must be a number, got {given!r}")
    return int(given) if isinstance(given, Integral) else float(given)


def check_switch(name: str, given: Any) -> None:
    """Raise TypeError for what is neither True nor False."""
    if not isinstance(given, bool):
        raise TypeError(f"{name} must be True or False, got {given!r}")


def check_text(name: str, given: Any) -> None:
    """Raise TypeError for what is no string."""
    if not isinstance(given, str):
        raise TypeError(f"{name} must be a string, got {given!r}")


def list_of(name: str, given: Any) -> list[Any]:
    """The items of a list or the like; raise TypeError for a string and for what has none."""
    if isinstance(given, str | bytes):
        raise TypeError(f"{name} must be a list, got the string {given!r}")
    if not isinstance(given, Iterable) or getattr(given, "shape", None) == ():
        raise TypeError(f"{name} must be a list, got {given!r:.100}")
    return list(given)


def options_of(given: Any) -> dict[str, Any]:
    """The options of fsspec, or none; raise TypeError for what has no names."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"options must be a dict for fsspec, got {given!r}")
    return dict(given)
