"""Batches that a DataLoader's worker sends are those that it read, and use memory again."""

from __future__ import annotations

import types
from collections.abc import Iterator
from itertools import zip_longest
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pipeline_support import parquet
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsdk_pipeline._internal import sending
from recsdk_pipeline._internal.lending import Lender
from recsdk_pipeline._internal.lengths import lengths_of_one
from recsdk_pipeline.data import ClickBatch, IdColumn, ParquetData

TENSORS = ("dense", "labels", "timestamps")
OF_IDS = ("values", "lengths", "weights_or_none")


def tensors_of(batch: ClickBatch) -> list[torch.Tensor | None]:
    beside = [getattr(batch, name) for name in TENSORS]
    return beside + [getattr(batch.sparse, name)() for name in OF_IDS]


def assert_same(found: ClickBatch, expected: ClickBatch) -> None:
    assert found.sparse.keys() == expected.sparse.keys()
    assert found.sparse.stride() == expected.sparse.stride()
    for one, other in zip(tensors_of(found), tensors_of(expected), strict=True):
        if one is None or other is None:
            assert one is other
        else:
            assert one.dtype == other.dtype
            assert one.shape == other.shape
            assert torch.equal(one, other)


def passed(batch: ClickBatch) -> ClickBatch:
    """What a worker's batch becomes in the process that reads from it."""
    info = types.SimpleNamespace(id=0, num_workers=1)
    with mock.patch("recsdk_pipeline.data.batch.get_worker_info", return_value=info):
        message = ForkingPickler.dumps(batch)
    found: ClickBatch = ForkingPickler.loads(message)
    return found


@st.composite
def batches(draw: st.DrawFn) -> ClickBatch:
    num, features = draw(st.integers(0, 5)), draw(st.integers(1, 3))
    of_one = draw(st.booleans())
    size = num * features
    lengths = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    total = size if of_one else sum(lengths)
    ids = draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=total, max_size=total))
    kind = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]))
    sparse = KeyedJaggedTensor(
        keys=[f"f{n}" for n in range(features)],
        values=torch.tensor(ids, dtype=torch.int64),
        lengths=lengths_of_one(size) if of_one else torch.tensor(lengths, dtype=torch.int64),
        weights=draw(st.none() | st.just(torch.arange(total) / 8)),
    )
    return ClickBatch(
        dense=torch.arange(3 * num).reshape(num, 3).to(kind),
        sparse=sparse,
        labels=torch.ones(num, *draw(st.sampled_from([(), (2,)]))),
        timestamps=draw(st.none() | st.just(torch.arange(total))),
    )


@given(st.lists(batches(), max_size=4))
def test_batches_arrive_as_they_were_sent(given: list[ClickBatch]) -> None:
    held = [passed(batch) for batch in given]
    for found, expected in zip(held, given, strict=True):
        assert_same(found, expected)


def simple(num: int = 4, **options: Any) -> ClickBatch:
    sparse = KeyedJaggedTensor(["f"], torch.arange(num), lengths=lengths_of_one(num), **options)
    return ClickBatch(dense=torch.ones(num, 2), sparse=sparse, labels=torch.ones(num))


class OtherBatch(ClickBatch):
    """Which may have more than a batch has."""


class OtherTensor(KeyedJaggedTensor):
    """The same."""


def odd_batches() -> Iterator[Any]:
    """Batches that go torch's way."""
    batch = simple()
    batch.dense.requires_grad_()
    yield batch
    batch = simple()
    batch.dense = torch.arange(8.0).reshape(2, 4).T
    yield batch
    batch = simple()
    yield OtherBatch(dense=batch.dense, sparse=batch.sparse, labels=batch.labels)
    batch.sparse = OtherTensor(["f"], torch.arange(4), lengths=torch.ones(4, dtype=torch.int64))
    yield batch
    batch = simple()
    batch.sparse = KeyedJaggedTensor(
        ["a", "b"],
        torch.arange(4),
        lengths=torch.tensor([1, 1, 2]),
        stride_per_key_per_rank=[[1], [2]],
    )
    yield batch
    batch = simple()
    batch.sparse = KeyedJaggedTensor([], torch.arange(0), lengths=torch.zeros(0, dtype=torch.int64))
    yield batch
    yield simple(inverse_indices=(["f"], torch.arange(4)))
    batch = simple()
    batch.click_labels = torch.arange(4)  # type: ignore[attr-defined]
    yield batch
    batch = simple()
    batch.labels = None  # type: ignore[assignment]
    yield batch


