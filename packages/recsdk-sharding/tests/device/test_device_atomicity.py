"""A call on a table in device memory that fails changes nothing, whichever operator fails in it."""

from __future__ import annotations

import os
from dataclasses import replace

import operator_failures
import pytest
from device_type import IS_CUDA, on_npus_alone
from rank_pool import RankPool

from optimizer_cases import PLAIN
from recsdk_core import optim
from recsdk_sharding.device.writes import Writes

IS_FULL = os.environ.get("RECSDK_TEST_PROFILE") == "full"
FORMS = PLAIN if IS_FULL else {n: o for n, o in PLAIN.items() if " " not in n}
CASES = {
    **FORMS,
    "clipped, catching up": replace(
        PLAIN["adamw"], clip_value=0.75, clip_norm=1.5, weight_decay=0.4, catch_up=True
    ),
}
ADAM = optim.Adam(lr=0.02)
LEAST_BEFORE = 1 if IS_CUDA else 11
"""Operators before the first write of an update; a kernel makes most of it at once."""


def test_an_update_is_done_or_not_whichever_operator_fails(npus: RankPool) -> None:
    (found,) = npus.run(1, operator_failures.fail_updates, CASES)
    assert set(found) == set(CASES)
    for name, counts in found.items():
        assert counts["before"] >= LEAST_BEFORE, name
        if not IS_CUDA:  # beside the rows: the fields of state, what is to save, the spare row
            assert counts["after"] == counts["fields"] + 2, name


@on_npus_alone  # where torch's operators make the update
def test_what_an_update_could_not_write_is_written_before_rows_are_read(npus: RankPool) -> None:
    (said,) = npus.run(1, operator_failures.fail_twice, ADAM)
    assert said == ["failed in index_copy_", "read"]


def test_new_rows_are_initial_rows_whichever_operator_fails(npus: RankPool) -> None:
    assert npus.run(1, operator_failures.fail_forwards, ADAM)[0] > 20


def test_an_upsert_is_done_or_not_whichever_operator_fails(npus: RankPool) -> None:
    (counts,) = npus.run(1, operator_failures.fail_upserts, ADAM)
    assert counts["before"] >= 4
    assert counts["after"] >= 5


def test_an_upsert_that_does_not_fit_changes_nothing(npus: RankPool) -> None:
    (said,) = npus.run(1, operator_failures.refuse_upserts, ADAM)
    starts = [
        "CapacityError: table 'a' is full: it takes 2000 rows on this rank; raise num_embeddings",
        "ValueError: table 'a': values must have shape (2, 3), got (2, 1)",
        "ValueError: table 'a': values must have shape (2, 3), got (3, 3)",
        "TypeError: table 'a': values must be float32, got float64",
        "ValueError: table 'a': state must have the fields ['exp_avg', 'exp_avg_sq'], got",
    ]
    assert len(said) == len(starts)
    for text, start in zip(said, starts, strict=True):
        assert text.startswith(start), text


def test_rows_of_all_shards_are_replaced_or_none_whichever_operator_fails(npus: RankPool) -> None:
    (counts,) = npus.run(1, operator_failures.fail_replacements, ADAM)
    assert counts["before"] > 20
    assert counts["after"] >= 1


def test_rows_that_one_shard_refuses_change_no_other(npus: RankPool) -> None:
    (said,) = npus.run(1, operator_failures.refuse_replacements, ADAM)
    assert "key 9 comes twice" in said


class Journal:
    """Writes that are noted, of which some fail."""

    def __init__(self, *failing: int) -> None:
        self.done: list[int] = []
        self._failing = list(failing)

    def write(self, number: int) -> None:
        if number in self._failing:
            self._failing.remove(number)
            raise MemoryError(number)
        self.done.append(number)


@pytest.mark.parametrize("has_begun", [False, True])
def test_the_first_write_decides(has_begun: bool) -> None:
    journal, writes = Journal(0), Writes()
    calls = [lambda n=n: journal.write(n) for n in range(3)]
    if has_begun:
        writes.commit(calls, has_begun=True)
        assert journal.done == []
    else:
        with pytest.raises(MemoryError):
            writes.commit(calls)
    writes.finish()
    assert journal.done == ([0, 1, 2] if has_begun else [])


def test_later_writes_are_left_until_they_go_well() -> None:
    journal, writes = Journal(1, 1), Writes()
    writes.commit([lambda n=n: journal.write(n) for n in range(3)])
    assert journal.done == [0]
    with pytest.raises(MemoryError):
        writes.finish()
    writes.commit([lambda: journal.write(3)])
    assert journal.done == [0, 1, 2, 3]


def test_an_interruption_is_a_failure_to_write() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    journal, writes = Journal(), Writes()
    calls = [lambda: journal.write(0), interrupt, lambda: journal.write(2)]
    with pytest.raises(KeyboardInterrupt):
        writes.commit(calls)
    with pytest.raises(KeyboardInterrupt):
        writes.finish()
    assert journal.done == [0]
