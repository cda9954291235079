"""Checks of settings that hold for any value, such as arrays, whose comparison is one too."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection
from numbers import Real
from typing import Any

__all__ = [
    "check_switch",
    "check_text_or_none",
    "differs",
    "int_of",
    "is_finite",
    "is_one_of",
    "number_of",
]


def int_of(what: str, value: Any) -> int:
    """Any integer as Python's; TypeError for what is none, which True and False are not."""
    number = _index_of(value)
    if number is None:
        raise TypeError(f"{what} must be an int, got {value!r}")
    return number


def number_of(what: str, value: Any) -> float:
    """Any number as Python's int or float; TypeError for what is none, as True and False."""
    number = _index_of(value)
    if number is not None:
        return number
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{what} must be a number, got {value!r}")
    return float(value)


def _index_of(value: Any) -> int | None:
    try:
        is_bool = "bool" in str(getattr(value, "dtype", type(value).__name__))
        return None if is_bool else operator.index(value)
    except (TypeError, RuntimeError):  # torch raises the latter for a tensor without data
        return None


def check_switch(what: str, value: Any) -> None:
    """Raises TypeError for what is neither True nor False."""
    if not isinstance(value, bool):
        raise TypeError(f"{what} must be True or False, got {value!r:.100}")


def check_text_or_none(what: str, value: Any) -> None:
    """Raises TypeError for what is neither a string nor None."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{what} must be a string or None, got {value!r:.100}")


def differs(value: Any, default: Any) -> bool:
    """Whether a setting is another than its default, a plain value."""
    is_plain = value is None or isinstance(value, bool | int | float | str)
    return not is_plain or bool(value != default)


def is_finite(value: Any) -> bool:
    """Whether a real number is one as a float."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def is_one_of(value: Any, choices: Collection[str]) -> bool:
    """Whether it is a text among the choices."""
    return isinstance(value, str) and value in choices
