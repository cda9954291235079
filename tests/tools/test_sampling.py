from __future__ import annotations

import pytest

import sampling


@pytest.fixture(autouse=True)
def _own_tally(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "tally", sampling.Tally())
    monkeypatch.setattr(sampling, "IS_FULL", False)


def test_a_sample_keeps_order_and_repeats() -> None:
    first = sampling.sampled(range(1000), 20)
    assert first == sorted(set(first))
    assert len(first) == 20
    assert sampling.sampled(range(1000), 20) == first


def test_the_seed_chooses_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    first = sampling.sampled(range(1000), 20)
    monkeypatch.setattr(sampling, "SEED", sampling.SEED + 1)
    assert sampling.sampled(range(1000), 20) != first


def test_the_full_profile_takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "IS_FULL", True)
    assert sampling.sampled(range(50), 3) == list(range(50))


def test_few_cases_are_all_taken() -> None:
    assert sampling.sampled("ab", 5) == ["a", "b"]


def test_crossed_settings_have_each_value_about_equally_often() -> None:
    found = sampling.crossed("abc", range(4), [True, False], size=12)
    assert found == sampling.crossed("abc", range(4), [True, False], size=12)
    assert len(set(found)) == len(found) <= 12
    assert [set(column) for column in zip(*found, strict=True)] == [
        set("abc"),
        set(range(4)),
        {True, False},
    ]


def test_all_are_crossed_in_the_full_profile_and_where_they_are_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert sampling.crossed("ab", [1, 2], size=4) == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    monkeypatch.setattr(sampling, "IS_FULL", True)
    assert len(sampling.crossed("abc", range(4), [True, False], size=3)) == 24
    assert (sampling.tally.taken, sampling.tally.existing) == (28, 28)


def test_the_tally_counts_both() -> None:
    sampling.sampled(range(10), 4)
    sampling.sampled(range(3), 4)
    assert (sampling.tally.taken, sampling.tally.existing) == (7, 13)
