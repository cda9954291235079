"""State leaves and enters by key: any number of ranks reads what any number of ranks wrote."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import numpy as np
import on_ranks
import pytest
import torch
from comparing import assert_identical
from loads_on_ranks import Settings, load_before_the_optimizer
from rank_pool import RankPool
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from worlds import Model, Setup, make_batch, merged, new_model, rows_of, tables, weights_of

from recsdk_core import Admit, Default, Evict, optim
from recsdk_sharding import RowOptimizer

ADAM = Setup(torch.optim.Adam, {"lr": 0.02})
SIZES = [[3, 1, 2, 4], [2, 2, 0, 3]]


def saved(ranks: RankPool, setup: Setup, world_size: int) -> tuple[dict[str, Any], Any]:
    sizes = [row[:world_size] for row in SIZES]
    results = ranks.run(world_size, on_ranks.save, setup, sizes)
    state: dict[str, Any] = {}
    for result in results:
        state.update(result["state"])
    return state, merged([result["rows"] for result in results])


@pytest.mark.parametrize(("writers", "readers"), [(4, 2), (2, 4), (2, 1), (1, 4)])
def test_state_moves_between_world_sizes(ranks: RankPool, writers: int, readers: int) -> None:
    state, rows = saved(ranks, ADAM, writers)
    results = ranks.run(readers, on_ranks.load, ADAM, state)
    assert_identical(merged([result["rows"] for result in results]), rows)
    for result in results:
        assert result["problems"] == []
        assert set(result["counts"].values()) == {len(SIZES)}
        assert_identical(result["dense"], results[0]["dense"])


def test_entries_are_named_per_rank(ranks: RankPool) -> None:
    state, rows = saved(ranks, ADAM, 2)
    names = {name for name in state if "embedding_bags" in name}
    fields = [
        "keys",
        "weight",
        "state.exp_avg",
        "state.exp_avg_sq",
        "update_count",
        "seed",
        "ranks",
    ]
    assert names == {
        f"ebc.embedding_bags.{table}.rank_{rank}.{field}"
        for table in rows
        for rank in range(2)
        for field in fields
    }
    assert state["ebc.embedding_bags.user.rank_0.keys"].dtype == np.int64


def test_decay_that_is_to_be_caught_up_moves_along(ranks: RankPool) -> None:
    settings = optim.AdamW(lr=0.1, weight_decay=0.5, catch_up=True)
    setup = Setup(RowOptimizer, {"settings": settings})
    state, _ = saved(ranks, setup, 2)
    start = "ebc.embedding_bags.user.rank_"
    assert state[f"{start}0.log_decay"] == state[f"{start}1.log_decay"] < 0
    model = new_model(setup, "cpu")
    tensors = {name: torch.from_numpy(np.asarray(value)) for name, value in state.items()}
    model.load_state_dict(tensors)
    assert model.ebc.tables()["user"].log_decay == state[f"{start}0.log_decay"]
    with pytest.raises(RuntimeError, match="log_decay must be finite and 0 or less, got 1"):
        model.load_state_dict({**tensors, f"{start}0.log_decay": torch.tensor(1.0)})


@pytest.mark.parametrize("data_type", [DataType.BF16, DataType.FP16])
def test_rows_of_16_bits_move_as_they_are(data_type: DataType) -> None:
    setup = Setup(torch.optim.Adam, {"lr": 0.02}, options={"data_type": data_type})
    model, other = trained(setup), new_model(setup, "cpu")
    state = model.state_dict()
    weight = state["ebc.embedding_bags.user.rank_0.weight"]
    assert weight.dtype == getattr(torch, model.ebc.tables()["user"].dtype) != torch.float32
    other.load_state_dict(state)
    for one in (model, other):
        one(make_batch(3, 6))[0].backward()
    assert_identical(rows_of(other.ebc.tables()), rows_of(model.ebc.tables()))
    wide = new_model(ADAM, "cpu")
    wide.load_state_dict(state)
    found = wide.state_dict()["ebc.embedding_bags.user.rank_0.weight"]
    torch.testing.assert_close(found, weight.float(), rtol=0, atol=0)


def test_an_unsharded_module_loads_what_ranks_saved(ranks: RankPool) -> None:
    state, rows = saved(ranks, ADAM, 2)
    model = new_model(ADAM, "cpu")
    tensors = {name: torch.from_numpy(np.asarray(value)) for name, value in state.items()}
    model.load_state_dict(tensors)
    assert_identical(rows_of(model.ebc.tables()), rows)


def test_the_rank_rule_may_change(ranks: RankPool) -> None:
    state, rows = saved(ranks, ADAM, 2)
    modulo = Setup(ADAM.optimizer, ADAM.arguments, rank_rule="modulo")
    parts = [result["rows"] for result in ranks.run(2, on_ranks.load, modulo, state)]
    assert_identical(merged(parts), rows)
    for rank, part in enumerate(parts):
        assert all(key % 2 == rank for by_key in part.values() for key in by_key)


def trained(setup: Setup = ADAM) -> Model:
    model = new_model(setup, "cpu")
    model(make_batch(2, 6))[0].backward()
    return model


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_have_rows_of_their_own_and_train_alike(clone: Any) -> None:
    model = trained()
    other = clone(model)
    assert_identical(rows_of(other.ebc.tables()), rows_of(model.ebc.tables()))
    for one in (model, other):
        one(make_batch(3, 6))[0].backward()
    assert_identical(rows_of(other.ebc.tables()), rows_of(model.ebc.tables()))
    before = rows_of(model.ebc.tables())
    other(make_batch(4, 6))[0].backward()
    assert_identical(rows_of(model.ebc.tables()), before)
    parameter = next(other.ebc.parameters())
    assert parameter._optimizer_classes == [torch.optim.Adam]
    assert hasattr(parameter, "_in_backward_optimizers")


def test_a_copy_made_before_the_first_step_has_the_optimizer() -> None:
    model = copy.deepcopy(new_model(ADAM, "cpu"))
    model(make_batch(2, 6))[0].backward()
    assert_identical(rows_of(model.ebc.tables()), rows_of(trained().ebc.tables()))


def entries() -> dict[str, torch.Tensor]:
    return dict(trained().ebc.state_dict())


def load_error(changes: dict[str, Any], setup: Setup = ADAM) -> str:
    """What loading changed entries into a trained module says; it must change nothing."""
    model = trained(setup)
    before = rows_of(model.ebc.tables())
    with pytest.raises(RuntimeError) as caught:
        model.ebc.load_state_dict({**entries(), **changes})
    assert_identical(rows_of(model.ebc.tables())["user"], before["user"])
    return str(caught.value)


LATER: dict[str, dict[str, Any]] = {
    "no rule": {},
    "eviction": {"eviction": Evict.lru(min_age=1).expiring(ttl=4, every=2)},
    "admission": {"admission": Admit.count(2)},
    "shared rows": {"admission": Admit.count(3), "default": Default.shared_rows(8)},
}


@pytest.mark.parametrize("device", ["cpu", "npu"])
@pytest.mark.parametrize("rule", LATER)
def test_an_optimizer_that_comes_later_finds_all_state(
    ranks: RankPool, npus: RankPool, device: str, rule: str
) -> None:
    settings = Settings(optim.AdamW(lr=0.1, weight_decay=0.5, catch_up=True), LATER[rule])
    pool = npus if device == "npu" else ranks
    [num_rows] = pool.run(1, load_before_the_optimizer, settings, device)
    assert num_rows > 10


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_state_is_not_lost_if_memory_is_short_for_it_at_first(
    ranks: RankPool, npus: RankPool, device: str
) -> None:
    settings = Settings(optim.Adam(lr=0.1), LATER["eviction"])
    pool = npus if device == "npu" else ranks
    [num_rows] = pool.run(1, partial(load_before_the_optimizer, fails_first=True), settings, device)
    assert num_rows > 10


def test_loading_what_does_not_fit_says_so_and_changes_nothing() -> None:
    start = "embedding_bags.user.rank_0."
    assert "weight must have shape" in load_error({f"{start}weight": torch.zeros(3, 8)})
    assert "must be int64" in load_error({f"{start}keys": torch.zeros(3)})
    assert "update_count must be at least 0" in load_error(
        {f"{start}update_count": torch.tensor(-1)}
    )
    assert "must be int64" in load_error({f"{start}update_count": torch.tensor(1.5)})
    keys = entries()[f"{start}keys"]
    assert "more than once" in load_error({f"{start}keys": torch.zeros_like(keys)})
    assert "shape (n,)" in load_error({f"{start}keys": keys[:, None]})
    assert "configure seed=9" in load_error({f"{start}seed": torch.tensor(9)})
    rowwise = Setup(RowWiseAdagrad, {"lr": 0.1})
    assert "optimizer state 'sum' is missing" in load_error({}, rowwise)


def test_what_the_engine_refuses_names_the_table_once() -> None:
    model = trained()
    with model.ebc.tables()["user"].lease(10**6):
        with pytest.raises(RuntimeError, match="while leases or a cut are open") as caught:
            model.ebc.load_state_dict(entries())
    assert str(caught.value).count("table 'user': ") == 1


def test_missing_tables_are_reported() -> None:
    state = {name: value for name, value in entries().items() if ".genre." not in name}
    with pytest.raises(RuntimeError, match=r"Missing key.*genre.rank_0.keys"):
        trained().ebc.load_state_dict(state)
    problems = trained().ebc.load_state_dict(state, strict=False)
    assert problems.missing_keys == ["embedding_bags.genre.rank_0.keys"]


def dense_entries() -> dict[str, torch.Tensor]:
    """What torchrec's own collection of two of the tables has."""
    own = [
        EmbeddingBagConfig(name=name, embedding_dim=dim, num_embeddings=9)
        for name, dim in (("user", 8), ("genre", 3))
    ]
    return dict(EmbeddingBagCollection(tables=own).state_dict())


