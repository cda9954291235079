"""Row files and cuts as Python has them: callables for bytes, blocks of arrays, and the GIL."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recsdk_core import BusyError, CheckpointError, Table, _ext, optim

TOKEN = bytes(range(16))


def lived_table() -> Table:
    table = Table(3, optimizer=optim.Adagrad(lr=0.1))
    table.find_or_insert(np.arange(5000))
    table.apply_gradients(np.arange(100), np.ones((100, 3), dtype=np.float32))
    return table


def written(table: Table, **arguments: Any) -> bytes:
    parts: list[bytes] = []
    cut = table._engine.cut(False, None)
    summary = _ext.write_rows(cut, lambda view: parts.append(bytes(view)), TOKEN, **arguments)
    cut.finish(True)
    assert summary.num_bytes == sum(map(len, parts))
    return b"".join(parts)


def reader(data: bytes) -> _ext.RowFile:
    return _ext.RowFile(lambda offset, size: data[offset : offset + size], len(data), "data")


def blocks(data: bytes) -> list[_ext.RowBlock]:
    file = reader(data)
    return list(iter(file.next_block, None))


def test_descriptors_and_callables_write_the_same_bytes(tmp_path: Path) -> None:
    table = lived_table()
    data = written(table, block_bytes=8192)
    path = tmp_path / "rows"
    with path.open("wb") as file:
        _ext.write_rows(table._engine.cut(False, None), file.fileno(), TOKEN, block_bytes=8192)
    assert path.read_bytes() == data
    with path.open("rb") as file:
        opened = _ext.RowFile(file.fileno(), len(data), "rows")
        assert sum(len(block.keys) for block in iter(opened.next_block, None)) == 5000
        assert opened.summary().num_rows == 5000


def test_a_raw_file_may_take_less_than_it_is_given() -> None:
    parts: list[bytes] = []

    def write_some(view: memoryview) -> int:
        parts.append(bytes(view[:1000]))
        return len(parts[-1])

    table = lived_table()
    _ext.write_rows(table._engine.cut(False, None), write_some, TOKEN)
    assert b"".join(parts) == written(table)


def test_views_end_with_the_call() -> None:
    kept: list[memoryview] = []
    _ext.write_rows(lived_table()._engine.cut(False, None), kept.append, TOKEN)
    with pytest.raises(ValueError, match="released"):
        bytes(kept[0])


def fail(*_: object) -> None:
    raise KeyError("as the test wants it")


@pytest.mark.parametrize("arguments", [{"write": fail}, {"progress": fail}])
def test_what_callables_raise_comes_through_and_ends_the_cut(arguments: dict[str, Any]) -> None:
    table = lived_table()
    cut = table._engine.cut(False, None)
    with pytest.raises(KeyError, match="as the test wants it"):
        _ext.write_rows(cut, **{"write": lambda view: None, "token": TOKEN, **arguments})
    assert cut.is_finished
    table._engine.cut(False, None)


@pytest.mark.parametrize(
    ("read", "error"),
    [
        (fail, KeyError),
        (lambda offset, size: b"x" * (size + 1), TypeError),
        (lambda offset, size: None, TypeError),
        (lambda offset, size: b"", CheckpointError),
        ("a path", TypeError),
        (-1, TypeError),
    ],
)
def test_sources_that_cannot_be_read(read: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        _ext.RowFile(read, 1000, "nothing")


def test_blocks_are_read_only_views_that_outlive_their_file() -> None:
    first = blocks(written(lived_table(), block_bytes=4096))[0]
    gc.collect()
    assert first.kind == "rows"
    assert first.keys.tolist() == list(range(len(first.keys)))
    assert {name: field.shape for name, field in first.fields.items()} == {
        "weight": (len(first.keys), 3),
        "sum": (len(first.keys), 3),
    }
    with pytest.raises(ValueError, match="read-only"):
        first.fields["weight"][0, 0] = 1.0


def test_files_without_a_table() -> None:
    keys = np.array([5, -1])
    fields = [("weight", "bfloat16", 2), ("n", "int64", 1)]
    arrays = {
        "weight": np.array([[1, 2], [3, 4]], dtype=np.uint16),
        "n": np.array([[7], [8]]),
    }
    content = [
        _ext.RowBlock.rows(keys, arrays),
        _ext.RowBlock.rows(keys + 10, arrays),
        _ext.RowBlock.erased(np.array([3])),
    ]
    parts: list[bytes] = []
    write: Callable[[memoryview], None] = lambda view: parts.append(bytes(view))  # noqa: E731
    _ext.write_row_file(write, "delta", 2, fields, content, TOKEN)
    data = b"".join(parts)
    file = reader(data)
    assert (file.kind, file.dim, file.token, file.fields) == ("delta", 2, TOKEN, tuple(fields))
    rows, erased = blocks(data)
    assert rows.keys.tolist() == [5, -1, 15, 9]
    assert rows.fields["weight"].tolist() == [[1, 2], [3, 4]] * 2
    assert erased.keys.tolist() == [3]


ONES = np.ones((2, 4), dtype=np.float32)


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({}, r"must have 'weight', got \[\]"),
        ({"weight": ONES[:, :3].copy()}, r"shape \(2, 2\), got .* of float32, shape \(2, 3\)"),
        ({"weight": ONES[:1, :2]}, r"shape \(2, 2\), got .* of float32, shape \(1, 2\)"),
        ({"weight": np.ones((2, 2))}, r"array of float32 .*, got .* of float64, shape \(2, 2\)"),
        ({"weight": ONES[:, ::2]}, r"a contiguous array .*, got numpy.ndarray of float32"),
        ({"weight": [1, 2]}, "a contiguous array .*, got builtins.list"),
        (
            {"weight": ONES[:, :2].copy(), "more": ONES[:, :1]},
            r"must be those of the file, 1, got \['weight', 'more'\]",
        ),
    ],
)
def test_blocks_that_do_not_fit_the_file(arrays: dict[str, Any], text: str) -> None:
    block = _ext.RowBlock.rows(np.array([1, 2]), arrays)
    with pytest.raises(ValueError, match=text):
        _ext.write_row_file(
            lambda view: None, "snapshot", 2, [("weight", "float32", 2)], [block], TOKEN
        )


def test_a_cut_that_is_dropped_has_never_been() -> None:
    table = lived_table()
    cut = table._engine.cut(False, None)
    with pytest.raises(BusyError, match="a cut is open"):
        table._engine.cut(False, None)
    del cut
    table._engine.cut(False, None)
    assert not table._engine.is_tracking()


def test_a_full_disk_is_a_checkpoint_error() -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(CheckpointError, match=r"'the file': No space left"):
            _ext.write_rows(
                lived_table()._engine.cut(False, None), descriptor, TOKEN, name="the file"
            )
    finally:
        os.close(descriptor)
