"""What array arguments are taken, and what the errors for others say. Torch's are in nn/."""

from __future__ import annotations

import array
import ctypes
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from recsdk_core import (
    Bags,
    Evict,
    Index,
    JoinedBags,
    Table,
    combine_gradients,
    cut_bags,
    hash_strings,
    init,
    join_offsets,
    lease_tables,
    map_joined,
    pool_joined,
    pool_tables,
    update_tables,
)

KEYS = np.array([1, -1, 2**62])
ROWS = np.ones((3, 2), np.float32)


@pytest.fixture
def table() -> Table:
    return Table(2, initializer=init.Constant(value=1.0))


class Exporter:
    """Offers nothing but DLPack."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.values.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.values.__dlpack_device__()


def test_unsigned_keys_are_the_same_64_bits(table: Table) -> None:
    table.find_or_insert(np.array([2**64 - 1], np.uint64))
    assert -1 in table
    assert 2**64 - 1 in table


def test_int32_keys_are_widened(table: Table) -> None:
    table.find_or_insert(np.array([-1, 2**31 - 1], np.int32))
    assert -1 in table
    assert 2**31 - 1 in table


def test_room_whose_beginning_is_returned_must_be_an_array_with_parts() -> None:
    room = np.full(9, 7, np.int32)
    with pytest.raises(TypeError, match=r"filled must be a numpy array or a torch tensor, got Exp"):
        cut_bags(KEYS, None, [3], 1, filled=Exporter(room))
    assert (room == 7).all()


def of_index(call: Callable[[Index], Any]) -> Any:
    index = Index(max_rows=9, eviction=Evict.lru())
    index.map(KEYS, insert=True)
    return call(index)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("rows", lambda: of_index(lambda index: index.metadata(None))),
        ("rows", lambda: of_index(lambda index: index.note_changed(None))),
        ("rows", lambda: Bags(None, np.empty(0, np.uint8))),
        ("num_keys", lambda: join_offsets([], None, np.empty(1, np.int64))),
        ("counts", lambda: map_joined([], KEYS[:0], None, insert=False)),
        ("offsets", lambda: hash_strings(np.empty(0, np.uint8), None)),
        ("offsets", lambda: Table(2).pool(KEYS, None)),
    ],
)
def test_integers_that_a_call_needs_are_not_left_out(name: str, call: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match=f"^{name} must be a numpy array.* got builtins.NoneType"):
        call()


@pytest.mark.parametrize(
    ("tables", "problem"),
    [
        ("abc", "tables must be of recsdk_core.Table or Index, got 'a'"),
        ([Index(), 7], "tables must be of recsdk_core.Table or Index, got 7"),
        (5, "tables must be a sequence, got 5"),
    ],
)
def test_what_are_no_tables_is_told_before_the_keys(tables: Any, problem: str) -> None:
    for call in (
        lambda: map_joined(tables, KEYS, np.zeros(1, np.int64), insert=True),
        lambda: lease_tables(tables),
    ):
        with pytest.raises(TypeError, match=f"^{re.escape(problem)}"):
            call()


def as_ctypes(keys: Any) -> Any:
    """A buffer that does not tell its strides."""
    return (ctypes.c_int64 * len(keys))(*keys.tolist())


@pytest.mark.parametrize(
    "wrap", [Exporter, memoryview, lambda keys: array.array("q", keys), as_ctypes]
)
def test_dlpack_and_buffers(table: Table, wrap: Any) -> None:
    values = table.find_or_insert(wrap(KEYS))
    assert isinstance(values, np.ndarray)
    assert values.tolist() == [[1.0, 1.0]] * 3
    table.apply_gradients(wrap(KEYS), Exporter(ROWS))


def test_read_only_arrays_are_fine_as_inputs(table: Table) -> None:
    keys, rows = KEYS.copy(), ROWS.copy()
    keys.flags.writeable = rows.flags.writeable = False
    table.upsert(keys, rows)
    table.apply_gradients(keys, rows)


def test_subclasses_of_ndarray(table: Table) -> None:
    class Mine(np.ndarray[Any, Any]):
        pass

    assert table.find_or_insert(KEYS.view(Mine)).shape == (3, 2)


def test_int32_offsets(table: Table) -> None:
    pooled = table.pool(KEYS, np.array([0, 1, 3], np.int32), insert=True)
    assert pooled.tolist() == [[1.0, 1.0], [2.0, 2.0]]


@pytest.mark.parametrize("shape", [(1, 2), (0, 2)])
def test_strides_of_single_or_no_rows_do_not_matter(table: Table, shape: tuple[int, int]) -> None:
    values = np.asfortranarray(np.ones((5, 2), np.float32))[: shape[0]]
    table.upsert(KEYS[: shape[0]], np.ascontiguousarray(values))


BAD_KEYS = [
    ([1, 2], TypeError, "keys must be a numpy array.*got builtins.list; convert it with numpy"),
    (None, TypeError, "keys must be a numpy array.*NoneType"),
    (KEYS.astype(np.float64), TypeError, r"got numpy.ndarray of float64, shape \(3,\); pass keys"),
    (KEYS.astype(">i8"), TypeError, "keys must be int64 or uint64, got numpy.ndarray of >i8"),
    (KEYS.astype(np.int16), TypeError, "keys must be int64 or uint64"),
    (KEYS.reshape(1, 3), ValueError, r"keys must have shape \(N,\), got .*\(1, 3\)"),
    (np.array(5), ValueError, r"keys must have shape \(N,\), got .*\(\)"),
    (np.zeros((2, 2, 2), np.int64), ValueError, r"keys must have shape \(N,\)"),
    (KEYS[::2], ValueError, r"keys must be contiguous.*numpy.ascontiguousarray\(keys\)"),
    (KEYS[::-1], ValueError, "keys must be contiguous"),
    (
        np.frombuffer(b"x" * 17, np.uint8)[1:].view(np.int64),
        ValueError,
        r"keys must be contiguous in C order and aligned.*pass numpy.array\(keys\)",
    ),
    (
        memoryview(bytearray(17))[1:].cast("q"),
        ValueError,
        "keys must be contiguous in C order and aligned",
    ),
    (np.zeros(3, np.dtype([])), TypeError, "keys must be int64 or uint64"),
    # Buffers that do not tell their strides, of bytes or of two dimensions.
    (np.timedelta64(3), TypeError, "keys must be int64 or uint64, got numpy.timedelta64"),
    (np.datetime64(3, "s"), TypeError, "keys must be int64 or uint64, got numpy.datetime64"),
    (np.int64(3), ValueError, r"keys must have shape \(N,\), got numpy.int64"),
    (ctypes.c_int64(3), ValueError, r"keys must have shape \(N,\)"),
    ((ctypes.c_int64 * 3 * 2)(), ValueError, r"keys must have shape \(N,\)"),
    ((ctypes.c_char * 8)(), TypeError, "keys must be int64 or uint64"),
]


@pytest.mark.parametrize(("keys", "error", "message"), BAD_KEYS)
def test_bad_keys(table: Table, keys: Any, error: type[Exception], message: str) -> None:
    for call in (
        table.find_or_insert,
        table.lookup,
        table.erase,
        lambda k: table.map(k, insert=True),
    ):
        with pytest.raises(error, match=message):
            call(keys)
    assert len(table) == 0


BAD_VALUES = [
    (ROWS.astype(np.float64), TypeError, r"values must be float32.*pass values.astype"),
    (ROWS[:2], ValueError, r"values must have shape \(3, 2\), got .*\(2, 2\)"),
    (np.ones((3, 3), np.float32), ValueError, r"values must have shape \(3, 2\)"),
    (np.ones(6, np.float32), ValueError, r"values must have shape \(3, 2\)"),
    (np.asfortranarray(ROWS), ValueError, "values must be contiguous"),
    ([[1.0, 1.0]] * 3, TypeError, "values must be a numpy array"),
]


@pytest.mark.parametrize(("values", "error", "message"), BAD_VALUES)
def test_bad_values(table: Table, values: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        table.upsert(KEYS, values)
    with pytest.raises(error, match=message.replace("values", "gradients")):
        table.apply_gradients(KEYS, values)
    assert len(table) == 0
    assert table.update_count == 0


BAD_OFFSETS = [
    (None, TypeError, "offsets must be"),
    (np.array([], np.int64), ValueError, "offsets must have shape .*, got an empty array"),
    (np.array([0.0, 3.0]), TypeError, "offsets must be int64 or int32"),
    (np.array([[0, 3]]), ValueError, "offsets must have shape one dimension"),
    (np.array([0, 4]), ValueError, "offset"),
    (np.array([1, 3]), ValueError, "offset"),
    (np.array([0, 2]), ValueError, "offset"),
    (np.array([0, 2, 1, 3]), ValueError, "offset"),
    (np.array([0, -1, 3]), ValueError, "offset"),
]


@pytest.mark.parametrize(("offsets", "error", "message"), BAD_OFFSETS)
def test_bad_offsets(table: Table, offsets: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        table.pool(KEYS, offsets)
    grad = np.ones((max(len(offsets) - 1, 0) if offsets is not None else 0, 2), np.float32)
    with pytest.raises(error, match=message):
        table.pool_backward(KEYS, offsets, grad)
    assert table.update_count == 0


@pytest.mark.parametrize(
    "arguments",
    [
        *[(offsets,) for offsets, _, _ in BAD_OFFSETS],
        (np.array([0, 3]), np.ones(2, np.float32)),
        (np.array([0, 3]), None, "max"),
    ],
)
def test_bad_bags_of_keys_insert_and_count_nothing(table: Table, arguments: Any) -> None:
    table.find_or_insert(KEYS[:1])
    before = table.stats()
    with pytest.raises((TypeError, ValueError)):
        table.pool(KEYS, *arguments, insert=True)
    offsets, *rest = arguments
    with pytest.raises((TypeError, ValueError)):
        table.pool_backward(KEYS, offsets, np.ones((1, 2), np.float32), *rest)
    assert table.stats() == before


@pytest.mark.parametrize("pooling", ["max", "", None, 0])
def test_bad_pooling(table: Table, pooling: Any) -> None:
    with pytest.raises(ValueError, match="pooling must be 'sum' or 'mean', got"):
        table.pool(KEYS, np.array([0, 3]), None, pooling)


def test_bad_weights(table: Table) -> None:
    with pytest.raises(ValueError, match=r"weights must have shape \(3,\)"):
        table.pool(KEYS, np.array([0, 3]), np.ones(2, np.float32))
    with pytest.raises(ValueError, match="needs weights"):
        table.pool_backward(
            KEYS, np.array([0, 3]), np.ones((1, 2), np.float32), return_weights_grad=True
        )


def test_a_lease_of_another_table_or_a_released_one(table: Table) -> None:
    with pytest.raises(ValueError, match="table 'other'"):
        table.map(KEYS, insert=True, lease=Table(2, name="other").lease())
    lease = table.lease()
    lease.release()
    with pytest.raises(ValueError, match="lease is released; take a new one"):
        table.map(KEYS, insert=True, lease=lease)
    with pytest.raises(TypeError):
        table.map(KEYS, insert=True, lease=object())  # type: ignore[arg-type]


def mapped_bags(table: Table) -> Bags:
    return Bags(*table.map(KEYS, insert=True), np.array([0, 1, 3]))


def test_bad_bags(table: Table) -> None:
    rows, outcomes = table.map(KEYS, insert=True)
    with pytest.raises(ValueError, match=r"outcomes must have shape \(3,\)"):
        Bags(rows, outcomes[:2])
    with pytest.raises(TypeError, match="outcomes must be uint8"):
        Bags(rows, rows)
    with pytest.raises(TypeError, match="rows must be int64"):
        Bags(rows.astype(np.float32), outcomes)
    with pytest.raises(ValueError, match="offsets must have shape"):
        Bags(rows, outcomes, np.array([], np.int64))


def test_bags_of_a_resized_array(table: Table) -> None:
    rows, outcomes = table.map(KEYS, insert=True)
    bags = Bags(rows, outcomes)
    table.pool_rows(bags)
    rows.resize(2**20, refcheck=False)
    with pytest.raises(ValueError, match="rows was resized after it was given.*make new Bags"):
        table.pool_rows(bags)
    with pytest.raises(ValueError, match="rows was resized"):
        update_tables([(table, [(bags, ROWS, 0)])])
    assert table.update_count == 0


def test_rows_out_of_range(table: Table) -> None:
    rows, outcomes = table.map(KEYS, insert=True)
    for bad in (-1, 3, 2**40, -(2**63)):
        rows[1] = bad
        with pytest.raises(ValueError, match="row"):
            table.pool_rows(Bags(rows, outcomes))
        with pytest.raises(ValueError, match="row"):
            table.update_rows(Bags(rows, outcomes), ROWS)
    assert table.update_count == 0


BAD_OUTPUTS = [
    (np.zeros((1, 2), np.float32), 0, ValueError, "at least 2 rows"),
    (np.zeros((2, 2), np.float32), 1, ValueError, "2 columns from column 1 on"),
    (np.zeros((2, 2), np.float32), -1, ValueError, "2 columns from column -1 on"),
    (np.zeros((2, 2), np.float32), 2**63 - 1, ValueError, "from column 9223372036854775807 on"),
    (np.zeros((2, 2), np.float32), -(2**63), ValueError, "from column -9223372036854775808 on"),
    (np.zeros((2, 1), np.float32), 0, ValueError, "2 columns from column 0 on"),
    (np.zeros((2, 2), np.float32), 2**63, ValueError, "column must be an int below"),
    (np.zeros((2, 2), np.float64), 0, TypeError, "out must be float32"),
    (np.zeros((2, 2), np.float32, order="F"), 0, ValueError, "out must be contiguous"),
    (np.zeros(4, np.float32), 0, ValueError, r"\(bags, columns\)"),
]


@pytest.mark.parametrize(("out", "column", "error", "message"), BAD_OUTPUTS)
def test_bad_outputs(
    table: Table, out: Any, column: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        pool_tables([(table, [(mapped_bags(table), out, column)])])
    with pytest.raises(error, match=message.replace("out", "grad")):
        update_tables([(table, [(mapped_bags(table), out, column)])])
    assert table.update_count == 0


def test_read_only_outputs(table: Table) -> None:
    out = np.zeros((2, 2), np.float32)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out is written to and must not be read-only"):
        pool_tables([(table, [(mapped_bags(table), out, 0)])])
    with pytest.raises(ValueError, match="out is written to"):
        pool_tables([(table, [(mapped_bags(table), Exporter(out), 0)])])


def test_outputs_may_be_parts_of_a_matrix_and_dlpack(table: Table) -> None:
    matrix = np.zeros((4, 6), np.float32)
    pool_tables([(table, [(mapped_bags(table), Exporter(matrix[1:3, 1:5]), 1)])])
    assert matrix[1:3, 2:4].tolist() == [[1.0, 1.0], [2.0, 2.0]]
    assert matrix.sum() == 6.0


@pytest.mark.parametrize(
    ("calls", "error"),
    [
        ([1], TypeError),
        ([(1, 2)], TypeError),
        ([("a", [], 3)], ValueError),
        (None, TypeError),
    ],
)
def test_malformed_calls(calls: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        pool_tables(calls)
    with pytest.raises(error):
        update_tables(calls)


@pytest.mark.parametrize("value", [True, 1.5, "1", b"1", np.ones(2), [1]])
def test_what_stands_for_many_tables_is_named_if_it_is_wrong(table: Table, value: Any) -> None:
    with pytest.raises(TypeError, match="lease_tables: step must be an int|only integer scalar"):
        lease_tables([table], value)
    with pytest.raises(TypeError, match="blocks must be of CombineBlock, got"):
        combine_gradients([value], ROWS, np.zeros(6, np.float32))
    bags = JoinedBags(*table.map(KEYS, insert=True), *[np.array([n]) for n in (1, 3, 0)])
    with pytest.raises(TypeError, match="pooled must be a range of starts or None, got"):
        pool_joined([table], bags, (6,), value)
