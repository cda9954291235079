"""torch.distributed.checkpoint saves and loads models with hash tables, at any number of ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import dcp_on_ranks
import numpy as np
import pytest
import torch
from comparing import assert_identical
from rank_pool import RankPool
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from worlds import Setup, merged

from sampling import crossed

ADAM = Setup(torch.optim.Adam, {"lr": 0.02})
SIZES = [[3, 1, 2, 4], [2, 2, 0, 3]]


def sizes_for(world_size: int) -> list[list[int]]:
    return [row[:world_size] for row in SIZES]


@pytest.mark.parametrize("is_async", [False, True])
def test_resumed_training_equals_training_never_stopped(
    ranks: RankPool, tmp_path: Path, is_async: bool
) -> None:
    path, sizes = str(tmp_path / "state"), sizes_for(2)
    went_on = ranks.run(2, dcp_on_ranks.save, ADAM, sizes, path, is_async)
    resumed = ranks.run(2, dcp_on_ranks.load, ADAM, sizes, path)
    for one, other in zip(went_on, resumed, strict=True):
        assert_identical(other["loaded"], one["saved"])
        assert_identical(other["end"], one["end"])
        for out, expected in zip(other["outputs"], one["outputs"], strict=True):
            assert np.array_equal(out, expected)


@pytest.mark.parametrize(
    ("world_size", "how", "zeroes_first"),
    crossed((1, 2), ("dcp", "Saver"), (True, False), size=2),
)
def test_training_under_a_scheduler_goes_on_with_its_rates(
    ranks: RankPool, tmp_path: Path, world_size: int, how: str, zeroes_first: bool
) -> None:
    setup = Setup(torch.optim.Adagrad, {"lr": 0.4})
    path = str(tmp_path / "state")
    results = ranks.run(
        world_size, dcp_on_ranks.stop_and_resume, setup, 20, path, how, zeroes_first
    )
    for result in results:
        through, resumed = result["ends"]
        assert_identical(resumed, through)
        for (out, rates), (again, found) in zip(*result["outputs"], strict=True):
            assert found == rates
            assert np.array_equal(again, out)
        assert len({rate for _, rates in result["outputs"][0] for rate in rates}) == 7


def test_rates_are_those_of_the_start_unless_they_are_saved(
    ranks: RankPool, tmp_path: Path
) -> None:
    setup, path = Setup(torch.optim.Adagrad, {"lr": 0.4}), str(tmp_path / "state")
    [result] = ranks.run(1, dcp_on_ranks.stop_and_resume, setup, 40, path, "dcp", True, False)
    expected, found = ([rates for _, rates in part] for part in result["outputs"])
    assert found[:20] == expected[:20]
    assert (found[20], expected[20]) == (expected[0], [pytest.approx(0.4 * 0.7**6)])


@pytest.mark.parametrize(
    ("pair", "rule"),
    crossed([(2, 1), (2, 3), (4, 2), (1, 4)], ("virtual_shard", "modulo"), size=4),
)
def test_any_number_of_ranks_loads(
    ranks: RankPool, tmp_path: Path, pair: tuple[int, int], rule: str
) -> None:
    writers, readers = pair
    path, setup = str(tmp_path / "state"), replace(ADAM, rank_rule=rule)
    saved = ranks.run(writers, dcp_on_ranks.save, setup, sizes_for(writers), path, False)
    loaded = ranks.run(readers, dcp_on_ranks.load, setup, sizes_for(readers), path)
    rows = merged([result["saved"]["rows"] for result in saved])
    assert_identical(merged([result["loaded"]["rows"] for result in loaded]), rows)
    for result in loaded:
        assert_identical(result["loaded"]["dense"], saved[0]["saved"]["dense"])


def test_another_rule_needs_all_shards_and_says_so(ranks: RankPool, tmp_path: Path) -> None:
    path, modulo = str(tmp_path / "state"), replace(ADAM, rank_rule="modulo")
    saved = ranks.run(2, dcp_on_ranks.save, modulo, sizes_for(2), path, False)
    for text in ranks.run(2, dcp_on_ranks.load_error, ADAM, path):
        assert "saved by 2 ranks with rule 'modulo'" in text
        assert "HashLoadPlanner(all_ranks=True)" in text
    load = dcp_on_ranks.load_all
    loaded = ranks.run(2, load, ADAM, sizes_for(2), path)
    rows = merged([result["saved"]["rows"] for result in saved])
    assert_identical(merged([result["loaded"]["rows"] for result in loaded]), rows)


def test_unsharded_tables_are_saved_if_they_are_equal(ranks: RankPool, tmp_path: Path) -> None:
    save = dcp_on_ranks.save_unsharded
    assert ranks.run(2, save, ADAM, str(tmp_path / "equal"), True) == ["", ""]
    for text in ranks.run(2, save, ADAM, str(tmp_path / "different"), False):
        assert "CheckpointError: table 'model.ebc.embedding_bags." in text
        assert "is whole on ranks 0 and 1, which have different rows" in text


def test_shards_of_tables_are_not_saved_of_one_rank_only(ranks: RankPool, tmp_path: Path) -> None:
    for text in ranks.run(2, dcp_on_ranks.save_dicts_whole, ADAM, str(tmp_path / "0")):
        assert "rank_0' is one rank's shard of a table" in text
    assert ranks.run(1, dcp_on_ranks.save_dicts_whole, ADAM, str(tmp_path / "1")) == [
        "it was saved"
    ]


def test_without_a_model_torch_reads_all_shards(ranks: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "state")
    saved = ranks.run(2, dcp_on_ranks.save, ADAM, sizes_for(2), path, False)
    dcp_to_torch_save(path, tmp_path / "state.pt")
    found = torch.load(tmp_path / "state.pt", weights_only=False)["model"]
    for rank, result in enumerate(saved):
        keys = next(v for k, v in found.items() if k.endswith(f"user.rank_{rank}.keys"))
        assert set(keys.tolist()) == set(result["saved"]["rows"]["user"])
