"""Frozen int8 and int4 rows have the bits of FBGEMM's and torch's own conversions.

Shape letters: N rows, D row width.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fbgemm_gpu  # noqa: F401  it registers the operators
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsdk_core import Table
from recsdk_core.serving import ServingTable, freeze
from recsdk_core.serving.manifest import FrozenDType

CONVERSIONS: dict[str, tuple[FrozenDType, Any, Any]] = {
    "fbgemm_int8": (
        "int8",
        torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized,
        torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat,
    ),
    "fbgemm_int4": (
        "int4",
        lambda weights: torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(weights, 4),
        lambda rows: torch.ops.fbgemm.FusedNBitRowwiseQuantizedSBHalfToFloat(rows, 4),
    ),
    "torch_int8": (
        "int8",
        torch.ops.quantized.embedding_bag_byte_prepack,
        torch.ops.quantized.embedding_bag_byte_unpack,
    ),
    "torch_int4": (
        "int4",
        torch.ops.quantized.embedding_bag_4bit_prepack,
        torch.ops.quantized.embedding_bag_4bit_unpack,
    ),
}


def stored_rows(folder: Path, weights: np.ndarray, dtype: FrozenDType) -> np.ndarray:
    """Weights (N, D) frozen as the rows of keys 0 to N - 1: uint8 (N, bytes of a row)."""
    table = Table(dim=weights.shape[1], name="t")
    table.upsert(np.arange(len(weights)), weights)
    table.save(folder / "checkpoint", overwrite=True)
    manifest = freeze(folder / "checkpoint", folder / "frozen", dtype=dtype, overwrite=True)
    [file] = manifest.tables[0].files
    raw = np.fromfile(folder / "frozen" / file.path, np.uint8)
    (row_bytes,) = raw[32:40].view(np.int64)
    records = raw[len(raw) - len(weights) * (8 + int(row_bytes)) :].reshape(len(weights), -1)
    order = np.argsort(records[:, :8].copy().view(np.int64)[:, 0])
    rows: np.ndarray = records[order, 8:]
    return rows


@st.composite
def matrices(draw: st.DrawFn) -> np.ndarray:
    """Weights of all magnitudes, with rows that are constant, zero or of two values."""
    dim = draw(st.sampled_from([4, 8, 12, 20, 32, 68]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    weights = rng.normal(size=(40, dim)) * 10.0 ** rng.integers(-9, 4, (40, 1))
    weights[0] = draw(st.floats(-1000, 1000, width=32))
    weights[1] = 0.0
    weights[2] = -0.0
    weights[3, ::2] = draw(st.floats(-10, 10, width=32))
    weights[4] = np.arange(dim)
    weights[5] = np.round(weights[5])
    return weights.astype(np.float32)


def with_positive_zeros(rows: np.ndarray, dtype: FrozenDType) -> np.ndarray:
    """Rows whose bias is no negative zero: which zero is the least of a row is nobody's promise."""
    size = 4 if dtype == "int8" else 2
    bias = rows[:, -size:].copy().view(np.float32 if dtype == "int8" else np.float16)
    made = rows.copy()
    made[:, -size:][bias[:, 0] == 0] = 0
    return made


@pytest.mark.parametrize("name", CONVERSIONS)
@settings(max_examples=20)
@given(weights=matrices())
def test_rows_have_the_bits_of_the_peers_conversion(
    tmp_path_factory: pytest.TempPathFactory, name: str, weights: np.ndarray
) -> None:
    dtype, convert, widen = CONVERSIONS[name]
    folder = tmp_path_factory.mktemp("rows")
    rows = stored_rows(folder, weights, dtype)
    wanted = convert(torch.from_numpy(weights))
    positive = with_positive_zeros(wanted.numpy(), dtype)
    np.testing.assert_array_equal(with_positive_zeros(rows, dtype), positive)
    # The peers round the product and the sum once, where the processor can.
    served = ServingTable(folder / "frozen").lookup(np.arange(len(weights)))
    largest = np.abs(weights).max(axis=1, keepdims=True)
    assert (np.abs(served - widen(wanted).numpy()) <= 2.0**-22 * largest).all()
