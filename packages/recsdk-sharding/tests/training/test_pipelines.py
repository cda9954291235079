"""Host work ahead of training changes no bit, in torchrec's own pipelines and at any depth."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import metadata
from typing import Any

import numpy as np
import on_ranks
import pytest
import torch
from comparing import assert_identical
from loops import ON_CPU
from packaging.version import Version
from plans import MIXED_SEQUENCES
from rank_pool import RankPool
from worlds import Setup, merged

from recsdk_core import Admit
from sampling import crossed

SETUP = Setup(torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-4})
SIZES = [[5, 2], [4, 4], [0, 3], [6, 1], [0, 0], [3, 3], [2, 5], [4, 0]]


@pytest.mark.parametrize("how", ON_CPU)
def test_stock_pipelines_run_unmodified(ranks: RankPool, how: str) -> None:
    expected = ranks.known(2, on_ranks.train, SETUP, SIZES, ON_CPU[how])
    assert_identical(ranks.run(2, on_ranks.train, SETUP, SIZES, how), expected)


SEQUENCES = {
    None: replace(SETUP, is_sequence=True),
    "mixed": replace(SETUP, is_sequence=True, plan=MIXED_SEQUENCES),
}


@pytest.mark.parametrize(("how", "plan"), crossed(ON_CPU, SEQUENCES, size=6))
def test_stock_pipelines_run_sequences(ranks: RankPool, how: str, plan: str | None) -> None:
    expected = ranks.known(2, on_ranks.train, SEQUENCES[plan], SIZES, ON_CPU[how])
    assert_identical(ranks.run(2, on_ranks.train, SEQUENCES[plan], SIZES, how), expected)


@pytest.mark.parametrize("setup", [SETUP, SEQUENCES["mixed"]], ids=["bags", "sequences"])
def test_semi_synchronous_pipelines_take_frozen_tables(ranks: RankPool, setup: Setup) -> None:
    frozen = partial(on_ranks.train, is_frozen=True)
    expected = ranks.run(2, frozen, setup, SIZES)
    assert not any(sum(result["counts"].values()) for result in expected)
    assert_identical(ranks.run(2, frozen, setup, SIZES, "TrainPipelineSemiSync"), expected)


def test_batches_in_flight_are_not_another_models(ranks: RankPool) -> None:
    for said in ranks.run(2, on_ranks.attach_another, SETUP, SIZES):
        assert "rows of the tables of another model" in said


@pytest.mark.parametrize(
    ("kind", "trains"),
    [("TrainPipelineSparseDist", True), ("TrainPipelineFusedSparseDist", False)],
)
def test_a_batch_in_flight_is_used_in_the_mode_that_it_was_sent_in(
    ranks: RankPool, kind: str, trains: bool
) -> None:
    sent, now = ("train", "eval") if trains else ("eval", "train")
    found = ranks.run(2, on_ranks.switch_modes, SETUP, kind, trains)
    for result in found:
        assert f"sent ahead in {sent} mode, and the model is now in {now} mode" in result["said"]
        assert result["output"].shape == (3,)
    before, after = (merged([result[name] for result in found]) for name in ("before", "after"))
    if trains:
        assert_identical(after, before)
    else:
        assert not any(before.values())
        assert all(after.values())


@pytest.mark.parametrize("guilty", [[0], [0, 1]])
def test_a_step_whose_iterator_raised_sends_no_batch_again(
    ranks: RankPool, guilty: list[int]
) -> None:
    counting = replace(SETUP, options={"admission": Admit.count(3)})
    expected = ranks.known(2, on_ranks.train, counting, SIZES)
    flaky = partial(on_ranks.train_from_flaky_iterators, counting, SIZES)
    assert_identical(ranks.run(2, flaky, "TrainPipelineSparseDist", guilty, 4), expected)


def test_a_compiled_step_trains_as_the_plain_one(ranks: RankPool) -> None:
    expected = ranks.known(2, on_ranks.train, SETUP, SIZES[:2], "plain")
    compiled = ranks.run(2, on_ranks.train, SETUP, SIZES[:2], "compiled")
    assert_identical(compiled, expected)


@pytest.mark.skipif(
    Version(metadata.version("torchrec")) < Version("1.7"),
    reason="torchrec 1.6 frees nothing early",
)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("TrainPipelineSparseDist", {"execute_all_batches": True}),
        ("TrainPipelineFusedSparseDist", {}),
        ("TrainPipelineSemiSync", {"start_batch": 100}),
    ],
)
def test_torchrec_frees_no_ids_that_hash_tables_read(
    ranks: RankPool, kind: str, options: dict[str, Any]
) -> None:
    expected = ranks.known(2, on_ranks.train_beside_stock, SETUP)
    freeing = partial(on_ranks.train_beside_stock, free_features_storage_early=True, **options)
    assert_identical(ranks.run(2, freeing, SETUP, kind), expected)


def test_looking_up_early_is_another_training(ranks: RankPool) -> None:
    plain = ranks.known(2, on_ranks.train, SETUP, SIZES, "plain")
    early = ranks.known(2, on_ranks.train, SETUP, SIZES, "looked up early")
    assert not np.array_equal(early[0]["outputs"][5], plain[0]["outputs"][5])
    late = ranks.known(2, on_ranks.train, SETUP, SIZES, "looked up early from 3")
    assert_identical([r["outputs"][:4] for r in late], [r["outputs"][:4] for r in plain])


MIXED = {
    "user": ("column_wise", [(3, 1), (5, 0)]),
    "genre": ("table_wise", 1),
    "other": ("data_parallel",),
}


@pytest.mark.parametrize(
    "how", ["TrainPipelineBase", "TrainPipelineSparseDist", "TrainPipelineSemiSync from 3"]
)
def test_stock_pipelines_run_mixed_plans(ranks: RankPool, how: str) -> None:
    setup = replace(SETUP, plan=MIXED)
    expected = ranks.known(2, on_ranks.train, setup, SIZES, ON_CPU[how])
    assert_identical(ranks.run(2, on_ranks.train, setup, SIZES, how), expected)


@pytest.mark.parametrize("plan", [None, MIXED])
def test_evaluation_by_a_stock_pipeline(ranks: RankPool, plan: Any) -> None:
    for result in ranks.run(2, on_ranks.evaluate, replace(SETUP, plan=plan), SIZES):
        assert_identical(result["piped"], result["plain"])
        assert_identical(result["after"], result["before"])


@pytest.mark.parametrize("depth", [1, 6])
@pytest.mark.parametrize("world_size", [1, 2])
def test_looking_ahead_is_invisible(ranks: RankPool, world_size: int, depth: int) -> None:
    sizes = [row[:world_size] for row in SIZES]
    looks_at = [0, 2, 3, 6]
    plain = ranks.known(world_size, on_ranks.train_ahead, SETUP, sizes, 0, looks_at)
    ahead = ranks.run(world_size, on_ranks.train_ahead, SETUP, sizes, depth, looks_at)
    assert_identical(ahead, plain)


def test_evaluation_and_export_do_not_change_training(ranks: RankPool) -> None:
    watched = ranks.run(2, on_ranks.train_ahead, SETUP, SIZES, 3, [0, 1, 2, 3, 4])
    alone = ranks.run(2, on_ranks.train_ahead, SETUP, SIZES, 3, [])
    for one, other in zip(watched, alone, strict=True):
        assert_identical({**one, "looks": []}, other)


def test_a_look_sees_only_the_steps_that_are_done(ranks: RankPool) -> None:
    results = ranks.run(2, on_ranks.train_ahead, SETUP, SIZES, 6, [0])
    alone = ranks.run(2, on_ranks.train, SETUP, SIZES[:1])
    seen = merged([r["looks"][0]["rows"] for r in results])
    assert_identical(seen, merged([r["rows"] for r in alone]))
    counts = [r["looks"][0]["counts"] for r in results]
    assert {n: sum(c[n] for c in counts) for n in seen} == {n: len(seen[n]) for n in seen}
