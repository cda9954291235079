"""Frozen int8 and int4 rows have the bits of FBGEMM's and torch's own conversions, and pool alike.

Shape letters: N rows, D row width.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import fbgemm_gpu  # noqa: F401  it registers the operators
import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
    IntNBitTableBatchedEmbeddingBagsCodegen,
)
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


def of_halves(rng: np.random.Generator, num_rows: int, dim: int, steps: int) -> np.ndarray:
    """Weights that rows of `steps` steps hold exactly, with a scale and a bias of 16 bits."""
    words = rng.integers(0, steps + 1, (num_rows, dim))
    words[:, 0], words[:, 1] = 0, steps
    scale = 2.0 ** rng.integers(-6, 1, (num_rows, 1))
    weights: np.ndarray = words * scale + rng.integers(-64, 64, (num_rows, 1)) / 4
    return weights.astype(np.float32)


def inference_table(weights: np.ndarray, bits: int, pooling: PoolingMode) -> Any:
    """FBGEMM's table for inference with the rows of these weights, by dense index."""
    convert = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf
    rows = convert(torch.from_numpy(weights), bits)
    kind = SparseType.INT8 if bits == 8 else SparseType.INT4
    return IntNBitTableBatchedEmbeddingBagsCodegen(
        [("t", *weights.shape, kind, EmbeddingLocation.HOST)],
        weight_lists=[(rows[:, :-4].contiguous(), rows[:, -4:].contiguous())],
        device="cpu",
        output_dtype=SparseType.FP32,
        pooling_mode=pooling,
    )


@pytest.mark.parametrize("bits", [4, 8])
@settings(max_examples=20)
@given(
    dim=st.sampled_from([4, 8, 16, 24, 64, 100, 128]),
    pooling=st.sampled_from(["sum", "mean"]),
    is_weighted=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_bags_are_those_of_fbgemms_inference_table_to_the_bit(
    tmp_path_factory: pytest.TempPathFactory,
    bits: int,
    dim: int,
    pooling: str,
    is_weighted: bool,
    seed: int,
) -> None:
    """Of values whose sums are exact, so that no order of additions and no rounding shows."""
    rng = np.random.default_rng(seed)
    weights = of_halves(rng, 40, dim, 2**bits - 1)
    keys = rng.integers(-(2**63), 2**63 - 1, len(weights))
    indexes = rng.integers(0, len(weights), 60)
    ends = np.concatenate([[0], np.sort(rng.integers(0, 61, 9)), [60]])
    of_keys = (rng.integers(-4, 5, 60) / 2).astype(np.float32)
    if pooling == "mean":
        is_weighted = False  # FBGEMM divides weighted sums by the number of keys
    table = Table(dim=dim, name="t")
    table.upsert(keys, weights)
    folder = tmp_path_factory.mktemp("bags")
    table.save(folder / "checkpoint")
    freeze(folder / "checkpoint", folder / "frozen", dtype="int8" if bits == 8 else "int4")
    served = ServingTable(folder / "frozen")
    got = served.pool(keys[indexes], ends, of_keys if is_weighted else None, pooling)
    mode = PoolingMode.MEAN if pooling == "mean" else PoolingMode.SUM
    wanted = inference_table(weights, bits, mode)(
        torch.from_numpy(indexes).int(),
        torch.from_numpy(ends).int(),
        torch.from_numpy(of_keys) if is_weighted else None,
    )
    if pooling == "sum":
        np.testing.assert_array_equal(got, wanted.numpy())
    else:  # which divides where FBGEMM multiplies by the reciprocal
        np.testing.assert_allclose(got, wanted.numpy(), rtol=1e-6, atol=0)


def parts_of(rows: np.ndarray, dtype: FrozenDType, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Of stored rows: what steps times scale give (N, D), and biases (N, 1), exactly."""
    scalar = np.float32 if dtype == "int8" else np.float16
    size = 2 * np.dtype(scalar).itemsize
    scalars = rows[:, -size:].copy().view(scalar).astype(np.float64)
    steps = rows[:, :-size]
    if dtype == "int4":
        steps = np.stack([steps & 15, steps >> 4], axis=2).reshape(len(rows), -1)[:, :dim]
    return steps * scalars[:, :1], scalars[:, 1:]


@pytest.mark.parametrize("dtype", ["int4", "int8"])
@settings(max_examples=20)
@given(weights=matrices(), is_weighted=st.booleans(), seed=st.integers(0, 2**32))
def test_bags_of_any_values_are_as_near_as_the_page_of_the_format_says(
    tmp_path_factory: pytest.TempPathFactory,
    dtype: FrozenDType,
    weights: np.ndarray,
    is_weighted: bool,
    seed: int,
) -> None:
    folder = tmp_path_factory.mktemp("bags")
    if dtype == "int4":
        weights = np.clip(weights, -30_000, 30_000)
    products, biases = parts_of(stored_rows(folder, weights, dtype), dtype, weights.shape[1])
    rng = np.random.default_rng(seed)
    of_keys = rng.normal(size=300).astype(np.float32) if is_weighted else np.ones(300, np.float32)
    keys, ends = rng.integers(0, len(weights), 300), np.array([0, 1, 1, 40, 300])
    got = ServingTable(folder / "frozen").pool(keys, ends, of_keys if is_weighted else None)
    for bag, (begin, end) in enumerate(itertools.pairwise(ends)):
        some, scales = keys[begin:end], of_keys[begin:end, None].astype(np.float64)
        exact = (scales * (products[some] + biases[some])).sum(axis=0)
        added = (np.abs(scales) * (products[some] + np.abs(biases[some]))).sum(axis=0)
        assert (np.abs(got[bag] - exact) <= (end - begin + 3) * 2.0**-24 * added + 1e-42).all()
