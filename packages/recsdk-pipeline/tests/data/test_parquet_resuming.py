"""Each row is read exactly once: by any ranks and workers, after any stops, at other numbers."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pipeline_support import parquet
from torchdata.stateful_dataloader import StatefulDataLoader

from interrupting import Interrupting
from recsdk_pipeline import HybridTrainPipelineSparseDist
from recsdk_pipeline import data as reading
from recsdk_pipeline.data import BadLines, ParquetData
from recsdk_pipeline.data.dealing import Group, Layout, Plan

DATA = str(Path(reading.__file__).parent)
sizes = st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=1, max_size=3)


@dataclass(frozen=True)
class Run:
    """One start of a training: its layout, and the batches that each stream reads of it."""

    world_size: int
    num_workers: int
    batch_size: int
    stops: tuple[int, ...]
    moment: int | None = None
    """Of the Ctrl-C that comes as the next batch of each stream is read, if one does."""

    def stop(self, stream: int) -> int:
        return self.stops[stream % len(self.stops)]


runs = st.builds(
    Run,
    world_size=st.integers(1, 4),
    num_workers=st.integers(1, 3),
    batch_size=st.integers(1, 7),
    stops=st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple),
    moment=st.none() | st.integers(0, 60) | st.integers(0, 600),
)


def columns_of(num_rows: int) -> dict[str, Any]:
    ids = range(num_rows)
    return {
        "id": pa.array(ids, pa.int64()),
        "part": pa.array([each % 3 for each in ids], pa.int64()),
        "label": pa.array([None if each % 7 == 5 else 1.0 for each in ids], pa.float32()),
    }


def ids_of(batch: Any) -> list[int]:
    found: list[int] = batch.sparse["id"].values().tolist()
    return found


def read(run: Run | None, source: str, state: Any, **options: Any) -> tuple[list[int], list[Any]]:
    """The ids that all streams read until they stop, and their states; None: to the end."""
    layout = run or Run(2, 2, 3, (0,))
    found: list[int] = []
    states = []
    streams = parquet.streams_of(
        source, layout.world_size, layout.num_workers, batch_size=layout.batch_size, **options
    )
    for number, (data, inside) in enumerate(streams):
        with inside:
            if state is not None:
                data.load_state_dict(state)
            last = None if run is None else run.stop(number)
            batches = iter(data)
            for batch in itertools.islice(batches, last):
                found += ids_of(batch)
            kept = []
            if run is not None and run.moment is not None:
                batch, error = interrupted(batches, run.moment)
                found += [] if batch is None else ids_of(batch)
                kept.append(error)
            states.append(data.state_dict())
    return found, states


def interrupted(batches: Iterator[Any], moment: int) -> tuple[Any, KeyboardInterrupt | None]:
    """The next batch, if there is one, or the error of a Ctrl-C that came as it was read."""
    try:
        return Interrupting(moment, (DATA,)).call(lambda: next(batches, None)), None
    except KeyboardInterrupt as error:
        return None, error


@pytest.mark.filterwarnings("ignore:rank . of . has nothing to read")
@settings(max_examples=2 * settings().max_examples)
@example(  # a Ctrl-C as the batch is made of its rows
    sizes=[[9, 9]],
    history=[Run(1, 1, 4, (1,), moment=25)],
    seed=0,
    epoch=0,
    window_bytes=10**6,
    shuffle=False,
    is_filtered=False,
    num_threads=1,
)
@given(
    sizes=sizes,
    history=st.lists(runs, max_size=3),
    seed=st.integers(0, 3),
    epoch=st.integers(0, 2),
    window_bytes=st.sampled_from([1, 100, 400, 10**6]),
    shuffle=st.booleans(),
    is_filtered=st.booleans(),
    num_threads=st.sampled_from([None, 1, 3]),
)
def test_every_row_is_read_once(
    sizes: list[list[int]],
    history: list[Run],
    seed: int,
    epoch: int,
    window_bytes: int,
    shuffle: bool,
    is_filtered: bool,
    num_threads: int | None,
) -> None:
    num_rows = sum(map(sum, sizes))
    with tempfile.TemporaryDirectory() as folder:
        source = parquet.write(Path(folder), columns_of(num_rows), sizes)
        found: list[int] = []
        state = None
        for run in [*history, None]:
            options = {
                "ids": ["id"],
                "labels": "label",
                "seed": seed,
                "window_bytes": window_bytes,
                "shuffle": shuffle,
                "where": ds.field("part") != 1 if is_filtered else None,
                "bad": BadLines(limit=10**6),
                "num_threads": num_threads,
            }
            if state is None:
                # The epoch is part of the state, so the first run alone is told it.
                ids, states = read_epoch(run, source, epoch, options)
            else:
                ids, states = read(run, source, state, **options)
            found += ids
            state = ParquetData.merge(states)
    good = [i for i in range(num_rows) if i % 7 != 5 and not (is_filtered and i % 3 == 1)]
    assert sorted(found) == good


def read_epoch(
    run: Run | None, source: str, epoch: int, options: dict[str, Any]
) -> tuple[list[int], list[Any]]:
    data = ParquetData(source, rank=0, world_size=1, batch_size=1, **options)
    data.set_epoch(epoch)
    start = {**data.state_dict(), "stream": None}
    return read(run, source, start, **options)


@settings(max_examples=2 * settings().max_examples)
@given(
    sizes=sizes,
    layout=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    batch_size=st.integers(1, 7),
    window_bytes=st.sampled_from([1, 100, 10**6]),
    stop=st.integers(0, 6),
)
def test_a_stream_goes_on_to_the_batch(
    sizes: list[list[int]],
    layout: tuple[int, int],
    batch_size: int,
    window_bytes: int,
    stop: int,
) -> None:
    num_rows = sum(map(sum, sizes))
    options: dict[str, Any] = {
        "ids": ["id"],
        "labels": "label",
        "batch_size": batch_size,
        "window_bytes": window_bytes,
        "seed": 1,
    }
    with tempfile.TemporaryDirectory() as folder:
        source = parquet.write(Path(folder), columns_of(num_rows), sizes)
        several = zip(
            *(parquet.streams_of(source, *layout, **options) for _ in range(3)), strict=True
        )
        for (whole, inside), (first, _), (second, again) in several:
            for each in (whole, first, second):
                each.bad = BadLines(limit=num_rows)
            with inside:
                expected = [ids_of(batch) for batch in whole]
                begun = [ids_of(batch) for batch in itertools.islice(iter(first), stop)]
                state = first.state_dict()
            with again:
                second.load_state_dict(state)
                rest = [ids_of(batch) for batch in second]
            assert begun + rest == expected
            assert second.bad.count == whole.bad.count
            assert all(len(batch) == batch_size for batch in expected[:-1])


@given(
    rows=st.lists(st.integers(0, 50), max_size=30),
    layout=st.builds(Layout, st.integers(1, 5), st.integers(1, 4)),
    window_bytes=st.integers(1, 2000),
    seed=st.integers(0, 5),
)
def test_shares_differ_by_a_row_group_and_windows_keep_their_size(
    rows: list[int], layout: Layout, window_bytes: int, seed: int
) -> None:
    groups = tuple(Group(rows=each, bytes=16 * each) for each in rows)
    plan = Plan(groups=groups, window_bytes=window_bytes, seed=seed, epoch=0, shuffle=True)
    streams = plan.streams([], layout)
    assert streams == plan.streams([], layout)
    loads = [sum(window.rows for window in stream) for stream in streams]
    assert sum(loads) == sum(rows)
    workers = layout.num_workers
    ranks = [loads[r * workers : (r + 1) * workers] for r in range(layout.world_size)]
    largest = max(rows, default=0)
    for level in ([sum(rank) for rank in ranks], *ranks):
        assert max(level) - min(level) <= largest
    for window in itertools.chain.from_iterable(streams):
        assert window.rows == 1 or window.rows * 16 <= window_bytes


def made(folder: Path, num_rows: int = 60) -> str:
    columns = columns_of(num_rows)
    columns["label"] = pa.array([1.0] * num_rows, pa.float32())
    return parquet.write(folder, columns, [[7] * (num_rows // 7) + [num_rows % 7]])


def loader_of(source: str, rank: int, world_size: int, workers: int, state: Any = None) -> Any:
    data = ParquetData(
        source, ids=["id"], labels="label", batch_size=4, rank=rank, world_size=world_size
    )
    if state is not None:
        data.load_state_dict(state)
    return StatefulDataLoader(data, batch_size=None, num_workers=workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_resumes_and_at_other_ranks_too(tmp_path: Path, workers: int) -> None:
    source = made(tmp_path)
    loaders = [loader_of(source, rank, 2, workers) for rank in range(2)]
    begun = [[ids_of(b) for b in itertools.islice(loader, 3)] for loader in loaders]
    states = [loader.state_dict() for loader in loaders]
    same = loader_of(source, 0, 2, workers)
    same.load_state_dict(states[0])
    whole = [ids_of(batch) for batch in loader_of(source, 0, 2, workers)]
    assert begun[0] + [ids_of(batch) for batch in same] == whole
    state = ParquetData.merge(states)
    rest = [ids_of(b) for rank in range(3) for b in loader_of(source, rank, 3, 1, state)]
    everything = itertools.chain.from_iterable([*begun[0], *begun[1], *rest])
    assert sorted(everything) == list(range(60))


class Summing(torch.nn.Module):
    """A model of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, batch: Any) -> tuple[torch.Tensor, list[int]]:
        return (self.weight * batch.labels).sum(), ids_of(batch)


