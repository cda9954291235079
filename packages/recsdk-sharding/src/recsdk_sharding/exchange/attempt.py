"""Calls whose failure is told to other ranks before it is raised."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

__all__ = ["attempt", "message_of", "text_of"]

T = TypeVar("T")

_MAX_MESSAGE_BYTES = 4096


def attempt(call: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """What a call returns, or the error that it raises."""
    try:
        return call(), None
    except Exception as error:
        return None, error


def message_of(text: str) -> bytes:
    """A text as it is sent."""
    return text.encode(errors="backslashreplace")[:_MAX_MESSAGE_BYTES]


def text_of(error: BaseException) -> str:
    """The error's type and text; only its type if it cannot say its text."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except Exception:
        return name