@pytest.mark.parametrize("number", range(9))
def test_odd_batches_arrive_too(number: int) -> None:
    batch = list(odd_batches())[number]
    with mock.patch.object(Lender, "lend", side_effect=AssertionError):
        found = passed(batch)
    assert type(found) is type(batch)
    assert vars(found).keys() == vars(batch).keys()
    assert type(found.sparse) is type(batch.sparse)
    assert found.sparse.keys() == batch.sparse.keys()
    assert found.sparse.stride_per_key() == batch.sparse.stride_per_key()
    assert torch.equal(found.dense, batch.dense)
    indices = [each.sparse.inverse_indices_or_none() for each in (found, batch)]
    assert (indices[0] is None) == (indices[1] is None)


def test_only_a_worker_lends() -> None:
    with mock.patch.object(Lender, "lend", side_effect=AssertionError):
        assert_same(ForkingPickler.loads(ForkingPickler.dumps(simple())), simple())


@pytest.mark.parametrize("refused", ["os.memfd_create", "os.readlink"])
def test_batches_arrive_where_the_system_has_no_memory_to_lend(refused: str) -> None:
    sending._LENDER.forget()
    try:
        with mock.patch(refused, side_effect=PermissionError):
            assert_same(passed(simple()), simple())
        assert sending._LENDER.here() is None
    finally:
        sending._LENDER.forget()


def test_what_does_not_fit_goes_another_way() -> None:
    sending._LENDER.forget()
    try:
        with mock.patch.object(sending, "_MOST_LENT", 1 << 13):
            held = [passed(simple(100 + number)) for number in range(5)]
    finally:
        sending._LENDER.forget()
    for number, batch in enumerate(held):
        assert_same(batch, simple(100 + number))


class Places(IterableDataset[ClickBatch]):
    """Batches of other data than ours."""

    def __iter__(self) -> Iterator[ClickBatch]:
        for number in range(40):
            batch = simple(1000)
            batch.labels[:] = number
            yield batch


def test_a_worker_uses_memory_again() -> None:
    seen, places = [], set()
    for batch in DataLoader(Places(), batch_size=None, num_workers=1):
        seen.append(int(batch.labels[0]))
        places.add(batch.labels.data_ptr())
    assert seen == list(range(40))
    assert len(places) < 10


def written(folder: Path) -> str:
    num = 600
    columns = {
        "id": pa.array(np.arange(num) * 7919, pa.int64()),
        "bag": pa.array([[i] * (i % 3) for i in range(num)], pa.list_(pa.int64())),
        "time": pa.array([[i] * (i % 3) for i in range(num)], pa.list_(pa.int64())),
        "age": pa.array(np.arange(num) / 8, pa.float32()),
        "label": pa.array(np.arange(num) % 2, pa.float32()),
    }
    return parquet.write(folder, columns, [[100] * 3, [150] * 2])


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_epochs_of_workers_are_those_of_streams(tmp_path: Path, kind: Any) -> None:
    source = written(tmp_path)
    ids = ["id", IdColumn(name="bag", timestamp="time")]
    options: dict[str, Any] = {"ids": ids, "dense": ["age"], "labels": "label", "batch_size": 64}
    expected = []
    for data, worker in parquet.streams_of(source, 1, 2, **options):
        with worker:
            expected.append(list(data))
    loader = kind(
        ParquetData(source, **options),
        batch_size=None,
        num_workers=2,
        persistent_workers=True,
    )
    in_turns = [batch for pair in zip_longest(*expected) for batch in pair if batch is not None]
    for _ in range(2):
        held = list(loader)
        for found, batch in zip(held, in_turns, strict=True):
            assert_same(found, batch)