def test_weights_of_dense_tables_are_named_as_not_used() -> None:
    model, dense = trained(), dense_entries()
    rows = rows_of(model.ebc.tables())
    state = {f"ebc.{name}": value for name, value in dense.items()}
    found = model.load_state_dict(state, strict=False)
    assert found.unexpected_keys == list(state)
    assert pickle.loads(pickle.dumps(found.unexpected_keys)) == list(state)
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(state)
    for name in ("user", "genre"):
        advice = f"import_rows(model, state_dict, {{'{name}': ids}})"
        text = f"{name}.weight (weights of a dense table, whose rows have no ids: use "
        assert f"{text}recsdk_sharding.{advice})" in str(caught.value)
    assert_identical(rows_of(model.ebc.tables()), rows)


def test_weights_of_dense_tables_are_named_on_every_rank(ranks: RankPool) -> None:
    state = {f"ebc.{name}": value.numpy() for name, value in dense_entries().items()}
    plan = dict.fromkeys(("user", "genre", "other"), ("table_wise", 1))
    for setup in (Setup(), Setup(plan=plan)):
        for unexpected, text in ranks.run(2, on_ranks.load_dense, setup, state):
            assert unexpected == [name.removeprefix("ebc.") for name in state]
            assert "use recsdk_sharding.import_rows(model, state_dict, {'genre': ids})" in text


