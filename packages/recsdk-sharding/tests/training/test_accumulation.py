"""Gradients of several backwards, applied as one update, equal one large batch."""

from __future__ import annotations

from typing import Any

import on_ranks
import pytest
import torch
from accumulating import ACCUMULATE, CLASSES, STEPS, assert_equals_large_batches, every_optimizer
from comparing import assert_rows_close
from rank_pool import RankPool
from worlds import Setup, make_batch, new_model, rows_of

from recsdk_sharding import AccumulateSGD


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("weighted", [False, True])
def test_accumulating_classes_equal_large_batches(
    ranks: RankPool, name: str, weighted: bool
) -> None:
    accumulating, plain, arguments = CLASSES[name]
    small = Setup(accumulating, {**arguments, **ACCUMULATE}, weighted=weighted)
    assert_equals_large_batches(ranks, [(small, Setup(plain, arguments, weighted=weighted))])


@pytest.mark.parametrize("is_sequence", [False, True])
def test_every_optimizer_accumulates_by_the_config(ranks: RankPool, is_sequence: bool) -> None:
    assert_equals_large_batches(
        ranks, every_optimizer(Setup(is_sequence=is_sequence), is_odd=is_sequence)
    )


def test_without_use_accumulate_each_backward_is_an_update(ranks: RankPool) -> None:
    setup = Setup(AccumulateSGD, {"lr": 0.1, "accumulate_step": STEPS})
    (result,) = ranks.run(1, on_ranks.train_sums, setup, 2, 1)
    assert result["counts"] == [{1}, {2}]


def test_rows_are_seen_and_state_is_loaded_once_their_update_is_done() -> None:
    setup = Setup(AccumulateSGD, {"lr": 0.1, **ACCUMULATE})
    model = new_model(setup, "cpu")
    empty = model.ebc.state_dict()
    lengths = []
    for seed in range(STEPS):
        model(make_batch(seed, 6))[0].backward()
        lengths.append(len(model.ebc.tables()["user"]))
    assert lengths[:-1] == [0] * (STEPS - 1)
    assert lengths[-1] > 0
    model(make_batch(9, 6))[0].backward()
    model.ebc.load_state_dict(empty)  # what was accumulated is dropped
    assert rows_of(model.ebc.tables()) == {name: {} for name in model.ebc.tables()}


def test_a_gradient_may_be_reused_while_it_waits_for_its_update() -> None:
    arguments = {"lr": 0.1, "use_accumulate": True, "accumulate_step": 2}
    trained = []
    for reuses in (False, True):
        model = new_model(Setup(AccumulateSGD, arguments), "cpu")
        grad = torch.empty(0)
        for step in (1.0, 2.0):
            values = model.ebc(make_batch(0, 6).sparse).values()
            grad = grad.fill_(step) if reuses and len(grad) else torch.full_like(values, step)
            values.backward(grad)
        trained.append(rows_of(model.ebc.tables()))
    assert trained[0]["user"]
    assert_rows_close(*trained)


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (1.5, TypeError), (True, TypeError)])
def test_bad_numbers_of_steps_are_named(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="accumulate_step"):
        new_model(Setup(AccumulateSGD, {"lr": 0.1, "accumulate_step": value}), "cpu")


def test_two_numbers_of_steps_are_refused() -> None:
    setup = Setup(AccumulateSGD, {"lr": 0.1, **ACCUMULATE}, options={"accumulate_steps": STEPS + 1})
    text = f"table 'user': its config has accumulate_steps={STEPS + 1}, its optimizer .*={STEPS}"
    with pytest.raises(ValueError, match=text):
        new_model(setup, "cpu").ebc.tables()
