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

__all__ = [
    "MAX_BITS",
    "MAX_DEPTH",
    "MAX_HEADER",
    "PackedState",
    "UserFile",
    "check_array",
    "decode_array",
    "encode_array",
    "pack",
    "unpack",
]

MAX_DEPTH = 100
"""How deep lists and dicts may be nested."""
MAX_BITS = 8192
"""Of an int."""
MAX_HEADER = 2**17
"""Bytes of a .npy file before its numbers."""

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
    """A copy of a state in the form that is written; a packed state is returned as it is.

    Tuples become lists. Raises TypeError or ValueError, naming the place, for what cannot be kept:
    other types, keys that are no strings or start with "$", numbers that are not finite, ints of
    more than MAX_BITS bits, arrays of objects, lists and dicts nested deeper than MAX_DEPTH, more
    than 64 MiB of JSON, more than about 250,000 values beside bytes and arrays.
    """
    if isinstance(value, PackedState):
        return value
    files: list[UserFile] = []
    packed = PackedState(_pack(value, "user_state", files), files)
    _require_small(packed.value)
    return packed


def _require_small(value: Any) -> None:
    """Raises ValueError for JSON that is too large for a manifest, which is read as a whole."""
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


def _pack(value: Any, where: str, files: list[UserFile], depth: int = 0) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        if value.bit_length() > MAX_BITS:
            raise ValueError(
                f"{where} must have at most {MAX_BITS} bits, got {value.bit_length()}; keep it as "
                "text"
            )
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where} is {value}; keep it in a numpy array instead")
        return float(value)
    if isinstance(value, (list, tuple, dict)):
        if depth == MAX_DEPTH:
            raise ValueError(
                f"{where[:80]}...: nests lists and dicts deeper than {MAX_DEPTH}; "
                "keep it flatter, or as bytes"
            )
        if not isinstance(value, dict):
            items = enumerate(value)
            return [_pack(item, f"{where}[{i}]", files, depth + 1) for i, item in items]
        return {
            _key(k, where): _pack(v, f"{where}[{k!r}]", files, depth + 1) for k, v in value.items()
        }
    if isinstance(value, (bytes, bytearray, memoryview)):
        files.append(("bytes", bytes(value)))
    elif isinstance(value, (np.ndarray, np.generic)):
        files.append(("array", encode_array(np.asarray(value), where)))
    else:
        raise TypeError(
            f"{where} is of type {type(value).__name__}; a checkpoint keeps None, bool, int, "
            "float, str, list, dict, bytes and numpy arrays (a tensor: pass .numpy())"
        )
    return {_FILE: len(files) - 1}


def _key(key: Any, where: str) -> str:
    if not isinstance(key, str) or key.startswith("$"):
        raise ValueError(f"{where}: keys must be strings that do not start with '$', got {key!r}")
    return key


def encode_array(array: Any, where: str) -> bytes:
    """A .npy file of a numpy array; `decode_array` gives an equal one.

    Raises TypeError or ValueError, naming `where`, for arrays of objects and of other types that
    such a file cannot tell.
    """
    if array.dtype.hasobject:
        raise TypeError(f"{where} is an array of objects; convert it to numbers or strings")
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    raw = buffer.getvalue()
    if len(raw) - array.nbytes > MAX_HEADER:
        raise ValueError(
            f"{where} is an array whose dtype takes {len(raw) - array.nbytes} bytes to describe, "
            f"at most {MAX_HEADER} are kept; keep its fields as arrays of their own"
        )
    _, _, kept, _ = _layout(raw[:MAX_HEADER], len(raw), where)
    if kept != array.dtype:
        raise TypeError(
            f"{where} is an array of {array.dtype}, which a .npy file keeps as {kept}; convert it"
        )
    return raw


def unpack(packed: Any, read: Callable[[int], Any], depth: int = 0) -> Any:
    """The unpacked value; `read` gives the content of file i.

    Raises CheckpointError for what `pack` does not make.
    """
    if not isinstance(packed, (list, dict)):
        return packed
    if isinstance(packed, dict) and _FILE in packed:
        index = packed[_FILE]
        if len(packed) != 1 or type(index) is not int or index < 0:
            raise CheckpointError(f"user_state: {packed!r} is no reference to a file")
        return read(index)
    if depth == MAX_DEPTH:
        raise CheckpointError(
            f"user_state nests lists and dicts deeper than {MAX_DEPTH}; it was not saved by this "
            "library"
        )
    if isinstance(packed, list):
        return [unpack(item, read, depth + 1) for item in packed]
    return {key: unpack(value, read, depth + 1) for key, value in packed.items()}


_Layout = tuple[tuple[int, ...], bool, "np.dtype[Any]", int]
"""Shape, whether in Fortran's order, type, and where in the file the numbers begin."""


def check_array(start: bytes, num_bytes: int, where: str) -> None:
    """Raises CheckpointError unless a file of `num_bytes` bytes may be an array's.

    `start`: its first MAX_HEADER bytes, or all.
    """
    _layout(start, num_bytes, where)


def decode_array(raw: bytes, where: str) -> Any:
    """The array of a .npy file; CheckpointError for anything else."""
    shape, is_fortran, dtype, offset = _layout(raw[:MAX_HEADER], len(raw), where)
    order: Literal["F", "C"] = "F" if is_fortran else "C"
    try:
        if offset == len(raw):
            return np.zeros(shape, dtype, order)
        return np.frombuffer(raw, dtype, offset=offset).reshape(shape, order=order).copy()
    except Exception as error:  # numpy raises many kinds for bytes that are no array
        raise CheckpointError(f"{where}: no array: {error}") from None


def _layout(start: bytes, num_bytes: int, where: str) -> _Layout:
    buffer = io.BytesIO(start)
    try:
        shape, is_fortran, dtype = _read_header(buffer)
        follows = num_bytes - buffer.tell()
        if dtype.hasobject or math.prod(shape) * dtype.itemsize != follows:
            raise ValueError(f"its header says {dtype} {shape}, which is not what follows")
        return shape, is_fortran, dtype, buffer.tell()
    except Exception as error:  # numpy raises many kinds for bytes that are no array
        raise CheckpointError(f"{where}: no array: {error}") from None


def _read_header(buffer: io.BytesIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether in Fortran's order, and type. numpy reads headers up to version 2."""
    major, _ = npy.read_magic(buffer)
    if major == 1:
        return npy.read_array_header_1_0(buffer, max_header_size=MAX_HEADER)
    if major == 2:
        return npy.read_array_header_2_0(buffer, max_header_size=MAX_HEADER)
    if major != 3:
        raise ValueError(f"its version {major} is not known")
    (length,) = struct.unpack("<I", buffer.read(4))
    header = ast.literal_eval(buffer.read(length).decode())
    return header["shape"], header["fortran_order"], npy.descr_to_dtype(header["descr"])
