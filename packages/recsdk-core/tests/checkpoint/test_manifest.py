"""Manifests: what is written is read; whatever else is in the file is CheckpointError."""

from __future__ import annotations

import copy
import json
import warnings
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from checkpoint_support import manifest, sealed, table_entry
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_dtypes, array_shapes, scalar_dtypes

from recsdk_core import CheckpointError
from recsdk_core.checkpoint.manifest import ColumnsEntry, Manifest
from recsdk_core.checkpoint.user_state import (
    MAX_HEADER,
    check_array,
    decode_array,
    encode_array,
    pack,
    unpack,
)

RAW = manifest().to_bytes()
VALUE: dict[str, Any] = json.loads(RAW)

NASTY: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**32, 2**63 - 1, 2**63, -(2**63), 2**64, 10**400,
    0.5, -0.0, 1e308, "", "x", "0" * 64, "../../../etc/passwd", "/etc/passwd", "\x00", "a" * 2000,
    [], [None], {}, {"x": 1}, [[]] * 3,
]  # fmt: skip


def read(raw: bytes) -> Manifest:
    return Manifest.from_bytes(raw, "m.json")


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    found = [at]
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            found += paths(item, (*at, key))
    return found


def replaced(at: tuple[Any, ...], new: Any) -> Any:
    value = copy.deepcopy(VALUE)
    if not at:
        return new
    inner = value
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = new
    return value


def test_what_is_written_is_read() -> None:
    assert read(RAW) == manifest()
    snapshot = manifest(chain=None, step=None, user_state=None, user_files=())
    assert read(snapshot.to_bytes()) == snapshot
    assert manifest(chain=None).to_bytes() != RAW
    part = table_entry("a.columns_3_7", 1, columns=ColumnsEntry(table="a", first=3))
    assert read(manifest(tables=(part,)).to_bytes()).tables == (part,)


def test_every_flipped_bit_and_every_cut_is_seen() -> None:
    for position in range(len(RAW)):
        for bit in (0, 3, 6):
            changed = bytearray(RAW)
            changed[position] ^= 1 << bit
            with pytest.raises(CheckpointError, match="m.json"):
                read(bytes(changed))
    for length in range(len(RAW)):
        with pytest.raises(CheckpointError, match="m.json"):
            read(RAW[:length])


def test_any_other_value_in_any_place_is_refused_or_read_as_it_is() -> None:
    for at in paths(VALUE):
        for new in NASTY:
            value = replaced(at, new)
            raw = sealed(value) if isinstance(value, dict) else b"%a\n" % value
            with suppress(CheckpointError):
                found = json.loads(read(raw).to_bytes())
                assert found | {"sha256": 0} == value | {"sha256": 0}


def lies() -> list[tuple[tuple[Any, ...], Any]]:
    """Places where only few values are right, with wrong ones."""
    file = ("tables", 0, "files", 0)
    numbers = [
        (*file, "num_bytes"), (*file, "num_rows"), (*file, "num_erased"), ("tables", 0, "dim"),
        ("tables", 0, "fields", 0, "width"), ("world_size",), ("chain", "sequence"),
        ("user_files", 0, "num_bytes"),
    ]  # fmt: skip
    wrong: list[tuple[tuple[Any, ...], Any]] = [
        (at, value) for at in numbers for value in (-1, 2**63, 1.0, True, "1", None)
    ]
    wrong += [((*file, "path"), p) for p in ("../x", "/etc/passwd", "x", "tables/0000/rank_0", "")]
    wrong += [(("tables", 0, "sharding", "num_virtual_shards"), n) for n in (0, 3, 65535, 2**17)]
    wrong += [(("version",), n) for n in (0, 2, 2**70, "1")]
    wrong += [(("format",), "recsdk"), (("token",), "0" * 31), (("token",), "G" * 32)]
    wrong += [
        (("chain", "parent"), "x"),
        (("tables", 0, "fields"), []),
        (("tables", 0, "files"), []),
    ]
    wrong += [(("tables",), VALUE["tables"] * 2), (("tables", 0, "fields", 1, "name"), "weight")]
    wrong += [
        (("tables", 0, "columns"), {"table": "user", "first": 0}),  # whose name says no columns
        (("tables", 0, "columns"), {"table": "user"}),
        (("tables", 0, "columns"), {"table": "user", "first": -1}),
    ]
    wrong += [(("tables", 0, "log_decay"), 0.5), (("tables", 0, "update_count"), 2**62 + 1)]
    return wrong