@pytest.mark.parametrize("workers", [None, 2])
def test_a_pipeline_keeps_the_position(tmp_path: Path, workers: int | None) -> None:
    source = made(tmp_path)

    def begin() -> tuple[Any, Any]:
        data: Any = loader_of(source, 0, 1, workers or 0)
        data = data.dataset if workers is None else data
        model = Summing()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pipeline: Any = HybridTrainPipelineSparseDist(
            model, optimizer, torch.device("cpu"), data=data
        )
        return data, pipeline

    def trained(data: Any, pipeline: Any, most: int | None) -> list[int]:
        batches, found = iter(data), []
        with contextlib.suppress(StopIteration):
            for _ in itertools.count() if most is None else range(most):
                found += pipeline.progress(batches)
        return found

    data, pipeline = begin()
    begun = trained(data, pipeline, 5)
    state = pipeline.state_dict()
    data, pipeline = begin()
    pipeline.load_state_dict(state)
    rest = trained(data, pipeline, None)
    assert len(begun) == 20
    assert sorted(begun + rest) == list(range(60))
    merged = ParquetData.merge([state])
    elsewhere = [ids_of(b) for rank in range(2) for b in loader_of(source, rank, 2, 0, merged)]
    assert sorted(itertools.chain(begun, *elsewhere)) == list(range(60))


