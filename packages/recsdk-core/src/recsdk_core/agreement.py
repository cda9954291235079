"""How ranks fail together: what a rank that failed tells, and what each rank raises."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

__all__ = ["attempt", "forget", "is_known", "known", "raise_together", "text_of"]

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

_KNOWN = "_recsdk_is_known"


def known(error: E, ranks: Collection[int] | None = None) -> E:
    """Marks an error as one of which these ranks know, and no others. None: all know."""
    error.__dict__[_KNOWN] = ranks  # not setattr, which its class may refuse
    return error


def is_known(
    error: BaseException, ranks: Collection[int] | None = None, *, unmarked: bool = False
) -> bool:
    """Whether an error is marked as one of which these ranks know; `unmarked` if it has no mark."""
    if _KNOWN not in error.__dict__:
        return unmarked
    knowing = error.__dict__[_KNOWN]
    return knowing is None or (ranks is not None and set(ranks) <= set(knowing))


def forget(error: BaseException) -> None:
    """Takes the mark off: the object may be raised again, for another reason."""
    error.__dict__.pop(_KNOWN, None)


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
    ranks: Sequence[int] | None = None,
) -> None:
    """Raises on every rank if one failed: its own error there, a peer's elsewhere.

    `error`: this rank's; `texts`: the text of each rank's error, None if it has none. `of_peer`
    makes the peer's error from the number and text of the first rank that failed; it is called on
    every rank. `ranks`: the numbers of these ranks. None: they are all.
    """
    numbers = range(len(texts)) if ranks is None else ranks
    pairs = zip(numbers, texts, strict=True)
    failed = [(rank, text) for rank, text in pairs if text is not None]
    if not failed:
        return
    told = of_peer(*failed[0])
    raised = told if error is None else error
    raise known(raised, ranks) if len(texts) > 1 else raised  # a single rank has told nobody
