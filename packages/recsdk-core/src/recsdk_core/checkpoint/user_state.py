"""The user's own state in a checkpoint: JSON values in the manifest, bytes and arrays in files."""

from __future__ import annotations

import ast
import io
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.lib import format as npy

from recsdk_core.checkpoint._fields import canonical_json, require_few_values
from recsdk_core.errors import CheckpointError

__all__ = ["PackedState", "UserFile", "decode_array", "pack", "unpack"]

_FILE = "$file"
_MOST_BYTES = 64 * 2**20

UserFile = tuple[Literal["bytes", "array"], bytes]
"""Kind and content of a file."""


@dataclass(frozen=True)
class PackedState:
    """What a state was when it was packed."""

    value: Any
    """JSON values with each bytes or numpy array replaced by {"$file": i}."""
    files: list[UserFile]
    """Those files."""


def pack(value: Any) -> PackedState:
    """A copy of a state, as it is written; of one that is packed, itself.

    Tuples become lists. Raises TypeError or ValueError, naming the place, for what cannot be kept:
    other types, keys that are no strings or start with "$", numbers that are not finite, arrays of
    objects, more than 64 MiB of JSON or, about, 250,000 values beside bytes and arrays.
    """
    if isinstance(value, PackedState):
        return value
    files: list[UserFile] = []
    packed = PackedState(_pack(value, "user_state", files), files)
    _require_small(packed.value)
    return packed


def _require_small(value: Any) -> None:
    """Raises ValueError for JSON that does not belong into a manifest, which is read as a whole."""
    raw = canonical_json(value)
    advice = "keep long lists in numpy arrays, and long texts as bytes"
    if len(raw) > _MOST_BYTES:
        raise ValueError(
            f"user_state has {len(raw)} bytes of JSON, and {_MOST_BYTES} is the most; {advice}"
        )
    try:
        require_few_values(raw)
    except ValueError as error:
        raise ValueError(f"user_state has {error}; {advice}") from None


def _pack(value: Any, where: str, files: list[UserFile]) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where} is {value}; keep it in a numpy array instead")
        return float(value)
    if isinstance(value, (list, tuple)):
        return [_pack(item, f"{where}[{i}]", files) for i, item in enumerate(value)]
    if isinstance(value, dict):
        return {_key(k, where): _pack(v, f"{where}[{k!r}]", files) for k, v in value.items()}
    if isinstance(value, (bytes, bytearray, memoryview)):
        files.append(("bytes", bytes(value)))
    elif isinstance(value, (np.ndarray, np.generic)):
        files.append(("array", _encode_array(np.asarray(value), where)))
    else:
        raise TypeError(
            f"{where} is a {type(value).__name__}; a checkpoint keeps None, bool, int, float, str, "
            "list, dict, bytes and numpy arrays (a tensor: pass .numpy())"
        )
    return {_FILE: len(files) - 1}


def _key(key: Any, where: str) -> str:
    if not isinstance(key, str) or key.startswith("$"):
        raise ValueError(f"{where}: keys must be strings that do not start with '$', got {key!r}")
    return key


def _encode_array(array: Any, where: str) -> bytes:
    if array.dtype.hasobject:
        raise TypeError(f"{where} is an array of objects; convert it to numbers or strings")
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def unpack(packed: Any, read: Callable[[int], Any]) -> Any:
    """The value that was packed; `read` gives the content of file i. CheckpointError if no such."""
    if isinstance(packed, list):
        return [unpack(item, read) for item in packed]
    if not isinstance(packed, dict):
        return packed
    if _FILE not in packed:
        return {key: unpack(value, read) for key, value in packed.items()}
    index = packed[_FILE]
    if len(packed) != 1 or type(index) is not int or index < 0:
        raise CheckpointError(f"user_state: {packed!r} is no reference to a file")
    return read(index)


def decode_array(raw: bytes, where: str) -> Any:
    """The array of a .npy file; CheckpointError for anything else."""
    buffer = io.BytesIO(raw)
    try:
        shape, is_fortran, dtype = _read_header(buffer)
        num_bytes = math.prod(shape) * dtype.itemsize
        if dtype.hasobject or num_bytes != len(raw) - buffer.tell():
            raise ValueError(f"its header says {dtype} {shape}, which is not what follows")
        flat = np.frombuffer(raw, dtype, offset=buffer.tell()) if num_bytes else np.empty(0, dtype)
        return flat.reshape(shape, order="F" if is_fortran else "C").copy()
    except Exception as error:  # numpy raises many kinds for bytes that are no array
        raise CheckpointError(f"{where}: no array: {error}") from None


def _read_header(buffer: io.BytesIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether in Fortran's order, and type. numpy reads headers up to version 2."""
    major, _ = npy.read_magic(buffer)
    if major == 1:
        return npy.read_array_header_1_0(buffer)
    if major == 2:
        return npy.read_array_header_2_0(buffer)
    if major != 3:
        raise ValueError(f"its version {major} is not known")
    (length,) = struct.unpack("<I", buffer.read(4))
    header = ast.literal_eval(buffer.read(length).decode())
    return header["shape"], header["fortran_order"], npy.descr_to_dtype(header["descr"])
