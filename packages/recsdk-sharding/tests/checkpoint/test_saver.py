"""Saver saves and loads the tables of a model at any number of ranks, mid-training too."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import saver_on_ranks
import torch
from comparing import assert_identical
from plans import Spec
from rank_pool import RankPool
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from worlds import Model, Setup, make_batch, merged, new_model, rows_of, tables, weights_of

from recsdk_core import BusyError, CheckpointError, Evict, NonFiniteError, optim
from recsdk_core.checkpoint import open_checkpoint
from recsdk_core.nn import HashEmbedding, HashEmbeddingBag
from recsdk_sharding import HashEmbeddingBagCollection, HashEmbeddingBagConfig, Saver
from sampling import sampled

ADAM = Setup(torch.optim.Adam, {"lr": 0.02})
SIZES = [[3, 1, 2, 4], [2, 2, 0, 3], [0, 3, 1, 0], [4, 0, 2, 2]]


def sizes_for(world_size: int) -> list[list[int]]:
    return [row[:world_size] for row in SIZES]


def merged_content(results: list[dict[str, Any]]) -> Any:
    assert len({tuple(sorted(result["counts"].items())) for result in results}) == 1
    return merged([result["rows"] for result in results])


@pytest.mark.parametrize(
    ("writers", "readers", "rules"),
    sampled([(2, 2, "vv"), (4, 2, "vm"), (1, 4, "mv"), (3, 4, "vv"), (2, 3, "mm")], 3),
)
def test_chains_move_between_world_sizes_and_rules(
    ranks: RankPool, tmp_path: Path, writers: int, readers: int, rules: str
) -> None:
    names = {"v": "virtual_shard", "m": "modulo"}
    setups = [replace(ADAM, rank_rule=names[letter]) for letter in rules]
    saved = ranks.run(
        writers, saver_on_ranks.save_chain, setups[0], sizes_for(writers), str(tmp_path)
    )
    loaded = ranks.run(readers, saver_on_ranks.load_chain, setups[1], str(tmp_path), len(SIZES))
    for number in range(len(SIZES)):
        expected = merged_content([result[number] for result in saved])
        assert_identical(merged_content([result[number] for result in loaded]), expected)
    model = new_model(ADAM, "cpu")
    Saver().load(model, tmp_path / str(len(SIZES) - 1))
    assert_identical(rows_of(model.ebc.tables()), merged_content([r[-1] for r in saved]))


@pytest.mark.parametrize("depth", [1, 6])
def test_a_save_mid_training_holds_the_steps_done(
    ranks: RankPool, tmp_path: Path, depth: int
) -> None:
    results = ranks.run(
        2, saver_on_ranks.save_with_batches_ahead, ADAM, 12, depth, 5, str(tmp_path)
    )
    plain = ranks.run(
        2, saver_on_ranks.save_with_batches_ahead, ADAM, 12, 0, 5, str(tmp_path / "plain")
    )
    for one, other in zip(results, plain, strict=True):
        assert_identical(one["midway"], other["midway"])
        assert_identical(one["end"], other["end"])
    loaded = ranks.run(2, saver_on_ranks.load, ADAM, str(tmp_path / "midway"))
    for one, result in zip(loaded, results, strict=True):
        assert_identical(one, result["midway"])


def test_all_ranks_raise_if_one_cannot_save(ranks: RankPool, tmp_path: Path) -> None:
    results = ranks.run(3, saver_on_ranks.fail_to_save, str(tmp_path), 1)
    assert "no space left on this rank" in results[1][0]
    for rank in (0, 2):
        assert "rank 1 failed" in results[rank][0]
    assert [result[1] for result in results] == ["", "", ""]
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_no_rank_changes_if_one_cannot_load(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, saver_on_ranks.save_chain, Setup(), sizes_for(2)[:1], str(tmp_path))
    file = open_checkpoint(tmp_path / "0").manifest.tables[0].files[1]
    path = tmp_path / "0" / file.path
    path.write_bytes(path.read_bytes()[:-5])
    results = ranks.run(2, saver_on_ranks.fail_to_load, str(tmp_path / "0"))
    for result in results:
        assert "rank_00001.rows" in result["text"]
        assert_identical(result["after"], result["before"])


def test_tables_whole_on_every_rank_are_saved_if_they_are_equal(
    ranks: RankPool, tmp_path: Path
) -> None:
    plan: dict[str, Spec] = {"user": ("data_parallel",), "genre": ("row_wise",)}
    setup = Setup(torch.optim.Adagrad, {"lr": 0.1}, plan={**plan, "other": ("row_wise",)})
    results = ranks.run(3, saver_on_ranks.save_copies, setup, str(tmp_path))
    for result in results:
        for (name, *_, what), text in result["texts"].items():
            if what == "update_count":
                assert f"ranks 0 and 2 save different tables as {name!r}" in text
            else:
                assert f"table {name!r} is whole on ranks 0 and 2, which have different" in text
        assert_identical(result["rows"], results[0]["rows"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    for loaded in ranks.run(2, saver_on_ranks.load_copies, setup, str(tmp_path)):
        assert_identical(loaded, results[0]["rows"])


def trained(setup: Setup = ADAM) -> Model:
    model = new_model(setup, "cpu")
    model(make_batch(2, 6))[0].backward()
    return model


def test_an_unsharded_module(tmp_path: Path) -> None:
    model = trained()
    saver = Saver()
    saver.save(model, tmp_path / "0")
    model(make_batch(3, 6))[0].backward()
    saver.save(model, tmp_path / "1", incremental=True)
    other = new_model(ADAM, "cpu")
    saver.load(other, tmp_path / "0")
    saver.load(other, tmp_path / "1", incremental=True)
    for one in (model, other):
        one(make_batch(4, 6))[0].backward()
    assert_identical(rows_of(other.ebc.tables()), rows_of(model.ebc.tables()))


def test_a_module_without_an_optimizer_loads_weights_for_evaluation(tmp_path: Path) -> None:
    Saver().save(trained(), tmp_path / "0")
    model = Model(tables(), torch.device("cpu"))
    Saver().load(model, tmp_path / "0")
    found, expected = rows_of(model.ebc.tables()), rows_of(trained().ebc.tables())
    assert_identical(weights_of(found), weights_of(expected))


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    Saver().save(trained(), tmp_path / "0")
    with pytest.raises(CheckpointError, match="saved with Adam"):
        Saver().load(trained(Setup(torch.optim.Adagrad, {})), tmp_path / "0")
    config = HashEmbeddingBagConfig(name="user", embedding_dim=8, num_embeddings=64)
    part = HashEmbeddingBagCollection([config])
    with pytest.raises(CheckpointError, match=r"has tables \['genre', 'other'\] that are not"):
        Saver().load(part, tmp_path / "0")
    with pytest.raises(CheckpointError, match="load that first"):
        Saver().load(trained(), tmp_path / "0", incremental=True)
    with pytest.raises(CheckpointError, match="save or load one in full first"):
        Saver().save(trained(), tmp_path / "1", incremental=True)
    with pytest.raises(ValueError, match="rank must be that of this process, 0, got 3"):
        Saver(rank=3)
    with pytest.raises(ValueError, match="has no hash tables"):
        Saver().save(torch.nn.Linear(1, 1), tmp_path / "1")
    two = torch.nn.ModuleList([part, HashEmbeddingBagCollection([replace(config)])])
    with pytest.raises(ValueError, match="two tables of the module are named 'user'"):
        Saver().save(two, tmp_path / "1")


@pytest.mark.parametrize("call", ["save", "load"])
@pytest.mark.parametrize(
    ("path", "kind", "text"),
    [
        (5, TypeError, "path must be a string or os.PathLike of one, got int"),
        (b"x", TypeError, "got bytes; give os.fsdecode of it"),
        ("", ValueError, "path must have 1 to 1024 characters"),
        ("a\0b", ValueError, "path must not have a zero character"),
        ("nope://x/y", CheckpointError, "^nope://x/y: .*Protocol not known"),
        (__file__, CheckpointError, "no checkpoint"),
    ],
)
def test_paths_that_no_checkpoint_has(call: str, path: Any, kind: Any, text: str) -> None:
    with pytest.raises(kind, match=text):
        getattr(Saver(), call)(new_model(Setup(), "cpu"), path)


def test_loading_waits_for_no_batch_in_flight(tmp_path: Path) -> None:
    model = trained()
    Saver().save(model, tmp_path / "0")
    outputs = model(make_batch(3, 6))
    before = rows_of(model.ebc.tables())
    with pytest.raises(BusyError):
        Saver().load(model, tmp_path / "0")
    assert_identical(rows_of(model.ebc.tables()), before)
    del outputs
    Saver().load(model, tmp_path / "0")


def test_a_copy_that_lacks_trained_rows_says_so(tmp_path: Path) -> None:
    model = trained()
    kept = model(make_batch(3, 6))
    Saver().save(model, tmp_path / "0")  # of batches in flight, no word is due
    model(make_batch(4, 6))[0].backward()
    held = sum(table.stats().num_rows_held_back for table in model.ebc.tables().values())
    assert held > 0
    with pytest.warns(RuntimeWarning, match="new rows are not in this save") as of_save:
        Saver().save(model, tmp_path / "1")
    with pytest.warns(RuntimeWarning, match="new rows are not in this copy") as of_copy:
        model.state_dict()
    for told in (of_save, of_copy):
        assert sum(int(re.findall(r": (\d+) new", str(each.message))[0]) for each in told) == held
    del kept
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Saver().save(model, tmp_path / "2")
    assert sum(table.stats().num_rows_held_back for table in model.ebc.tables().values()) == 0


class Mixed(torch.nn.Module):
    """Modules of the core beside a collection."""

    def __init__(self) -> None:
        super().__init__()
        adagrad = {"optimizer": torch.optim.Adagrad, "optimizer_kwargs": {"lr": 0.1}}
        self.collection = new_model(ADAM, "cpu")
        self.bag = HashEmbeddingBag(4, name="bag", **adagrad)
        self.embedding = HashEmbedding(3, name="embedding", dtype="bfloat16", **adagrad)

    def train_on(self, seed: int) -> None:
        ids = torch.randint(-9, 9, (7,), generator=torch.Generator().manual_seed(seed))
        self.collection(make_batch(seed, 6))[0].backward()
        self.bag(ids, torch.tensor([0, 3])).sum().backward()
        self.embedding(ids).sum().backward()

    def rows(self) -> Any:
        own = {"bag": self.bag.table, "embedding": self.embedding.table}
        return rows_of({**self.collection.ebc.tables(), **own})


def test_modules_of_the_core_are_saved_too(tmp_path: Path) -> None:
    model, other = Mixed(), Mixed()
    for number in range(2):
        model.train_on(number)
        Saver().save(model, tmp_path / str(number), incremental=number > 0)
        other.train_on(number + 5)
        Saver().load(other, tmp_path / str(number), incremental=number > 0)
        assert_identical(other.rows(), model.rows())
    Saver().save(other.bag, tmp_path / "bag")
    dotted = HashEmbedding(3, name="item.of two")  # which no collection's table may be
    Saver().save(dotted, tmp_path / "dotted")
    Saver().load(dotted, tmp_path / "dotted")
    two = torch.nn.ModuleList([HashEmbedding(3, name="item") for _ in range(2)])
    with pytest.raises(ValueError, match="two tables of the module are named 'item'"):
        Saver().save(two, tmp_path / "two")
    with pytest.raises(ValueError, match="'unnamed_.*was given no name.*pass name= where its Hash"):
        Saver().save(HashEmbedding(3), tmp_path / "unnamed")


def plain_module(name: str) -> HashEmbedding:
    """Its rows cannot be replaced while batches are in flight, as its table evicts."""
    sgd = optim.SGD(lr=0.5)
    evicts: Any = {"max_rows": 9, "eviction": Evict.lru()}
    return HashEmbedding(2, name=name, optimizer=sgd, on_nonfinite="raise", **evicts)


def collection(name: str) -> HashEmbeddingBagCollection:
    given: Any = {"embedding_dim": 2, "num_embeddings": 9, "on_nonfinite": "raise"}
    made = HashEmbeddingBagCollection(
        [HashEmbeddingBagConfig(name=name, feature_names=["ids"], **given)]
    )
    apply_optimizer_in_backward(torch.optim.SGD, made.parameters(), {"lr": 0.5})
    return made


def rows_held(model: torch.nn.Module) -> list[int]:
    return [len(each) for name, each in model.state_dict().items() if name.endswith("keys")]


@pytest.mark.parametrize("by", ["Saver", "state_dict"])
@pytest.mark.parametrize("make", [plain_module, collection])
def test_a_model_loads_after_a_backward_that_raised_before_it_came_to_all_tables(
    tmp_path: Path, make: Callable[[str], torch.nn.Module], by: str
) -> None:
    model = torch.nn.ModuleList(make(name) for name in ("user", "item"))
    ids, ones = torch.tensor([3, -3]), torch.ones(2, dtype=torch.int32)
    batch = KeyedJaggedTensor(["ids"], ids, lengths=ones) if make is collection else ids
    saved = model.state_dict()
    Saver().save(model, tmp_path / "0")

    def total(number: int) -> torch.Tensor:
        out = model[number](batch)
        vectors: torch.Tensor = out.values() if make is collection else out
        return vectors.sum()

    with pytest.raises(NonFiniteError, match="table 'item'"):
        (total(0) + total(1) * torch.inf).backward()
    assert rows_held(model)[1] == 2
    if by == "Saver":
        Saver().load(model, tmp_path / "0")
    else:
        model.load_state_dict(saved)
    assert rows_held(model) == [0, 0]


def test_gradients_that_wait_for_an_update_do_not_keep_a_model_from_loading(tmp_path: Path) -> None:
    model = Model(tables(accumulate_steps=2), torch.device("cpu"))
    apply_optimizer_in_backward(torch.optim.Adagrad, model.ebc.parameters(), {"lr": 0.1})
    model(make_batch(2, 6))[0].backward()
    model(make_batch(3, 6))[0].backward()
    Saver().save(model, tmp_path / "0")
    saved = rows_of(model.ebc.tables())
    model(make_batch(4, 6))[0].backward()
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        Saver().load(model, tmp_path / "1")
    Saver().load(model, tmp_path / "0")
    assert_identical(rows_of(model.ebc.tables()), saved)
    model(make_batch(5, 6))[0].backward()
    assert_identical(rows_of(model.ebc.tables()), saved)  # the one that was dropped does not count
