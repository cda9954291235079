"""What goes wrong on a device leaves its tables valid, and says the same as on the cpu."""

from __future__ import annotations

import device_failures
import numpy as np
import pytest
from comparing import assert_identical, assert_rows_close
from device_type import DEVICE_TYPE
from rank_pool import RankPool


@pytest.mark.parametrize("how", ["apply", "raise", "skip"])
def test_gradients_that_are_not_finite(npus: RankPool, how: str) -> None:
    (found,) = npus.run(1, device_failures.train_with_nan, how)
    on_cpu, on_npu = found["cpu"], found[DEVICE_TYPE]
    if how == "raise":
        assert on_npu["error"].startswith("NonFiniteError: table 'user': the gradient of")
        assert on_cpu["error"].startswith("NonFiniteError: table 'user': the gradient of")
    else:
        assert on_npu["error"] == on_cpu["error"] == ""
        assert on_npu["nonfinite"]["user"] > 0
    assert on_npu["nonfinite"] == on_cpu["nonfinite"]
    assert on_npu["update_count"] == on_cpu["update_count"] == (1 if how == "raise" else 2)
    num_nan = 0
    for key, (weight, state) in on_cpu["rows"]["user"].items():
        other, other_state = on_npu["rows"]["user"][key]
        np.testing.assert_allclose(other, weight, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(other_state["sum"], state["sum"], rtol=2e-5, atol=2e-5)
        num_nan += int(np.isnan(other).any())
    assert bool(num_nan) == (how == "apply")


def test_rows_of_a_batch_that_was_mapped_in_part_are_initial_rows(npus: RankPool) -> None:
    (found,) = npus.run(1, device_failures.map_half_of_a_batch)
    assert len(found[DEVICE_TYPE]["rows"]["first"]) == 5
    assert_identical(found[DEVICE_TYPE]["rows"], found["cpu"]["rows"])
    np.testing.assert_allclose(found[DEVICE_TYPE]["pooled"], found["cpu"]["pooled"], rtol=1e-6)


def test_rows_of_keys_that_were_erased_unread_are_others(npus: RankPool) -> None:
    ((found, expected),) = npus.run(1, device_failures.erase_before_they_are_read)
    assert_identical(found, expected)


@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_an_update_that_fails_changes_nothing(npus: RankPool, accumulate_steps: int) -> None:
    (result,) = npus.run(1, device_failures.fail_an_update, accumulate_steps)
    assert_identical(result["after"], result["before"])
    assert result["counts"][1] == result["counts"][0]
    assert result["before"]["user"]
    assert_identical(*result["trained"])


def test_rows_and_state_move_between_devices(npus: RankPool) -> None:
    (result,) = npus.run(1, device_failures.move_between_devices)
    for number, step in enumerate(result["steps"]):
        device = "cpu" if number in (0, 3) else f"{DEVICE_TYPE}:0"
        assert step["devices"] == {device}
        assert step["sizes"] == [0 if device == "cpu" else 401] * 3
        assert step["counts"] == [number + 1] * 3
        assert step["rate"] == 0.05
        assert_identical(step["moved"], step["before"])
        assert_rows_close(step["rows"], step["expected"])
    assert result["steps"][-1]["before"]["user"]


def test_what_cannot_move_says_so(npus: RankPool) -> None:
    (said,) = npus.run(1, device_failures.refuse_to_move)
    starts = [
        "BusyError: table 'user'",
        "ValueError: table 'user': rows in device memory are float32, and cannot become",
        f"ValueError: table 'user': a plan has put its rows on {DEVICE_TYPE}:0, so it cannot move "
        "to cpu",
    ]
    assert len(said) == len(starts)
    for text, start in zip(said, starts, strict=True):
        assert text.startswith(start), text


def test_rows_whose_gradient_waits_for_its_update_cannot_be_erased(npus: RankPool) -> None:
    (seen,) = npus.run(1, device_failures.erase_while_gradients_wait)
    assert seen == ["busy", "busy", "busy", "erased"]


def test_a_table_may_be_changed_while_it_is_exported(npus: RankPool) -> None:
    (on_npu,) = npus.run(1, device_failures.change_while_exporting, DEVICE_TYPE)
    (on_cpu,) = npus.run(1, device_failures.change_while_exporting, "cpu")
    assert on_npu["rest"] == on_cpu["rest"]
    assert_identical(on_npu["rows"], on_cpu["rows"])
    assert on_npu["rows"]["user"][-3][0].tolist() == on_npu["rows"]["user"][8][0].tolist()
