"""Checks of settings that hold for any value, such as arrays, whose comparison is one too."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

__all__ = ["differs", "is_finite", "is_one_of"]


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
