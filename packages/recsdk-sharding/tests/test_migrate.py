"""Rows of torchrec's tables enter hash tables by their ids, and leave them again."""

from __future__ import annotations

from typing import Any

import migrate_on_ranks
import numpy as np
import pytest
import torch
from rank_pool import RankPool
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from worlds import EDGE_KEYS, Setup, new_model

from recsdk_sharding import export_rows, import_rows

IDS = np.array(EDGE_KEYS)


def torchrec_state() -> dict[str, torch.Tensor]:
    """The state of torchrec's own tables, of as many rows as there are ids."""
    configs = [
        EmbeddingBagConfig(name=name, embedding_dim=dim, num_embeddings=len(IDS))
        for name, dim in (("user", 8), ("genre", 3))
    ]
    return dict(EmbeddingBagCollection(tables=configs).state_dict())


@pytest.mark.parametrize("world_size", [1, 3])
def test_there_and_back_over_ranks(ranks: RankPool, world_size: int) -> None:
    state = {name: value.numpy() for name, value in torchrec_state().items()}
    ids = {"user": IDS, "genre": IDS[::-1].copy()}
    for found in ranks.run(world_size, migrate_on_ranks.there_and_back, state, ids):
        for name in ids:
            expected = state[f"embedding_bags.{name}.weight"]
            assert np.array_equal(found[f"{name}.weight"][:-1], expected)
            assert not found[f"{name}.weight"][-1].any()


def test_an_embedding_bag_of_torch() -> None:
    bag = torch.nn.EmbeddingBag(len(IDS), 8)
    model, keys = new_model(Setup(), "cpu"), torch.from_numpy(IDS)
    import_rows(model, {"user.weight": bag.weight}, {"user": keys})
    table = model.ebc.tables()["user"]
    assert torch.equal(table.lookup(keys), bag.weight.detach())
    back = torch.nn.EmbeddingBag.from_pretrained(export_rows(model, {"user": keys})["user.weight"])
    assert torch.equal(back.weight, bag.weight)


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
