"""What leaves a table on a device can be read as what leaves a table of the engine.

`test_policies` compares each row that leaves models over ranks, and the machine of `test_device`
random operations; here are rows that no batch has read, threads, and who ends it.
"""

from __future__ import annotations

import leaving_on_devices
import pytest
from rank_pool import RankPool

from recsdk_core import Default

DEFAULTS = {
    "zeros": Default.zeros(),
    "shared": Default.shared_rows(2),
    "begun": Default.shared_rows(2, begin_with="shared_row"),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_rows_of_batches_that_nobody_read(npus: RankPool, name: str) -> None:
    found = npus.run(1, leaving_on_devices.left_of_batches_that_nobody_read, DEFAULTS[name])
    assert found[0] > 100


def test_a_writer_waits_for_a_reader(npus: RankPool) -> None:
    [(keys, num_lost)] = npus.run(1, leaving_on_devices.read_on_another_thread)
    assert sorted(keys) == list(range(1900))
    assert num_lost == 0


def test_a_call_that_would_lose_some_changes_nothing(npus: RankPool) -> None:
    [said] = npus.run(1, leaving_on_devices.refusals)
    assert len(said) == 5
    assert all("the reader of leavers has room for 1 of max_rows 1" in text for text in said[:4])
    assert "somebody reads what leaves already" in said[4]


def test_it_outlives_the_table_and_its_optimizer(npus: RankPool) -> None:
    [found] = npus.run(1, leaving_on_devices.after_the_table)
    assert found == [[1], [3], [5], [4], []]


def test_an_export_ends_where_the_table_gets_another_optimizer(npus: RankPool) -> None:
    [told] = npus.run(1, leaving_on_devices.told_by_an_export_begun_before)
    assert "got another optimizer since this export began" in told


def test_a_reader_that_is_dropped_is_closed(npus: RankPool) -> None:
    assert npus.run(1, leaving_on_devices.row_of_a_reader_that_is_dropped) == [0]
