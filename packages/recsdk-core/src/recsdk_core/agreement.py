"""Work that all ranks do, or none: what one that failed tells, and what each rank raises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["attempt", "raise_together", "text_of"]

T = TypeVar("T")


def attempt(call: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """What a call returns, or the error that it raises."""
    try:
        return call(), None
    except Exception as error:
        return None, error


def text_of(error: BaseException) -> str:
    """The error's type and text; only its type if it cannot say its text."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except Exception:
        return name


def raise_together(
    error: BaseException | None,
    texts: Sequence[str | None],
    of_peer: Callable[[int, str], BaseException],
) -> None:
    """Raises on every rank if one failed: there its own error, elsewhere that of a peer.

    `error`: this rank's; `texts`: of every rank what it says of its own, None if it has none.
    `of_peer` makes the error of the first rank that failed; it is called on every rank.
    """
    failed = [(rank, text) for rank, text in enumerate(texts) if text is not None]
    if not failed:
        return
    told = of_peer(*failed[0])
    raise told if error is None else error
