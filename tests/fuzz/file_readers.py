"""Readers of files that others may have written, for the fuzzer and its corpus.

Each is given the bytes of a file and says whether they are such a file. What it raises is a
finding, and so is an array that is not read as it was written.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np

from recsdk_core import CheckpointError
from recsdk_core.checkpoint import tabular, user_state
from recsdk_core.simulation import open_trace
from recsdk_pipeline._internal import plain_state

__all__ = ["READERS", "read_one"]

FOLDER = tempfile.TemporaryDirectory(prefix="recsdk-fuzz-")
MOST_BLOCKS = 4


def named(name: str, raw: bytes) -> Path:
    path = Path(FOLDER.name, name)
    path.write_bytes(raw)
    return path


def arrays_of(suffix: str) -> Callable[[bytes], bool]:
    def read(raw: bytes) -> bool:
        try:
            found = tabular.read_arrays(named(f"rows{suffix}", raw))
        except ValueError:
            return False
        assert not any(array.dtype.hasobject for array in found.values())
        return True

    return read


def trace_of(name: str) -> Callable[[bytes], bool]:
    def read(raw: bytes) -> bool:
        try:
            trace = open_trace(named(name, raw))
        except (ValueError, TypeError):
            return False
        for ids, _ in islice(trace.blocks(100), MOST_BLOCKS):
            assert ids.dtype == np.int64
            assert 0 < len(ids) <= 100
        return True

    return read


def user_array(raw: bytes) -> bool:
    try:
        array = user_state.decode_array(raw, "array")
    except CheckpointError:
        return False
    user_state.check_array(raw[: user_state.MAX_HEADER], len(raw), "array")
    again = user_state.decode_array(user_state.encode_array(array, "array"), "again")
    assert (again.dtype, again.shape) == (array.dtype, array.shape)
    assert again.tobytes() == array.tobytes()
    return True


def pipeline_state(raw: bytes) -> bool:
    try:
        plain_state.from_plain(raw, "state")
    except CheckpointError:
        return False
    return True


# Parquet is left to Arrow's own fuzzers.
READERS = (
    arrays_of(".npy"),
    arrays_of(".npz"),
    arrays_of(".safetensors"),
    trace_of("trace.npz"),
    trace_of("described.json"),
    user_array,
    pipeline_state,
)


def read_one(data: bytes) -> bool:
    """The first byte chooses the reader of the rest."""
    return READERS[data[0] % len(READERS)](data[1:]) if data else False
