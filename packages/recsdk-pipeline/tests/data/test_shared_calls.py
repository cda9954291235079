"""Calls that threads make together are made once each."""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import Any

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


class Held:
    """What a call holds."""

    def release(self, is_begun: threading.Event) -> None:
        is_begun.set()


def test_who_waits_finds_let_go_what_calls_of_others_held(monkeypatch: pytest.MonkeyPatch) -> None:
    is_begun, may_go_on = threading.Event(), threading.Event()

    class Lingering(threading.Condition):
        """Others go on as soon as a helper has told them."""

        def __exit__(self, *given: Any) -> None:
            super().__exit__(*given)
            if threading.current_thread() is helper:
                assert may_go_on.wait(60)

    monkeypatch.setattr(threading, "Condition", Lingering)
    held = Held()
    shared = SharedCalls([partial(held.release, is_begun)])
    monkeypatch.undo()
    is_alive = weakref.ref(held)
    del held
    helper = threading.Thread(target=shared.help)
    helper.start()
    assert is_begun.wait(60)
    shared.finish()
    is_let_go = is_alive() is None
    may_go_on.set()
    helper.join(60)
    assert is_let_go