@pytest.mark.parametrize(("at", "value"), lies())
def test_lies_are_refused_by_name(at: tuple[Any, ...], value: Any) -> None:
    with pytest.raises(CheckpointError, match="m.json: "):
        read(sealed(replaced(at, value)))


def test_a_version_from_the_future_says_what_to_do() -> None:
    with pytest.raises(CheckpointError, match="version is 2, newer than 1; update recsdk-core"):
        read(sealed(replaced(("version",), 2)))


def test_missing_fields_are_named() -> None:
    for at in paths(VALUE):
        if at and isinstance(at[-1], str) and at[0] not in ("user_state", "sha256"):
            if at[:-1] and at[-2] == "arguments":
                continue
            value = copy.deepcopy(VALUE)
            inner = value
            for key in at[:-1]:
                inner = inner[key]
            del inner[at[-1]]
            with pytest.raises(CheckpointError, match=f"{at[-1]} is missing"):
                read(sealed(value))


def test_fields_of_no_format_are_named() -> None:
    places = [at for at in paths(VALUE) if at[:1] != ("user_state",) and "arguments" not in at]
    for at in places:
        value = copy.deepcopy(VALUE)
        inner = value
        for key in at:
            inner = inner[key]
        if isinstance(inner, dict):
            inner["unknown"] = 1
            with pytest.raises(CheckpointError, match="unknown is not a field of this format"):
                read(sealed(value))


def nested(depth: int, is_dict: bool = False) -> Any:
    """Lists or dicts, one in the other."""
    value: Any = None
    for _ in range(depth):
        value = {"x": value} if is_dict else [value]
    return value


@pytest.mark.parametrize("is_dict", [False, True])
def test_user_states_have_a_limit_of_depth(is_dict: bool) -> None:
    deepest = nested(100, is_dict)
    assert unpack(read(manifest(user_state=deepest).to_bytes()).user_state, lambda _: b"") == (
        pack(deepest).value
    )
    for depth in (101, 450, 50_000):
        with pytest.raises(
            ValueError, match=r"user_state\[.*nests lists and dicts deeper than 100"
        ):
            pack(nested(depth, is_dict))
    with pytest.raises(CheckpointError, match="user_state nests lists and dicts deeper than 100"):
        unpack(nested(101, is_dict), lambda _: b"")


def test_what_is_nested_deeply_is_refused_where_it_is_read() -> None:
    deep = replaced(("tables", 0, "initializer", "arguments", "low"), nested(900, False))
    with pytest.raises(CheckpointError, match="arguments nests lists and objects deeper than 10"):
        read(sealed(deep))
    with pytest.raises(CheckpointError, match="user_state nests lists and objects deeper than 101"):
        read(sealed(replaced(("user_state",), nested(900, True))))
    read(sealed(replaced(("user_state",), [nested(99, True), {"$file": 0}])))


def test_user_states_have_a_limit_of_digits() -> None:
    assert pack({"n": -(2**8191)}).value == {"n": -(2**8191)}
    text = r"user_state\['n'\] must have at most 8192 bits, got 10001; keep it as text"
    with pytest.raises(ValueError, match=text):
        pack({"n": 2**10_000})


@given(st.binary(max_size=60), st.integers(0, len(RAW)), st.integers(0, 40), st.booleans())
@example(b"[" * 100_000, 0, 0, False)
@example(b'{"a":' * 100_000, 0, 0, False)
@example(b"9" * 5000, 0, 0, False)
@example(b"NaN", 0, len(RAW), False)
@example(b"\xff\xfe", 0, len(RAW), False)
def test_spliced_bytes_are_refused(new: bytes, start: int, length: int, is_end_kept: bool) -> None:
    raw = RAW[:start] + new + (RAW[start + length :] if is_end_kept or start else b"")
    if raw != RAW:
        with pytest.raises(CheckpointError):
            read(raw)


