"""Checks of configuration values, with messages that name the field."""

from __future__ import annotations

import math
import operator
from dataclasses import fields
from numbers import Real
from typing import Any

__all__ = [
    "int_if_given",
    "int_of",
    "int_within",
    "is_int",
    "keep_plain_numbers",
    "require_above_0",
    "require_at_least",
    "require_bool",
    "require_callable",
    "require_finite",
    "require_float32",
    "require_name",
    "require_table_name",
    "require_number",
    "require_one_of",
    "require_open_unit",
]

_MOST_CHARACTERS = 990
"""Of a table's name; checkpoints take 1024, with what they add."""
_INFINITE_AS_FLOAT32 = 2.0**128 - 2.0**103
"""What is closer to 2**128 than to the largest float32."""
_ZERO_AS_FLOAT32 = 2.0**-150
"""What is no further from 0 than from the least float32 above it."""


def keep_plain_numbers(config: Any) -> None:
    """Has a frozen dataclass hold Python's own numbers, which JSON has, and no lists."""
    for field in fields(config):
        object.__setattr__(config, field.name, _plain(getattr(config, field.name)))


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    if value is None or type(value) in (bool, int, float, str):
        return value
    number = _index_of(value)
    if number is not None or not isinstance(value, Real):
        return value if number is None else number
    try:
        return float(value)
    except OverflowError:
        return value  # the check of its field says so


def require_number(owner: str, **fields: float) -> None:
    """Raises TypeError for the first field that is no number, ValueError for one beyond floats.

    True and False are no numbers: they stand for a setting that was mixed up.
    """
    for name, value in fields.items():
        _check_number(f"{owner}: {name}", value)


def _check_number(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        float(value)
    except OverflowError:
        raise ValueError(f"{name} is too large for a float") from None


def require_bool(owner: str, **fields: object) -> None:
    """Raises TypeError for the first field that is neither True nor False."""
    for name, value in fields.items():
        if not isinstance(value, bool):
            raise TypeError(f"{owner}: {name} must be True or False, got {value!r}")


def require_callable(owner: str, **fields: object) -> None:
    """Raises TypeError for the first field that is neither None nor callable."""
    for name, value in fields.items():
        if value is not None and not callable(value):
            raise TypeError(f"{owner}: {name} must be callable, got {type(value).__name__}")


def require_finite(owner: str, **fields: float) -> None:
    """As `require_number`; raises ValueError for the first field that is infinite or NaN."""
    require_number(owner, **fields)
    for name, value in fields.items():
        if not math.isfinite(value):
            raise ValueError(f"{owner}: {name} must be finite, got {value}")


def require_float32(owner: str, **fields: float) -> None:
    """As `require_finite`; raises ValueError for the first field that float32 cannot hold."""
    require_finite(owner, **fields)
    for name, value in fields.items():
        if abs(float(value)) >= _INFINITE_AS_FLOAT32:
            raise ValueError(f"{owner}: {name} must be finite in single precision, got {value}")


def require_at_least(owner: str, minimum: float, **fields: float) -> None:
    """Raises ValueError for the first field that is below `minimum` or not finite."""
    require_finite(owner, **fields)
    for name, value in fields.items():
        if value < minimum:
            raise ValueError(f"{owner}: {name} must be at least {minimum:g}, got {value}")


def require_above_0(owner: str, **fields: float) -> None:
    """As `require_float32`; raises ValueError for the first field that is not above 0 there."""
    require_float32(owner, **fields)
    for name, value in fields.items():
        if value <= _ZERO_AS_FLOAT32:
            in_what = " in single precision" if value > 0 else ""
            raise ValueError(f"{owner}: {name} must be above 0{in_what}, got {value}")


def require_open_unit(owner: str, **fields: float) -> None:
    """As `require_number`; raises ValueError for the first field outside [0, 1)."""
    require_number(owner, **fields)
    for name, value in fields.items():
        if not 0.0 <= value < 1.0:
            raise ValueError(f"{owner}: {name} must be in [0, 1), got {value}")


def is_int(value: object) -> bool:
    """Whether it is an integer, such as one of numpy; True and False are none."""
    return _index_of(value) is not None


def int_of(owner: str, **argument: object) -> int:
    """One argument as Python's int; TypeError, which names it, for what is no integer, or bool."""
    ((name, value),) = argument.items()
    number = _index_of(value)
    if number is None:
        raise TypeError(f"{owner}: {name} must be an int, got {value!r}")
    return number


def _index_of(value: Any) -> int | None:
    """Any integer as Python's, such as one of numpy, or an array of one; None for all else."""
    is_bool = isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))
    try:
        return None if is_bool else operator.index(value)
    except (TypeError, RuntimeError):  # torch raises the latter for a tensor without data
        return None


def int_within(owner: str, low: int, high: int | None = None, **argument: object) -> int:
    """As `int_of`; raises ValueError for one outside [low, high)."""
    ((name, value),) = argument.items()
    if type(value) is int and low <= value and (high is None or value < high):
        return value  # nearly always, in calls of each step
    number = int_of(owner, **argument)
    if number < low:
        raise ValueError(f"{owner}: {name} must be at least {low}, got {number}")
    if high is not None and number >= high:
        raise ValueError(f"{owner}: {name} must be at most {high - 1}, got {number}")
    return number


def int_if_given(owner: str, low: int, high: int | None = None, **argument: object) -> int | None:
    """As `int_within`; None stays None."""
    ((_, value),) = argument.items()
    return None if value is None else int_within(owner, low, high, **argument)


def require_name(owner: str, name: str) -> None:
    """Raises ValueError for a name that is no string, is empty, or that UTF-8 cannot write."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"{owner}: name must be a string that is not empty, got {name!r}")
    if any("\ud800" <= character <= "\udfff" for character in name):
        raise ValueError(f"{owner}: name must have characters of UTF-8 only, got {name!r}")


def require_table_name(owner: str, name: str) -> None:
    """Raises ValueError for what can be no name of a table."""
    require_name(owner, name)
    if len(name) > _MOST_CHARACTERS:
        raise ValueError(
            f"{owner}: name must have at most {_MOST_CHARACTERS} characters, got {len(name)}: a "
            "checkpoint could not hold it"
        )


def require_one_of(owner: str, choices: tuple[str, ...], **fields: str) -> None:
    """Raises ValueError for the first field that is none of the choices."""
    for name, value in fields.items():
        if not isinstance(value, str) or value not in choices:
            names = " or ".join(repr(choice) for choice in choices)
            raise ValueError(f"{owner}: {name} must be {names}, got {value!r}")
