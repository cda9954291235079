"""The synthetic stream, the columns of examples, and ids from categories."""

from __future__ import annotations

import doctest
import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsdk_pipeline.data import (
    ClickBatch,
    Examples,
    HeldOutSplit,
    IdBags,
    Share,
    SyntheticClicks,
    category_key,
    keys,
)
from recsdk_sharding import HashEmbeddingBagCollection

lists_of_bags = st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4), max_size=12)


def stream(seed: int = 0, num_train: int = 4000) -> SyntheticClicks:
    return SyntheticClicks(num_train=num_train, num_held_out=1000, seed=seed)


def joined(batches: list[ClickBatch]) -> list[tuple]:
    """The examples of all batches as comparable rows."""
    rows = []
    for batch in batches:
        bags = [bags.to_dense() for bags in batch.sparse.to_dict().values()]
        for row in range(len(batch)):
            ids = tuple(tuple(feature[row].tolist()) for feature in bags)
            rows.append((float(batch.labels[row]), tuple(batch.dense[row].tolist()), ids))
    return rows


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_ranks_together_read_what_one_rank_reads(world_size: int) -> None:
    data = stream(num_train=500)
    whole = list(data.train(epoch=0, batch_size=64, share=Share()))
    shares = [Share(rank=rank, world_size=world_size) for rank in range(world_size)]
    parts = [list(data.train(epoch=0, batch_size=64, share=share)) for share in shares]
    assert {len(part) for part in parts} == {len(whole)}
    for step, batch in enumerate(whole):
        assert joined([part[step] for part in parts]) == joined([batch])


def test_stream_is_a_pure_function_of_its_seed() -> None:
    first, again = (joined(list(stream().held_out(batch_size=300, share=Share()))) for _ in "12")
    other = joined(list(stream(seed=1).held_out(batch_size=300, share=Share())))
    assert first == again
    assert not set(first) & set(other)


def test_ids_are_arbitrary_int64_and_new_ones_keep_arriving() -> None:
    examples, _ = stream().draw(0, 40_000)
    for name, bags in examples.bags.items():
        values = bags.values
        assert (values < 0).mean() == pytest.approx(0.5, abs=0.1), name
        assert np.abs(values.astype(np.float64)).max() > 2**62
        late = values[len(values) // 2 :]
        assert not np.isin(late, values[: len(values) // 2]).all(), name


def test_ids_follow_a_power_law() -> None:
    examples, _ = stream().draw(0, 200_000)
    _, counts = np.unique(examples.bags["user"].values, return_counts=True)
    counts = np.sort(counts)[::-1]
    ranks = np.arange(10, 1000)
    slope = np.polyfit(np.log(ranks), np.log(counts[ranks]), 1)[0]
    assert slope == pytest.approx(-1.05, abs=0.1)


def test_some_bags_are_empty_and_some_hold_several_ids() -> None:
    examples, _ = stream().draw(0, 5_000)
    for name in ("tags", "words"):
        lengths = examples.bags[name].lengths
        assert (lengths == 0).mean() > 0.1
        assert (lengths > 1).mean() > 0.3
    for name in ("user", "item", "site"):
        assert (examples.bags[name].lengths == 1).all()


def test_labels_follow_their_probabilities() -> None:
    examples, probabilities = stream().draw(0, 100_000)
    for low in (0.0, 0.2, 0.4, 0.6, 0.8):
        chosen = (low <= probabilities) & (probabilities < low + 0.2)
        expected = probabilities[chosen].mean()
        assert examples.labels[chosen].mean() == pytest.approx(expected, abs=0.03)


def test_truth_belongs_to_the_held_out_examples() -> None:
    data = stream()
    _, labels = data.held_out_truth()
    batches = data.held_out(batch_size=128, share=Share())
    found = torch.cat([batch.labels for batch in batches]).numpy()
    np.testing.assert_array_equal(found, labels)


def test_sizes_must_be_positive() -> None:
    with pytest.raises(ValueError, match="num_train must be at least 1, got 0"):
        SyntheticClicks(num_train=0, num_held_out=5)


@given(lists_of_bags, st.data())
def test_taking_rows_takes_their_bags(bags: list[list[int]], data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, max(len(bags) - 1, 0)), max_size=8 if bags else 0))
    taken = IdBags.of_lists(bags).take(np.array(rows, dtype=np.int64))
    found = [part.tolist() for part in np.split(taken.values, taken.offsets[1:-1])]
    assert found[: len(rows)] == [bags[row] for row in rows]
    assert len(taken.offsets) == len(rows) + 1


@given(
    lists_of_bags,
    st.sampled_from(
        [
            ("a", TypeError, "lists of ints, got 'a'"),
            (1.5, TypeError, "lists of ints, got 1.5"),
            (None, TypeError, "lists of ints, got None"),
            (True, TypeError, "lists of ints, got True"),
            (np.False_, TypeError, f"lists of ints, got {np.False_!r}"),
            (torch.tensor(True), TypeError, "lists of ints, got tensor(True)"),
            (2**63, ValueError, f"ids in [-2**63, 2**63), got {2**63}"),
            (-(2**63) - 1, ValueError, f"ids in [-2**63, 2**63), got {-(2**63) - 1}"),
        ]
    ),
    st.data(),
)
def test_what_is_no_id_is_named(
    bags: list[list[int]], wrong: tuple[object, type[Exception], str], data: st.DataObject
) -> None:
    item, kind, message = wrong
    number = data.draw(st.integers(0, len(bags)))
    bad = data.draw(st.permutations([1, item]))
    with pytest.raises(kind, match=re.escape(f"{message} in bags[{number}]")):
        IdBags.of_lists([*bags[:number], bad, *bags[number:]])


@given(lists_of_bags, st.data())
def test_ids_may_be_numbers_of_numpy(bags: list[list[int]], data: st.DataObject) -> None:
    kinds = st.sampled_from([int, np.int64, np.longlong, np.array, torch.tensor])
    given = [[data.draw(kinds)(each) for each in bag] for bag in bags]
    expected = IdBags.of_lists(bags)
    for found in (IdBags.of_lists(given), IdBags.of_lists([np.array(b, np.int64) for b in bags])):
        np.testing.assert_array_equal(found.values, expected.values)
        np.testing.assert_array_equal(found.offsets, expected.offsets)


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("sparse", IdBags.of_lists([[1], []]), "KeyedJaggedTensor, got IdBags; Examples"),
        ("sparse", None, "KeyedJaggedTensor, got NoneType"),
        ("dense", np.zeros((2, 1), np.float32), "torch.Tensor, got ndarray"),
        ("labels", [0.0, 1.0], "torch.Tensor, got list"),
        ("labels", None, "torch.Tensor, got NoneType"),
        ("timestamps", np.zeros(1, np.int64), "torch.Tensor, got ndarray"),
    ],
)
def test_a_batch_names_what_is_no_tensor(name: str, wrong: Any, said: str) -> None:
    sparse = KeyedJaggedTensor(["a"], torch.tensor([1]), lengths=torch.tensor([1, 0]))
    right: Any = {"dense": torch.zeros(2, 1), "sparse": sparse, "labels": torch.zeros(2)}
    assert len(ClickBatch(**right)) == 2
    with pytest.raises(TypeError, match=f"{name} must be a {said}"):
        ClickBatch(**right | {name: wrong})