@pytest.mark.parametrize("name", ["other", "rank_0.more", "rank_0.state", "rank_a.keys"])
def test_entries_of_no_meaning_are_named_as_not_used(name: str) -> None:
    extra = f"embedding_bags.user.{name}"
    found = trained().ebc.load_state_dict({**entries(), extra: torch.ones(1)}, strict=False)
    assert found.unexpected_keys == [extra]


def test_state_of_another_optimizer_is_named_as_not_used() -> None:
    found = trained(Setup()).ebc.load_state_dict(entries(), strict=False)
    assert found.missing_keys == []
    assert sorted(found.unexpected_keys) == sorted(n for n in entries() if ".state." in n)


def test_a_module_without_an_optimizer_loads_weights_for_evaluation() -> None:
    model = Model(tables(), torch.device("cpu"))
    model.ebc.load_state_dict(entries())
    found, expected = rows_of(model.ebc.tables()), rows_of(trained().ebc.tables())
    assert_identical(weights_of(found), weights_of(expected))
    with pytest.raises(RuntimeError, match="has no optimizer"):
        model(make_batch(2, 6))


def test_rows_of_an_unsharded_module_are_kept_when_it_is_sharded(ranks: RankPool) -> None:
    results = ranks.run(2, on_ranks.keep_rows)
    assert_identical(merged([r["after"] for r in results]), results[0]["before"])
