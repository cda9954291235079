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


def test_the_tally_counts_both() -> None:
    sampling.sampled(range(10), 4)
    sampling.sampled(range(3), 4)
    assert (sampling.tally.taken, sampling.tally.existing) == (7, 13)
