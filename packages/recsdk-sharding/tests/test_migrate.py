"""Rows of torchrec's tables enter hash tables by their ids, and leave them again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import migrate_on_ranks
import numpy as np
import pytest
import torch
from rank_pool import RankPool
from test_pipelines import assert_identical
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from worlds import EDGE_KEYS, Setup, merged, new_model, rows_of

from recsdk_sharding import Saver, export_rows, import_rows

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
    assert found["lengths"] == {"user": 4, "genre": 0, "other": 0}


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
        (state, {"user": keys[:3]}, ValueError, r"must be a plain tensor \(3, 8\)"),
        (state, {"user": keys.float()}, TypeError, "ids of 'user' must be int64"),
        (state, {"user": keys * 0}, ValueError, "ids of 'user' repeat"),
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
