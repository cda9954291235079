"""Calls that threads make together are made once each."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsdk_pipeline._internal.shared_calls import SharedCalls


@given(st.integers(0, 20), st.integers(1, 4), st.none() | st.integers(0, 19))
@settings(deadline=None)
def test_each_is_made_once_or_the_first_error_is_raised(
    num: int, num_threads: int, failing: int | None
) -> None:
    made: list[int] = []

    def call(number: int) -> None:
        made.append(number)
        if number == failing:
            raise KeyError(number)

    shared = SharedCalls([lambda number=n: call(number) for n in range(num)])  # type: ignore[misc]
    helpers = [threading.Thread(target=shared.help) for _ in range(num_threads - 1)]
    for each in helpers:
        each.start()
    if failing is not None and failing < num:
        with pytest.raises(KeyError, match=str(failing)):
            shared.finish()
        assert failing in made
    else:
        shared.finish()
        assert sorted(made) == list(range(num))
    before = list(made)
    assert len(set(before)) == len(before)
    for each in helpers:
        each.join(60)
    assert made == before  # `finish` waited for all that were begun


def test_calls_that_others_have_begun_are_waited_for() -> None:
    is_begun, may_end = threading.Event(), threading.Event()
    made: list[str] = []

    def slow() -> None:
        is_begun.set()
        assert may_end.wait(60)
        made.append("slow")

    shared = SharedCalls([slow, lambda: may_end.set()])
    helper = threading.Thread(target=shared.help)
    helper.start()
    assert is_begun.wait(60)
    shared.finish()
    assert made == ["slow"]
    helper.join(60)