names = st.text(max_size=4).filter(lambda name: not name.startswith("$"))
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.binary(max_size=16),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(max_size=4).filter(lambda k: not k.startswith("$")), inner, max_size=3
        )
    ),
    max_leaves=12,
)


@given(values)
def test_user_state_comes_back(value: Any) -> None:
    packed = pack(value)
    assert pack(packed) is packed
    again = json.loads(json.dumps(packed.value))
    assert unpack(again, lambda i: packed.files[i][1]) == value


@given(array_dtypes() | scalar_dtypes(), array_shapes(min_dims=0, min_side=0), st.booleans())
@example(np.dtype("V0"), (5,), False)
@example(np.dtype([]), (3,), False)
@example(np.dtype([(f"field_{i}", "<f4") for i in range(500)]), (3,), False)
@example(np.dtype("<f8"), (3, 0, 2**40), True)
def test_arrays_of_any_dtype_come_back(
    dtype: np.dtype[Any], shape: tuple[int, ...], is_fortran: bool
) -> None:
    array = np.zeros(shape, dtype, "F" if is_fortran else "C")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # numpy tells which version a file has
        raw = encode_array(array, "here")
    check_array(raw[:MAX_HEADER], len(raw), "here")
    again = decode_array(raw, "here")
    assert again.dtype == array.dtype
    assert again.shape == array.shape
    assert again.tobytes() == array.tobytes()


def test_arrays_that_take_too_long_to_describe_are_not_saved() -> None:
    dtype = np.dtype([(f"field_{i}", "<f4") for i in range(6000)])
    with (
        pytest.warns(UserWarning, match="format 2"),
        pytest.raises(ValueError, match=r"user_state\['a'\] is an array whose dtype takes"),
    ):
        pack({"a": np.zeros(3, dtype)})


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.zeros((0, 3), np.float32),
        np.array(3.5),
        np.array(["a", "bc"]),
        np.array([True]),
    ],
)
def test_arrays_come_back(array: Any) -> None:
    packed = pack({"a": array})
    [(kind, raw)] = packed.files
    assert (packed.value, kind) == ({"a": {"$file": 0}}, "array")
    again = decode_array(raw, "x")
    assert again.dtype == array.dtype
    assert np.array_equal(again, array)
    assert again.shape == array.shape


def test_arrays_with_a_header_of_version_3_come_back() -> None:
    array = np.array([(1, 2.5)], dtype=[("\u20ac", "i4"), ("y", "f8")])
    with pytest.warns(UserWarning, match=r"format 3\.0"):
        [(_, raw)] = pack(array).files
    again = decode_array(raw, "x")
    assert again.dtype == array.dtype
    assert again.tolist() == array.tolist()
    for bad in (raw[:-1], raw[:40], raw.replace(b"\x03\x00", b"\x04\x00", 1)):
        with pytest.raises(CheckpointError, match="no array"):
            decode_array(bad, "x")


def test_what_cannot_be_kept_is_named() -> None:
    for value, kind, text in [
        ({"a": [float("nan")]}, ValueError, r"user_state\['a'\]\[0\] is nan"),
        ({"$a": 1}, ValueError, "do not start with"),
        ({1: 1}, ValueError, "must be strings"),
        ({"a": object()}, TypeError, r"user_state\['a'\] is of type object"),
        (np.array([object()]), TypeError, "array of objects"),
    ]:
        with pytest.raises(kind, match=text):
            pack(value)


def test_damaged_arrays_and_references_are_refused() -> None:
    [(_, raw)] = pack(np.arange(6)).files
    for position in range(len(raw) - 48):
        with_lie = bytearray(raw)
        with_lie[position] ^= 0x15
        with suppress(CheckpointError):  # a space of the header's padding may change without harm
            decode_array(bytes(with_lie), "x")
    huge = raw.replace(b"(6,)", b"(%d,)" % 2**62)
    for bad in (b"", raw[:5], raw[:-1], raw + b"x", huge):
        with pytest.raises(CheckpointError, match="no array"):
            decode_array(bad, "x")
    for reference in ({"$file": -1}, {"$file": True}, {"$file": "0"}, {"$file": 0, "x": 1}):
        with pytest.raises(CheckpointError, match="no reference"):
            unpack(reference, lambda i: i)
