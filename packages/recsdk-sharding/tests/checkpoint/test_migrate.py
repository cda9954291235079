"""Rows of torchrec's tables enter hash tables by their ids, and leave them again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import migrate_on_ranks
import numpy as np
import pytest
import torch
from comparing import assert_identical
from rank_pool import RankPool
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard as TensorShard
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import Adam, PartialRowWiseAdam
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from worlds import EDGE_KEYS, Setup, merged, new_model, rows_of

from rank_templates import RankError
from recsdk_core import BusyError, CapacityError
from recsdk_sharding import (
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    Saver,
    export_rows,
    import_rows,
)
from sampling import crossed

IDS = np.array(EDGE_KEYS)
COLUMNS = {
    "user": ("column_wise", [(3, 1), (4, 0), (1, 1)]),
    "genre": ("column_wise", [(1, 0), (2, 1)]),
    "other": ("column_wise", [(5, 1)]),
}


def torchrec_state() -> dict[str, torch.Tensor]:
    """The state of torchrec's own tables, of as many rows as there are ids."""
    configs = [
        EmbeddingBagConfig(name=name, embedding_dim=dim, num_embeddings=len(IDS))
        for name, dim in (("user", 8), ("genre", 3))
    ]
    return dict(EmbeddingBagCollection(tables=configs).state_dict())


@pytest.mark.parametrize("world_size", [1, 3])
def test_there_and_back_over_ranks(ranks: RankPool, world_size: int) -> None:
    check_there_and_back(ranks, world_size, Setup())


@pytest.mark.parametrize("plan", [None, COLUMNS])
@pytest.mark.parametrize("world_size", [1, 2])
def test_there_and_back_in_device_memory(npus: RankPool, world_size: int, plan: Any) -> None:
    if plan is not None and world_size == 1:
        plan = {name: ("column_wise", [(w, 0) for w, _ in cut]) for name, (_, cut) in plan.items()}
    setup = Setup(torch.optim.Adagrad, device="npu", options={"num_rows": 400}, plan=plan)
    check_there_and_back(npus, world_size, setup)


def check_there_and_back(pool: RankPool, world_size: int, setup: Setup) -> None:
    state = {name: value.numpy() for name, value in torchrec_state().items()}
    ids = {"user": IDS, "genre": IDS[::-1].copy()}
    for found in pool.run(world_size, migrate_on_ranks.there_and_back, setup, state, ids):
        for name in ids:
            expected = state[f"embedding_bags.{name}.weight"]
            assert np.array_equal(found[f"{name}.weight"][:-1], expected)
            assert not found[f"{name}.weight"][-1].any()


OPTIMIZERS = (torch.optim.SGD, torch.optim.Adagrad, RowWiseAdagrad)
KINDS = ("row_wise", "table_wise", "column_wise")


