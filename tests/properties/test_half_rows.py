"""Rows of 16 bits: how they are read, rounded and moved, against torch and the reference.

Shape letters: N keys, D row width.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsdk_core import Bags, CheckpointError, Default, Table, _ext, init, optim
from recsdk_core.testing import Operation, ReferenceTable, operations, vectors
from recsdk_core.testing._rounding import random_halves

DTypeName = Literal["bfloat16", "float16"]
DTYPES: tuple[DTypeName, ...] = ("bfloat16", "float16")
ROUNDINGS = ("stochastic", "nearest")
TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16}
KEYS = np.array([7, -7, 2**62, -(2**63), 0])


@pytest.fixture(params=_ext.available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set of this machine in turn."""
    before = _ext.isa()
    _ext.set_isa(request.param)
    yield request.param
    _ext.set_isa(before)


def every_half(dtype: DTypeName) -> torch.Tensor:
    """All 65,536 values of a type, as float32."""
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(TORCH[dtype]).float()


def floats_around(dtype: DTypeName) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Each value of a type, what lies half-way to the next, and the floats beside these."""
    values = every_half(dtype).numpy()
    values = values[np.isfinite(values)]
    largest = np.float32(torch.finfo(TORCH[dtype]).max)
    ordered = np.sort(np.unique(values)).astype(np.float64)
    halfway = np.concatenate([ordered, (ordered[:-1] + ordered[1:]) / 2]).astype(np.float32)
    beside = [np.nextafter(halfway, np.float32(s)) for s in (-np.inf, np.inf)]
    special = np.array([np.inf, -np.inf, -0.0, largest, -largest], np.float32)
    special[-2:] = np.nextafter(special[-2:] / 2 + special[-2:] / 512, special[:2]) * 2
    return np.concatenate([halfway, *beside, special])


def same_numbers(actual: Any, expected: Any) -> bool:
    """Equal, NaN to NaN, and zeros of the same sign."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    is_nan = np.isnan(expected)
    same = (actual == expected) & (np.signbit(actual) == np.signbit(expected))
    return bool((same | (is_nan & np.isnan(actual))).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_value_is_kept_as_it_is(dtype: DTypeName, isa: str) -> None:
    values = every_half(dtype).numpy().reshape(-1, 64)
    keys = np.arange(len(values))
    table = Table(64, dtype=dtype)
    table.upsert(keys, values)
    assert same_numbers(table.lookup(keys), values)
    pooled = np.where(values == 0, np.float32(0), values)  # 0 + (-0) is 0
    assert same_numbers(table.pool(keys, np.arange(len(keys) + 1)), pooled)
    [batch] = table.export()
    assert same_numbers(batch.weights, values)
    assert np.isnan(batch.weights).sum() == np.isnan(values).sum() > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_to_the_nearest_is_torchs(dtype: DTypeName, isa: str) -> None:
    """By upsert, by the first row, and by an update; too large a number becomes infinite."""
    values = floats_around(dtype)
    values = np.resize(values, (-(-len(values) // 67), 67))
    expected = torch.from_numpy(values).to(TORCH[dtype]).float().numpy()
    assert np.isinf(expected).any()
    keys = np.arange(len(values))
    table = Table(67, dtype=dtype)
    table.upsert(keys, values)
    assert same_numbers(table.lookup(keys), expected)

    def fill(_: Any, rows: Any) -> None:
        rows[:] = values

    made = Table(67, dtype=dtype, initializer=init.Custom(fn=fill))
    assert same_numbers(made.find_or_insert(keys), expected)

    trained = Table(67, dtype=dtype, rounding="nearest", optimizer=optim.SGD(lr=1.0))
    trained.upsert(keys, np.zeros_like(values))
    trained.apply_gradients(keys, -values)
    is_zero = values == 0  # 0 - (-0) is 0
    assert same_numbers(trained.lookup(keys), np.where(is_zero, np.float32(0), expected))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("initializer", [init.Uniform(low=-1, high=1), init.Normal(stddev=0.01)])
@pytest.mark.parametrize("dim", [1, 7, 8, 64, 100])
def test_first_rows_are_the_rounded_ones_of_float32(
    dtype: DTypeName, initializer: Any, dim: int, isa: str
) -> None:
    table = Table(dim, dtype=dtype, initializer=initializer)
    plain = Table(dim, initializer=initializer).find_or_insert(KEYS)
    expected = torch.from_numpy(plain).to(TORCH[dtype]).float().numpy()
    np.testing.assert_array_equal(table.find_or_insert(KEYS), expected)


OPTIMIZERS = [
    optim.SGD(lr=0.1),
    optim.SGD(lr=0.1, momentum=0.5, dampening=0.2),
    optim.RowwiseAdagrad(lr=0.1, weight_decay=0.1),
    optim.Adagrad(lr=0.1),
    optim.AdamW(lr=0.1, weight_decay=0.5, catch_up=True, clip_norm=1.0),
    optim.LAMB(lr=0.1),
    optim.FTRL(lr=0.1),
    optim.RMSprop(lr=0.1, centered=True),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
@given(
    data=st.data(),
    dtype=st.sampled_from(DTYPES),
    rounding=st.sampled_from(ROUNDINGS),
    dim=st.sampled_from([1, 5, 8, 17, 64, 67, 130]),
)
def test_training_has_the_bits_of_the_reference_on_every_instruction_set(
    optimizer: Any, data: st.DataObject, dtype: DTypeName, rounding: Any, dim: int
) -> None:
    config: dict[str, Any] = {"optimizer": optimizer, "dtype": dtype, "rounding": rounding}
    config |= {"initializer": init.Normal(), "seed": 5, "name": "half"}
    tables = [Table(dim, **config) for _ in _ext.available_isas()]
    reference = ReferenceTable(dim, **config)
    before = _ext.isa()
    for _ in range(data.draw(st.integers(1, 3))):
        keys = KEYS[data.draw(st.lists(st.integers(0, 4), max_size=6))]
        grads = data.draw(vectors(len(keys), dim, magnitude=1.0))
        reference.find_or_insert(keys)
        reference.apply_gradients(keys, grads)
        for name, table in zip(_ext.available_isas(), tables, strict=True):
            _ext.set_isa(name)
            table.find_or_insert(keys)
            table.apply_gradients(keys, grads)
    _ext.set_isa(before)
    for expected in reference.export():
        for table in tables:
            [actual] = table.export()
            np.testing.assert_array_equal(actual.weights, expected.weights)
            for name, state in expected.state.items():
                np.testing.assert_array_equal(actual.state[name], state)


@given(sequence=operations(3), dtype=st.sampled_from(DTYPES))
def test_operations_give_what_the_reference_gives(
    sequence: list[Operation], dtype: DTypeName
) -> None:
    config: dict[str, Any] = {"optimizer": optim.Adagrad(lr=0.1), "dtype": dtype}
    config["default"] = Default.constant(0.1)  # which no 16-bit number is
    table, model = Table(3, **config), ReferenceTable(3, **config)
    for operation in sequence:
        np.testing.assert_equal(operation.run(table), operation.run(model))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 2.0**-16])
def test_stochastic_rounding_is_right_on_average(dtype: DTypeName, scale: float) -> None:
    """Means over many keys, of normal numbers and of those that float16 holds as subnormal."""
    dim, num_keys = 16, 4096
    targets = (np.linspace(0.5, 0.99, dim, dtype=np.float32) * scale).astype(np.float32)
    table = Table(dim, dtype=dtype, optimizer=optim.SGD(lr=1.0))
    keys = np.arange(num_keys)
    table.upsert(keys, np.zeros((num_keys, dim), np.float32))
    table.apply_gradients(keys, np.broadcast_to(-targets, (num_keys, dim)).copy())
    rows = table.lookup(keys).astype(np.float64)
    below = torch.from_numpy(targets).to(TORCH[dtype]).float().numpy()
    spacing = np.max(np.abs(rows - below), axis=0)
    error = np.abs(rows.mean(axis=0) - targets)
    assert (error <= 4 * 0.5 * spacing / np.sqrt(num_keys) + 1e-12).all()
    assert (np.array([len(np.unique(column)) for column in rows.T]) <= 2).all()
    assert len(np.unique(rows[:, 1])) == 2


KEY_PATTERNS = {
    "counted": np.arange(2048),
    "high bits": np.arange(2048) << 52,
    "multiples": np.arange(-1024, 1024) * 0x9E3779B9,
}


@pytest.mark.parametrize("pattern", KEY_PATTERNS)
def test_random_bits_are_uniform_and_independent(pattern: str) -> None:
    """Over keys, columns and updates that follow each other, as those of real tables do."""
    keys, dim, num_updates = KEY_PATTERNS[pattern], 32, 8
    bits_TND = np.stack([random_halves(3, "bits", keys, t, dim) for t in range(1, num_updates + 1)])
    count = bits_TND.size

    def assert_uniform(values: Any, num_values: int) -> None:
        counts = np.bincount(values.reshape(-1), minlength=num_values)
        expected = values.size / num_values
        chi_square = ((counts - expected) ** 2 / expected).sum()
        assert abs(chi_square - (num_values - 1)) < 5 * np.sqrt(2 * num_values)

    assert_uniform(bits_TND >> 4, 1 << 12)
    assert_uniform(bits_TND & 0xFFF, 1 << 12)
    low, high = bits_TND & 0xF, bits_TND >> 12
    for part in (low, high):
        for axis in range(3):  # of neighbours along each axis, and of those two apart
            for distance in (1, 2):
                ahead = np.delete(part, np.s_[:distance], axis)
                behind = np.delete(part, np.s_[-distance:], axis)
                assert_uniform(ahead << 4 | behind, 256)
    unit = bits_TND / 2**16 - 0.5 + 2**-17
    assert abs(unit.mean()) < 5 / np.sqrt(12 * count)
    columns = unit.reshape(-1, dim)
    assert (np.abs(columns.mean(axis=0)) < 5 / np.sqrt(12 * len(columns))).all()
    correlation = np.corrcoef(columns.T) - np.eye(dim)
    assert np.abs(correlation).max() < 6 / np.sqrt(len(columns))
    # Sums over rows and over updates vary as those of independent numbers do.
    for axis in range(3):
        n = unit.shape[axis]
        sums = unit.sum(axis=axis).reshape(-1)
        assert abs(sums.var() / (n / 12) - 1) < 6 * np.sqrt(2 / len(sums))


def test_small_steps_count_on_average_but_are_lost_to_the_nearest() -> None:
    moved = {}
    for rounding in ("stochastic", "nearest"):
        optimizer = optim.SGD(lr=1.0)
        table = Table(64, dtype="bfloat16", rounding=rounding, optimizer=optimizer)  # type: ignore[arg-type]
        table.upsert(KEYS[:1], np.ones((1, 64), np.float32))
        for _ in range(200):
            table.apply_gradients(KEYS[:1], np.full((1, 64), 2**-12, np.float32))
        moved[rounding] = 1 - table.lookup(KEYS[:1]).mean()
    assert moved["nearest"] == 0
    assert abs(moved["stochastic"] - 200 * 2**-12) < 0.005


def test_rounding_depends_on_key_update_seed_and_name_and_on_nothing_else() -> None:
    grads = np.random.default_rng(1).normal(size=(5, 16)).astype(np.float32)
    zeros = np.zeros((5, 16), np.float32)

    def trained(order: Any, *, update_count: int = 0, **config: Any) -> Any:
        options: dict[str, Any] = {"dtype": "bfloat16", "optimizer": optim.SGD(lr=1.0), **config}
        table = Table(16, **options)
        table.upsert(KEYS[order], zeros)
        table.update_count = update_count
        table.apply_gradients(KEYS[order], grads[order])
        return table.lookup(KEYS)

    expected = trained(np.arange(5))
    np.testing.assert_array_equal(trained(np.array([3, 1, 4, 0, 2]), hash_seed=3), expected)
    np.testing.assert_array_equal(trained(np.arange(5), num_threads=1), expected)
    for other in ({"seed": 1}, {"name": "other"}, {"update_count": 1}):
        assert (trained(np.arange(5), **other) != expected).any()  # type: ignore[arg-type]
    equal = np.broadcast_to(grads[0], grads.shape).copy()
    grads = equal
    rows = trained(np.arange(5))
    assert (rows[0] != rows[1]).any()  # keys differ


@pytest.mark.parametrize("dtype", DTYPES)
def test_too_large_a_weight_becomes_infinite_and_no_number_stays_none(dtype: DTypeName) -> None:
    largest = torch.finfo(TORCH[dtype]).max
    for rounding in ROUNDINGS:
        optimizer = optim.SGD(lr=1.0)
        table = Table(3, dtype=dtype, rounding=rounding, optimizer=optimizer)  # type: ignore[arg-type]
        table.upsert(KEYS[:1], np.array([[largest, -largest, 0]], np.float32))
        change = np.array([[-largest / 4, largest / 4, np.nan]], np.float32)
        table.apply_gradients(KEYS[:1], change)
        row = table.lookup(KEYS[:1])[0]
        assert row[:2].tolist() == [np.inf, -np.inf]
        assert np.isnan(row[2])
        assert table.stats().nonfinite == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_of_weights_of_bags_reads_what_is_stored(dtype: DTypeName) -> None:
    table, reference = (make(20, dtype=dtype) for make in (Table, ReferenceTable))
    for made in (table, reference):
        made.find_or_insert(KEYS)
    weights = np.array([1, 2, 3, 4, 5], np.float32)
    grad = np.random.default_rng(2).normal(size=(2, 20)).astype(np.float32)
    arguments = (KEYS, np.array([0, 2, 5]), grad, weights)
    found = [
        made.pool_backward(*arguments, return_weights_grad=True) for made in (table, reference)
    ]
    np.testing.assert_array_equal(*found)


def test_rows_take_half_the_memory() -> None:
    """Bytes of records, keys and states; the index is the same for every type."""

    def row_bytes(optimizer: Any, dtype: Any) -> float:
        table = Table(64, optimizer=optimizer, dtype=dtype)
        table.find_or_insert(np.arange(10_000))
        stats = table.stats()
        return (stats.row_bytes + stats.metadata_bytes) / 10_000

    for optimizer, least in [
        (optim.SGD(), 1.9),
        (optim.RowwiseAdagrad(), 1.9),
        (optim.Adagrad(), 1.3),
    ]:
        for dtype in DTYPES:
            assert row_bytes(optimizer, "float32") / row_bytes(optimizer, dtype) >= least


@pytest.mark.parametrize("dtype", DTYPES)
def test_checkpoints_have_the_stored_bits(dtype: DTypeName, tmp_path: Path) -> None:
    table, restored = (Table(5, dtype=dtype, optimizer=optim.Adagrad(lr=0.1)) for _ in "12")
    table.find_or_insert(KEYS)
    grads = np.random.default_rng(3).normal(size=(5, 5)).astype(np.float32)
    table.apply_gradients(KEYS, grads)
    table.save(tmp_path / "saved")
    restored.load(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=f"saved with weights as {dtype}, it now has float32"):
        Table(5, optimizer=optim.Adagrad(lr=0.1)).load(tmp_path / "saved")
    np.testing.assert_array_equal(restored.lookup(KEYS), table.lookup(KEYS))
    for trained in (table, restored):
        trained.apply_gradients(KEYS, grads)
    np.testing.assert_array_equal(restored.lookup(KEYS), table.lookup(KEYS))


def test_copies_and_bad_arguments() -> None:
    table = Table(4, dtype="bfloat16", rounding="nearest", optimizer=optim.Adagrad())
    table.find_or_insert(KEYS)
    made = copy.deepcopy(table)
    assert (made.dtype, made.rounding) == ("bfloat16", "nearest")
    np.testing.assert_array_equal(made.lookup(KEYS), table.lookup(KEYS))
    bags = Bags(*made.map(KEYS, insert=False), np.array([0, 5]))
    np.testing.assert_array_equal(made.pool_rows(bags)[0], table.pool(KEYS, np.array([0, 5]))[0])
    with pytest.raises(ValueError, match="dtype must be 'float32', 'bfloat16' or 'float16', got"):
        Table(4, dtype="half")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rounding must be 'stochastic' or 'nearest', got 'up'"):
        Table(4, rounding="up")  # type: ignore[arg-type]