@given(lists_of_bags, st.data())
def test_a_part_of_rows_is_those_rows(bags: list[list[int]], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(bags)))
    stop = data.draw(st.integers(start, len(bags)))
    part = IdBags.of_lists(bags).part(start, stop)
    expected = IdBags.of_lists(bags[start:stop])
    np.testing.assert_array_equal(part.values, expected.values)
    np.testing.assert_array_equal(part.offsets, expected.offsets)


@given(st.integers(0, 10**6), st.integers(0, 1000), st.integers(1, 9))
def test_shares_cover_everything_once(start: int, size: int, world_size: int) -> None:
    bounds = [
        Share(rank=r, world_size=world_size).bounds(start, start + size) for r in range(world_size)
    ]
    assert bounds[0][0] == start
    assert bounds[-1][1] == start + size
    assert all(one[1] == other[0] for one, other in pairwise(bounds))
    sizes = [stop - first for first, stop in bounds]
    assert max(sizes) - min(sizes) <= 1


def split_of(count: int, seed: int = 0) -> HeldOutSplit:
    ids = IdBags.single(np.arange(count, dtype=np.int64))
    examples = Examples(
        labels=np.zeros(count, np.float32), dense=np.zeros((count, 1), np.float32), bags={"id": ids}
    )
    return HeldOutSplit(("id",), examples, seed=seed)


def ids_of(batches: list[ClickBatch]) -> list[int]:
    return torch.cat([batch.sparse.values() for batch in batches]).tolist()


@given(st.integers(10, 200), st.integers(1, 50), st.integers(0, 3))
def test_a_tenth_is_held_out_and_never_trained(count: int, batch_size: int, seed: int) -> None:
    data = split_of(count, seed)
    held_out = ids_of(list(data.held_out(batch_size=batch_size, share=Share())))
    assert len(held_out) == count // 10
    for epoch in range(2):
        batches = list(data.train(epoch=epoch, batch_size=batch_size, share=Share()))
        assert sorted(ids_of(batches) + held_out) == list(range(count))


def test_each_epoch_has_its_own_order() -> None:
    data = split_of(200)
    first, second, again = (
        ids_of(list(data.train(epoch=epoch, batch_size=32, share=Share()))) for epoch in (0, 1, 0)
    )
    assert first != second
    assert first == again


def test_empty_batch_can_be_made_and_moved() -> None:
    batch = split_of(20).held_out(batch_size=1, share=Share(rank=1, world_size=3))
    empty = next(batch).to(torch.device("cpu"))
    assert len(empty) == 0
    assert empty.sparse.values().numel() == 0


def test_batches_have_the_names_that_torchrecs_models_read() -> None:
    batch = next(split_of(200).held_out(batch_size=8, share=Share()))
    tables = [
        EmbeddingBagConfig(num_embeddings=10, embedding_dim=4, name=k, feature_names=[k])
        for k in map(str, batch.sparse.keys())
    ]
    dlrm = DLRM(HashEmbeddingBagCollection(tables), batch.dense.shape[1], [4], [4, 1]).eval()
    _, (_, logits, labels) = DLRMTrain(dlrm)(batch)
    assert torch.equal(logits, dlrm(batch.dense, batch.sparse).squeeze())
    assert torch.equal(labels, batch.labels)


@given(st.text(max_size=8), st.text(max_size=8))
def test_category_keys_are_int64_and_depend_on_the_feature(feature: str, value: str) -> None:
    key = category_key(feature, value)
    assert -(2**63) <= key < 2**63
    assert key != category_key(feature + "x", value)
    assert key != category_key(feature, value + "x")


def test_category_key_is_the_documented_one() -> None:
    assert doctest.testmod(keys).failed == 0
    assert doctest.testmod(keys).attempted > 0
