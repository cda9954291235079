"""What is raised on each rank if one failed."""

from __future__ import annotations

import pytest

from recsdk_core.agreement import attempt, raise_together, text_of


class Mute(Exception):
    """Cannot say what is wrong."""

    def __str__(self) -> str:
        raise AttributeError("no text today")


def told(rank: int, text: str) -> LookupError:
    return LookupError(f"{rank} {text}")


def test_a_result_or_an_error() -> None:
    assert attempt(lambda: 3) == (3, None)
    result, error = attempt(lambda: 1 // 0)
    assert result is None
    assert isinstance(error, ZeroDivisionError)


def test_an_interruption_is_no_error_of_a_rank() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attempt(interrupt)


def test_the_text_of_an_error() -> None:
    assert text_of(ValueError("no")) == "ValueError: no"
    assert text_of(Mute()) == "Mute"


def test_nothing_is_raised_if_all_are_well() -> None:
    raise_together(None, [None, None], told)


def test_the_first_that_failed_is_told_where_none_failed() -> None:
    with pytest.raises(LookupError, match="^1 a$"):
        raise_together(None, [None, "a", "b"], told)


def test_a_rank_that_failed_raises_its_own_error() -> None:
    with pytest.raises(ValueError, match="own"):
        raise_together(ValueError("own"), ["a", "own"], told)
