"""The optimizer may be applied before or after whatever else is done with a model: same bits."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import orders_on_ranks
import pytest
import torch
from comparing import assert_identical
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rank_pool import RankPool
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from worlds import Model, Setup, make_batch, rows_of, tables

from recsdk_core import BusyError, CheckpointError, Table, optim
from recsdk_sharding import RowOptimizer, Saver

CATCHING_UP = optim.Adam(lr=0.02, weight_decay=0.1, weight_decay_mode="decoupled", catch_up=True)
SETUPS = {
    "adagrad": Setup(torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.25}),
    "adam": Setup(torch.optim.Adam, {"lr": 0.02}),
    "rowwise": Setup(RowWiseAdagrad, {"lr": 0.05}),
    "sgd": Setup(torch.optim.SGD, {"lr": 0.05}),
    "catching_up": Setup(RowOptimizer, {"settings": CATCHING_UP}),
}
CALLS = [
    "state_dict",
    "tables",
    "import_rows",
    "load_state_dict",
    "evaluate",
    "train_frozen",
    "save",
    "deepcopy",
    "pickle",
]


def check(pool: RankPool, setup: Setup, before: list[str], after: list[str], size: int) -> None:
    """`size`: ranks over which the model is sharded in the end; 0: it is not."""
    run = orders_on_ranks.after_calls
    found = pool.run(size or 1, run, setup, [*before, "apply", *after], size > 0)
    expected = pool.run(size or 1, run, setup, ["apply", *before, *after], size > 0)
    assert_identical(found, expected)


orders = st.lists(st.sampled_from(CALLS), max_size=5)
# Half of what the profile has: each is two models.
half = settings(max_examples=settings().max_examples // 2)


@given(st.sampled_from(sorted(SETUPS)), orders, orders, st.sampled_from([0, 1, 2]))
@example("adagrad", ["state_dict"], [], 1)
@example("adagrad", ["tables", "evaluate"], [], 0)
@example("adam", ["import_rows"], ["evaluate"], 0)
@example("rowwise", ["import_rows", "deepcopy"], [], 2)
@example("catching_up", ["load_state_dict", "import_rows", "pickle"], ["state_dict"], 2)
@half
def test_the_optimizer_may_be_applied_at_any_time(
    ranks: RankPool, name: str, before: list[str], after: list[str], size: int
) -> None:
    check(ranks, SETUPS[name], before, after, size)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_do_not_look_a_sharded_collection_up_again(
    ranks: RankPool, use_reentrant: bool
) -> None:
    for said, updates in ranks.run(
        2, orders_on_ranks.inside_of_a_checkpoint, SETUPS["sgd"], use_reentrant
    ):
        assert "call the collection outside of the checkpoint" in said
        assert updates == 1


def test_tables_that_train_are_looked_at_again(ranks: RankPool) -> None:
    found = ranks.run(1, orders_on_ranks.changed_while_in_use, SETUPS["adagrad"])[0]
    assert "are frozen" in found["one frozen"]
    assert found["all frozen"] == 2
    assert found["trained again"] == 3
    assert "called more than once" in found["second optimizer"]


@given(st.sampled_from(["adagrad", "adam"]), orders, orders, st.sampled_from([0, 2]))
@example("adagrad", ["state_dict"], [], 2)
@example("adam", ["load_state_dict", "import_rows", "pickle"], ["evaluate"], 0)
@half
def test_the_optimizer_may_be_applied_at_any_time_on_npus(
    npus: RankPool, name: str, before: list[str], after: list[str], size: int
) -> None:
    room = {"num_rows": 300}
    setup = replace(SETUPS[name], device="npu", options=room)
    check(npus, setup, before, after, size)


def model_of(**options: Any) -> Model:
    return Model(tables(**options), torch.device("cpu"))


def apply_adagrad(model: Model) -> None:
    apply_optimizer_in_backward(torch.optim.Adagrad, model.ebc.parameters(), {"lr": 0.1})


def test_a_checkpoint_loaded_before_the_optimizer_is_not_trained_without_its_state(
    tmp_path: Any,
) -> None:
    trained = model_of()
    apply_adagrad(trained)
    trained(make_batch(0, 4))[0].backward()
    Saver().save(trained, tmp_path / "saved")
    model = model_of()
    Saver().load(model, tmp_path / "saved")
    apply_adagrad(model)
    with pytest.raises(RuntimeError, match="'user'.*before its optimizer was applied"):
        model(make_batch(1, 4))


def test_a_table_without_an_optimizer_is_not_trained_in_evaluation_either() -> None:
    model = model_of()
    model.ebc.requires_grad_(False)
    model(make_batch(0, 4))
    model.ebc.requires_grad_(True)
    model.eval()
    before = [batch.weights for batch in model.ebc.tables()["user"].export()]
    model(make_batch(0, 4))[0].backward()
    after = [batch.weights for batch in model.ebc.tables()["user"].export()]
    assert len(before) == 1
    assert_identical(after, before)
    assert model.ebc.tables()["user"].update_count == 0


def test_set_optimizer_keeps_rows_and_waits_for_no_batch() -> None:
    table = Table(2, optimizer=optim.SGD(lr=0.1))
    keys = torch.tensor([5, -1, 7])
    rows = table.find_or_insert(keys)
    table.apply_gradients(keys, torch.ones(3, 2))
    table.erase(keys[1:2])
    rows = table.lookup(keys)
    lease = table.lease()
    with pytest.raises(BusyError, match="optimizer cannot be set"):
        table.set_optimizer(optim.Adagrad(lr=0.5, initial_accumulator_value=0.25))
    assert table.state_fields == ()
    lease.release()
    table.set_optimizer(optim.Adagrad(lr=0.5, initial_accumulator_value=0.25))
    assert torch.equal(table.lookup(keys), rows)
    assert (table.update_count, table.learning_rate, len(table)) == (1, 0.5, 2)
    [batch] = table.export()
    assert batch.state["sum"].tolist() == [[0.25, 0.25]] * 2


def state_after_training(optimizer: Any = torch.optim.Adagrad) -> tuple[Model, dict[str, Any]]:
    model = model_of()
    apply_optimizer_in_backward(optimizer, model.ebc.parameters(), {"lr": 0.1})
    model(make_batch(0, 4))[0].backward()
    return model, model.state_dict()


def load_frozen(model: Model, folder: Any) -> None:
    _, state = state_after_training()
    model.ebc.requires_grad_(False)
    model.load_state_dict(state)
    model.ebc.requires_grad_(True)


def load_by_saver(model: Model, folder: Any) -> None:
    trained, _ = state_after_training()
    Saver().save(trained, folder / "before")
    Saver().load(model, folder / "before")


def load_of_another_optimizer(model: Model, folder: Any) -> None:
    _, state = state_after_training(torch.optim.Adam)
    model.load_state_dict(state)


@pytest.mark.parametrize("lose", [load_frozen, load_by_saver, load_of_another_optimizer])
@pytest.mark.parametrize("by_saver", [False, True])
@pytest.mark.parametrize("is_met", [False, True])
def test_state_that_is_lost_can_be_loaded_again(
    tmp_path: Any, lose: Any, by_saver: bool, is_met: bool
) -> None:
    trained, state = state_after_training()
    Saver().save(trained, tmp_path / "saved")
    model = model_of()
    lose(model, tmp_path)
    apply_adagrad(model)
    if is_met:
        with pytest.raises(RuntimeError, match="'user' was loaded before its.*load it again"):
            model(make_batch(1, 4))
    with pytest.raises(RuntimeError, match="before its optimizer was applied"):
        Saver().save(model, tmp_path / "other")
    with pytest.raises(CheckpointError):
        Saver().load(model, tmp_path / "missing")
    model.load_state_dict({}, strict=False)
    with pytest.raises(RuntimeError, match="before its optimizer was applied"):
        model.state_dict()
    if by_saver:
        Saver().load(model, tmp_path / "saved")
    else:
        model.load_state_dict(state)
    for each in (model, trained):
        each(make_batch(1, 4))[0].backward()
    assert_identical(rows_of(model.ebc.tables()), rows_of(trained.ebc.tables()))


def test_a_second_optimizer_is_refused_after_the_first_has_trained() -> None:
    model, _ = state_after_training()
    apply_optimizer_in_backward(torch.optim.Adam, model.ebc.parameters(), {"lr": 0.1})
    with pytest.raises(ValueError, match=r"'user'.*more than once: \['Adagrad', 'Adam'\]"):
        model(make_batch(1, 4))


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_of_a_model_and_its_optimizer_belong_together(copy_of: Any) -> None:
    model, _ = state_after_training()
    copied, optimizer = copy_of((model.ebc, torch.optim.SGD(model.ebc.parameters(), lr=0.1)))
    [group] = optimizer.param_groups
    assert all(a is b for a, b in zip(copied.parameters(), group["params"], strict=True))
    with pytest.raises(ValueError, match="cannot set its rows"):
        torch.nn.init.kaiming_normal_(group["params"][0])