def test_epochs_differ_and_are_the_same_again(tmp_path: Path) -> None:
    data = loader_of(made(tmp_path), 0, 1, 0).dataset
    orders = []
    for epoch in (0, 1, 0):
        data.set_epoch(epoch)
        orders.append([i for batch in data for i in ids_of(batch)])
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[1]) == list(range(60))


def test_states_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    source = made(tmp_path / "one")
    states = [loader_of(source, rank, 2, 0).dataset.state_dict() for rank in range(2)]
    other = loader_of(made(tmp_path / "other", 50), 0, 2, 0).dataset
    with pytest.raises(ValueError, match="is of other files, columns, filter"):
        other.load_state_dict(states[0])
    with pytest.raises(ValueError, match=r"merge the states of all by ParquetData\.merge"):
        loader_of(source, 0, 1, 0, states[0])
    with pytest.raises(ValueError, match=r"streams 0 to 1; .* got those of \[0\]"):
        ParquetData.merge(states[:1])
    with pytest.raises(ValueError, match=r"got those of \[0, 0\]"):
        ParquetData.merge([states[0], states[0]])
    with pytest.raises(ValueError, match="differ in 'epoch'"):
        ParquetData.merge([states[0], {**states[1], "epoch": 1}])
    with pytest.raises(ValueError, match="no state of data in files was given"):
        ParquetData.merge([{}])
    with pytest.raises(ValueError, match="load it as it is"):
        ParquetData.merge([ParquetData.merge(states)])
    with pytest.raises(ValueError, match="snapshot_every_n_steps=1"):
        ParquetData.merge([{"_steps_since_snapshot": 2, "inner": states[0]}])
    with pytest.raises(ValueError, match="no state of ParquetData"):
        other.load_state_dict({})
