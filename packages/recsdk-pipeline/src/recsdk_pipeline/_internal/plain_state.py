"""States as text that holds nothing but data: reading it runs no code, whoever wrote it.

The text is JSON. What JSON lacks is an object with one name that starts with "$": `$tuple`, `$dict`
(with keys that are no plain strings), `$float`, `$bytes`, `$array`, `$scalar` and `$tensor`.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from recsdk_core import CheckpointError
from recsdk_core.checkpoint.user_state import MAX_BITS, MAX_DEPTH, decode_array, encode_array

__all__ = ["from_plain", "to_plain"]

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16,
        torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
        torch.complex64, torch.complex128,
    )
}  # fmt: skip


def to_plain(value: Any, where: str) -> bytes:
    """A state as ASCII text; `from_plain` gives an equal one, of the same types.

    A state is None, bool, int, float, str, bytes, a tensor on the cpu, a numpy array or scalar, or
    a list, tuple or dict of states; an OrderedDict becomes a dict. Raises TypeError or ValueError,
    naming the place, for anything else.
    """
    return json.dumps(_encoded(value, where, 0), separators=(",", ":")).encode("ascii")


def _encoded(value: Any, where: str, depth: int) -> Any:
    kind = type(value)
    if value is None or kind in (bool, str) or (kind is float and math.isfinite(value)):
        return value
    if kind is int:
        if value.bit_length() > MAX_BITS:
            raise ValueError(
                f"{where} must have at most {MAX_BITS} bits, got {value.bit_length()}; keep "
                "it as text"
            )
        return value
    if kind is float:
        return {"$float": str(value)}
    if kind in (list, tuple, dict, OrderedDict):
        return _encoded_items(value, where, depth)
    if kind is bytes:
        return {"$bytes": _text(value)}
    if isinstance(value, np.generic):
        return {"$scalar": _text(encode_array(np.asarray(value), where))}
    if kind is np.ndarray:
        return {"$array": _text(encode_array(value, where))}
    if isinstance(value, torch.Tensor):
        return {"$tensor": _encoded_tensor(value, where)}
    raise TypeError(
        f"{where} is of type {kind.__module__}.{kind.__qualname__}, which is not kept: a "
        "checkpoint holds data only; use None, bool, int, float, str, bytes, tensors, numpy "
        "arrays, and lists, tuples and dicts of them"
    )


def _encoded_items(value: Any, where: str, depth: int) -> Any:
    if depth == MAX_DEPTH:
        raise ValueError(f"{where[:80]}...: nests lists, tuples and dicts deeper than {MAX_DEPTH}")
    if isinstance(value, (list, tuple)):
        items = [_encoded(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: _encoded(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
    return {
        "$dict": [
            [
                _encoded(key, f"the key {key!r} of {where}", depth + 1),
                _encoded(item, f"{where}[{key!r}]", depth + 1),
            ]
            for key, item in value.items()
        ]
    }


def _encoded_tensor(tensor: torch.Tensor, where: str) -> list[Any]:
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or name not in _DTYPES:
        raise TypeError(
            f"{where} is a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}; a dense "
            f"one of {', '.join(_DTYPES)} on the cpu is kept"
        )
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return [name, list(tensor.shape), _text(flat.view(torch.uint8).numpy().tobytes())]


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


def from_plain(raw: Any, where: str) -> Any:
    """The state that `to_plain` has written. Raises CheckpointError for anything else."""
    if not isinstance(raw, bytes):
        raise CheckpointError(f"{where} must be bytes, got {type(raw).__name__}")
    try:
        return _decoded(json.loads(raw.decode("ascii")), 0)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, RuntimeError) as error:
        raise CheckpointError(
            f"{where} is no state that was saved: {type(error).__name__}: {error}"
        ) from None


def _decoded(value: Any, depth: int) -> Any:
    if not isinstance(value, (list, dict)):
        return value
    tagged = value if isinstance(value, dict) else {}
    name, inside = next((pair for pair in tagged.items() if pair[0].startswith("$")), ("", None))
    if name and len(value) != 1:
        raise ValueError(f"{name} stands beside other names")
    if name in _LEAVES:
        return _LEAVES[name](inside)
    if depth == MAX_DEPTH:
        raise ValueError(f"it nests lists and dicts deeper than {MAX_DEPTH}")
    if name:
        return _COLLECTIONS[name](_list(inside), depth + 1)
    if isinstance(value, list):
        return [_decoded(item, depth + 1) for item in value]
    return {key: _decoded(item, depth + 1) for key, item in value.items()}


def _tuple(items: list[Any], depth: int) -> tuple[Any, ...]:
    return tuple(_decoded(item, depth) for item in items)


def _dict(pairs: list[Any], depth: int) -> dict[Any, Any]:
    return {_decoded(key, depth): _decoded(item, depth) for key, item in map(_list, pairs)}


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"a list is expected, there is a {type(value).__name__}")
    return value


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None


def _float(text: str) -> float:
    if text not in ("nan", "inf", "-inf"):
        raise ValueError(f"{text!r} is no float")
    return float(text)


def _array(text: str) -> Any:
    return decode_array(_bytes(text), "an array")


def _tensor(parts: list[Any]) -> torch.Tensor:
    name, shape, text = _list(parts)
    raw, dtype = _bytes(text), _DTYPES[name]
    if not all(type(size) is int and size >= 0 for size in _list(shape)):
        raise ValueError(f"{shape} is no shape")
    if math.prod(shape) * dtype.itemsize != len(raw):
        raise ValueError(f"{len(raw)} bytes are no {name} {shape}")
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).reshape(shape)


_COLLECTIONS: dict[str, Callable[[list[Any], int], Any]] = {"$tuple": _tuple, "$dict": _dict}
_LEAVES: dict[str, Callable[[Any], Any]] = {
    "$float": _float,
    "$bytes": _bytes,
    "$array": _array,
    "$scalar": lambda text: _array(text)[()],
    "$tensor": _tensor,
}