@pytest.mark.parametrize(
    ("optimizer", "kind", "has_dtensors"), crossed(OPTIMIZERS, KINDS, (False, True), size=9)
)
def test_training_goes_on_from_torchrec_s_sharded_tables(
    ranks: RankPool, optimizer: type, kind: str, has_dtensors: bool
) -> None:
    arguments = {"lr": 0.2}
    run = (2, migrate_on_ranks.go_on_from_stock, optimizer, arguments, kind, has_dtensors)
    if optimizer is RowWiseAdagrad and kind == "column_wise":
        with pytest.raises(RankError, match=r"'sum' of RowwiseAdagrad, must .*got \(24,\)"):
            ranks.run(*run)
        return
    for found in ranks.run(*run):
        assert found["rates"] == [pytest.approx(0.03)] * 2
        for stock, own in found["outputs"]:
            np.testing.assert_allclose(own, stock, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("placement", [Replicate(), TensorShard(0), TensorShard(1)])
def test_dtensors_of_torch(ranks: RankPool, placement: Any) -> None:
    for found, expected in ranks.run(2, migrate_on_ranks.from_dtensors, [placement]):
        np.testing.assert_array_equal(found, expected)


def test_a_spread_tensor_is_not_taken_for_what_one_rank_has(ranks: RankPool) -> None:
    found = ranks.run(2, migrate_on_ranks.of_one_rank)
    for (text, num_rows), num_own in zip(found, (4, 3), strict=True):
        assert f"(7, 8) has {num_own * 8} numbers on the ranks of the model: call it on all" in text
        assert num_rows == 0


REFUSED = {
    "weight": (
        "CheckpointError: rank 1 failed",
        "TypeError: genre.weight must be a tensor of floa",
    ),
    "ids": ("CheckpointError: import_rows: ",) * 2,
    "rows": ("CapacityError: table 'user' is full: group",) * 2,
    "state": ("KeyError: \"optimizer state of table 'genre': Adagrad needs ['sum']",) * 2,
    "rate": ("ValueError: the learning rate of table 'genre' must be one",) * 2,
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_one_rank_refuses_changes_nothing_on_any(ranks: RankPool, what: str) -> None:
    found = ranks.run(2, migrate_on_ranks.refused, what)
    for (text, is_as_before), expected in zip(found, REFUSED[what], strict=True):
        assert text.startswith(expected)
        assert what != "state" or "pass that of the CombinedOptimizer" in text
        assert is_as_before


def test_training_goes_on_from_adam_of_torch() -> None:
    """Each batch has every id, so that an optimizer of all rows does what one of those met does."""
    stock, own = migrate_on_ranks.collections_on("cpu")
    apply_optimizer_in_backward(torch.optim.Adam, own.parameters(), {"lr": 0.1})
    dense = KeyedOptimizerWrapper(
        dict(stock.named_parameters()), lambda params: torch.optim.Adam(params, lr=0.03)
    )
    dense.save_param_groups(True)
    rows = torch.arange(migrate_on_ranks.NUM_STOCK_ROWS)
    batch = KeyedJaggedTensor(["u", "g"], rows.repeat(2), lengths=torch.ones_like(rows.repeat(2)))
    for step in range(10):
        if step == 5:
            ids = dict.fromkeys(("user", "genre"), migrate_on_ranks.raw_ids(rows))
            import_rows(own, stock.state_dict(), ids, dense.state_dict())
        dense.zero_grad()
        expected = stock(batch).values()
        expected.square().sum().backward()
        dense.step()
        if step >= 5:
            found = own(migrate_on_ranks.with_raw_ids(batch)).values()
            torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-6)
            found.square().sum().backward()
    assert [table.update_count for table in own.tables().values()] == [10, 10]


ADAM_STATE = {"user.momentum1": torch.ones(9, 8), "user.exp_avg_sq": torch.full((9, 8), 2.0)}


@pytest.mark.parametrize(
    ("optimizer", "second"),
    [(Adam, torch.full((9, 8), 2.0)), (PartialRowWiseAdam, torch.full((9,), 2.0))],
)
def test_state_of_torchrec_s_fused_kinds_of_adam(optimizer: type, second: torch.Tensor) -> None:
    """As torchrec names it; its kernels for the cpu have none of them."""
    model, ids = new_model(Setup(optimizer), "cpu"), {"user": torch.from_numpy(IDS)}
    weights = {"user.weight": torch.zeros(9, 8)}
    state: dict[str, Any] = {**ADAM_STATE, "user.exp_avg_sq": second}
    with pytest.raises(KeyError, match="optimizer state of table 'user': lacks 'step'"):
        import_rows(model, weights, ids, {"state": {"user.weight": state}})
    assert len(model.ebc.tables()["user"]) == 0
    import_rows(model, weights, ids, {"state": {"user.weight": {**state, "step": 7}}})
    table = model.ebc.tables()["user"]
    [batch] = table.export()
    assert (batch.state["exp_avg"] == 1).all()
    assert (batch.state["exp_avg_sq"] == 2).all()
    assert table.update_count == 7


def test_a_full_table_on_the_host_drops_no_row() -> None:
    model, keys = new_model(Setup(options={"max_rows": 8}), "cpu"), torch.from_numpy(IDS)
    weights = {"user.weight": torch.ones(9, 8)}
    with pytest.raises(CapacityError, match="'user' is full: it takes 8 rows .* would have 9"):
        import_rows(model, weights, {"user": keys})
    assert len(model.ebc.tables()["user"]) == 0


def test_an_import_waits_for_no_batch_in_flight() -> None:
    model, state, keys = new_model(Setup(), "cpu"), torchrec_state(), torch.from_numpy(IDS)
    with model.ebc.tables()["genre"].lease(step=1), pytest.raises(BusyError):
        import_rows(model, state, {"user": keys, "genre": keys})
    assert {len(table) for table in model.ebc.tables().values()} == {0}


def test_a_delta_has_what_came_into_device_memory(npus: RankPool, tmp_path: Path) -> None:
    setup = Setup(torch.optim.Adagrad, device="npu", options={"num_rows": 400})
    held = npus.run(2, migrate_on_ranks.import_between_saves, setup, str(tmp_path))
    model = new_model(setup, "cpu")
    Saver().load(model, tmp_path / "delta")
    assert_identical(rows_of(model.ebc.tables()), merged(held))


def test_more_rows_than_device_memory_has(npus: RankPool) -> None:
    setup = Setup(device="npu", options={"num_rows": 4})
    [found] = npus.run(1, migrate_on_ranks.import_too_many, setup)
    assert found["text"].startswith("table 'genre' is full: it takes 4 rows")
    assert found["lengths"] == {"user": 0, "genre": 0, "other": 0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_an_embedding_bag_of_torch(dtype: torch.dtype) -> None:
    bag = torch.nn.EmbeddingBag(len(IDS), 8, dtype=dtype)
    model, keys = new_model(Setup(), "cpu"), torch.from_numpy(IDS)
    import_rows(model, {"user.weight": bag.weight}, {"user": keys})
    table = model.ebc.tables()["user"]
    assert torch.equal(table.lookup(keys), bag.weight.detach().float())
    back = torch.nn.EmbeddingBag.from_pretrained(export_rows(model, {"user": keys})["user.weight"])
    assert torch.equal(back.weight, bag.weight.float())


def test_what_does_not_fit_is_named_and_changes_nothing() -> None:
    model, state, keys = new_model(Setup(), "cpu"), torchrec_state(), torch.from_numpy(IDS)
    cases: list[tuple[Any, Any, type[Exception], str]] = [
        (state, {"user": keys[:3]}, ValueError, r"must be a tensor of floats \(3, 8\)"),
        (state, {"user": keys.float()}, TypeError, "ids of 'user' must be int64"),
        (state, {"user": keys * 0}, ValueError, "ids of 'user' must not repeat, got 0 again"),
        (state, {"genre": keys, "item": keys}, KeyError, "no hash table 'item'"),
        (state, {"genre": keys, "other": keys}, KeyError, "must end in 'other.weight'"),
        ({**state, "x.user.weight": keys}, {"user": keys}, KeyError, "there are"),
    ]
    for entries, ids, kind, text in cases:
        with pytest.raises(kind, match=text):
            import_rows(model, entries, ids)
        assert {len(table) for table in model.ebc.tables().values()} == {0}
    with pytest.raises(KeyError, match="no hash table 'item'"):
        export_rows(model, {"item": keys})


@pytest.mark.parametrize("wrong", [None, 5, "x"])
def test_what_is_no_module_or_dict_is_named(wrong: Any) -> None:
    model = HashEmbeddingBagCollection(
        [HashEmbeddingBagConfig(name="user", embedding_dim=2, num_embeddings=4)]
    )
    state, ids = {"user.weight": torch.ones(3, 2)}, {"user": torch.arange(3)}
    with pytest.raises(TypeError, match="module must be a torch.nn.Module, got"):
        import_rows(wrong, state, ids)
    with pytest.raises(TypeError, match="module must be a torch.nn.Module, got"):
        Saver().save(wrong, "nowhere")
    with pytest.raises(TypeError, match="state_dict must be a dict by table, got"):
        import_rows(model, wrong, ids)
    with pytest.raises(TypeError, match="ids must be a dict by table, got"):
        import_rows(model, state, wrong)
    with pytest.raises(TypeError, match="ids of 'user' must be a torch.Tensor, got"):
        import_rows(model, state, {"user": wrong})
    assert len(model.tables()["user"]) == 0


def test_two_tables_of_one_name_are_not_mixed_up() -> None:
    config = {"name": "user", "embedding_dim": 2, "num_embeddings": 4}
    both = [HashEmbeddingBagCollection([HashEmbeddingBagConfig(**config)]) for _ in range(2)]
    with pytest.raises(ValueError, match="two tables of the model are named 'user'"):
        import_rows(
            torch.nn.ModuleList(both), {"user.weight": torch.ones(3, 2)}, {"user": torch.arange(3)}
        )
