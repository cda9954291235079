"""Checks of arguments, with messages that name them. Imports neither torch nor pyarrow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any

__all__ = [
    "check_at_least",
    "check_not_negative",
    "check_switch",
    "check_text",
    "check_whole",
    "list_of",
    "options_of",
]


def check_whole(name: str, given: Any) -> None:
    """Raise TypeError for what is no int, which True and False are not."""
    if isinstance(given, bool) or not isinstance(given, Integral):
        raise TypeError(f"{name} must be an int, got {given!r}")


def check_at_least(name: str, given: Any, least: int) -> None:
    """As `check_whole`; raise ValueError for less."""
    check_whole(name, given)
    if given < least:
        raise ValueError(f"{name} is {given}; it must be at least {least}")


def check_not_negative(name: str, given: Any) -> None:
    """As `check_whole`; raise ValueError for less than 0."""
    check_whole(name, given)
    if given < 0:
        raise ValueError(f"{name} is {given}; it must not be negative")


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
        raise TypeError(f"{name} is the string {given!r}; pass a list")
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
