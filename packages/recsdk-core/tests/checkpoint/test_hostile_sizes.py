"""Checkpoints that claim more than they hold: loading takes memory for what is there."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import warm_processes
from checkpoint_support import sealed
from hypothesis import given
from hypothesis import strategies as st

from recsdk_core import CheckpointError, Table, _ext
from recsdk_core.checkpoint import open_checkpoint
from recsdk_core.checkpoint._fields import _num_signs_between_texts, canonical_json, parse_json
from recsdk_core.checkpoint.user_state import pack

MOST_BYTES = 96 * 2**20
DIM = 256

LOAD = """
import json, sys
from pathlib import Path
from recsdk_core import CheckpointError, Table

def memory(name):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)

table = Table(dim=int(sys.argv[2]), name="user", num_threads=2)
before = memory("VmRSS")
try:
    table.load(sys.argv[1])
except CheckpointError as error:
    print(json.dumps([memory("VmHWM") - before, len(table), str(error)]))
"""


def refused_with(folder: Path) -> str:
    """Why a checkpoint is refused in a process of its own, which took little memory for it."""
    script, printed = folder.parent / "load.py", folder.parent / "printed"
    script.write_text(LOAD)
    assert warm_processes.status_of(warm_processes.start(script, folder, DIM, output=printed)) == 0
    extra, num_rows, message = json.loads(printed.read_text())
    assert num_rows == 0
    assert extra <= MOST_BYTES, (extra, message)
    return str(message)


def change_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrites a checkpoint's manifest with a right SHA-256."""
    path = folder / "manifest.json"
    value = json.loads(path.read_text())
    change(value)
    path.write_bytes(sealed(value))


def rows_file(folder: Path) -> Path:
    """The one file of rows."""
    return folder / open_checkpoint(folder).manifest.tables[0].files[0].path


def save_zeros(folder: Path, num_rows: int, codec: Any) -> None:
    """A checkpoint of rows that compress to almost nothing."""
    table = Table(dim=DIM, name="user")
    zeros = np.zeros((8192, DIM), np.float32)
    for begin in range(0, num_rows, 8192):
        table.upsert(
            np.arange(begin, min(num_rows, begin + 8192)) * 7919, zeros[: num_rows - begin]
        )
    table.save(folder, codec=codec)


def test_a_sparse_file(tmp_path: Path) -> None:
    folder = tmp_path / "sparse"
    save_zeros(folder, 20_000, "none")
    size = 2**40
    with rows_file(folder).open("r+b") as file:
        file.truncate(size)

    def claim(manifest: dict[str, Any]) -> None:
        (entry,) = manifest["tables"][0]["files"]
        entry.update(num_bytes=size, num_rows=size // (4 * DIM + 8))

    change_manifest(folder, claim)
    assert "bytes follow the end" in refused_with(folder)


@pytest.mark.skipif(not _ext.HAS_ZSTD, reason="this build has no zstd")
def test_a_file_of_more_rows_than_are_listed(tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    save_zeros(folder, 300_000, "zstd")
    assert rows_file(folder).stat().st_size < 2**22

    def claim(manifest: dict[str, Any]) -> None:
        manifest["tables"][0]["files"][0]["num_rows"] = 5000

    change_manifest(folder, claim)
    assert "rows, and it must have 5000" in refused_with(folder)


@pytest.mark.parametrize("piece", [b"[]", b"{}", b"0", b'{"a":0}'])
def test_a_manifest_of_millions_of_values(tmp_path: Path, piece: bytes) -> None:
    folder = tmp_path / "values"
    save_zeros(folder, 10, "none")
    path = folder / "manifest.json"
    mark, list_of = b'"user_state":null', b",".join([piece] * (2**23 // (len(piece) + 1)))
    empty = b"0" * 64
    raw = path.read_bytes()
    digest = json.loads(raw)["sha256"].encode()
    unsealed = raw.replace(mark, b'"user_state":[' + list_of + b"]").replace(digest, empty)
    path.write_bytes(unsealed.replace(empty, hashlib.sha256(unsealed).hexdigest().encode()))
    assert "values and names in" in refused_with(folder)


def test_an_open_text_of_escapes_is_looked_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    save_zeros(folder, 10, "none")
    (folder / "manifest.json").write_bytes(b"," * 9_000_000 + b'"' + b'\\"' * 4_000_000)
    assert "values and names in" in refused_with(folder)


@given(
    st.recursive(
        st.text('a"\\[{,:\n') | st.integers(),
        lambda inside: st.lists(inside) | st.dictionaries(st.text('"\\,:'), inside),
    )
)
def test_values_are_counted_outside_of_texts(value: Any) -> None:
    signs = 0

    def count(item: Any) -> None:
        nonlocal signs
        if isinstance(item, (list, dict)):
            signs += 1 + max(len(item) - 1, 0)
        if isinstance(item, dict):
            signs += len(item)
        for one in item.values() if isinstance(item, dict) else item:
            if isinstance(one, (list, dict)):
                count(one)

    count([value])
    assert _num_signs_between_texts(canonical_json([value])) == signs


def test_a_sparse_manifest(tmp_path: Path) -> None:
    folder = tmp_path / "sparse"
    save_zeros(folder, 10, "none")
    with (folder / "manifest.json").open("r+b") as file:
        file.truncate(2**28)
    assert "has zero bytes, so it is no manifest" in refused_with(folder)


def test_a_sparse_file_of_user_state(tmp_path: Path) -> None:
    folder = tmp_path / "sparse"
    Table(dim=DIM, name="user").save(folder, user_state=[b"some", np.zeros(5)])
    size = 2**28
    for index, file in enumerate(open_checkpoint(folder).manifest.user_files):
        with (folder / file.path).open("r+b") as opened:
            opened.truncate(size)
        entry = {"num_bytes": size}

        def claim(manifest: dict[str, Any], at: int = index, new: Any = entry) -> None:
            manifest["user_files"][at].update(new)

        change_manifest(folder, claim)
    assert "its checksum does not match" in refused_with(folder)


def test_a_file_of_user_state_stands_for_one_value(tmp_path: Path) -> None:
    folder = tmp_path / "twice"
    Table(dim=DIM, name="user").save(folder, user_state=[np.zeros(2**20), b""])

    def repeat(manifest: dict[str, Any]) -> None:
        manifest["user_state"] = [{"$file": 0}] * 100

    change_manifest(folder, repeat)
    assert "user_state refers twice to file 0" in refused_with(folder)
    with pytest.raises(CheckpointError, match="twice"):
        open_checkpoint(folder).user_state()


def test_the_header_of_an_array_is_short(tmp_path: Path) -> None:
    lists = b"[]," * 2**20
    body = b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + lists + b")}"
    raw = b"\x93NUMPY\x03\x00" + struct.pack("<I", len(body)) + body
    folder = tmp_path / "header"
    Table(dim=DIM, name="user").save(folder, user_state=np.zeros(3))
    (file,) = open_checkpoint(folder).manifest.user_files
    (folder / file.path).write_bytes(raw)

    def claim(manifest: dict[str, Any]) -> None:
        checksum = hashlib.sha256(raw).hexdigest()
        manifest["user_files"][0].update(num_bytes=len(raw), checksum=checksum)

    change_manifest(folder, claim)
    assert "no array" in refused_with(folder)


def test_signs_within_texts_are_no_values() -> None:
    text = '[{,:"\\' * 200_000
    packed = pack({"text": text})
    assert packed.value == {"text": text}
    raw = (json.dumps({"text": text}, separators=(",", ":")) + "\n").encode()
    assert parse_json(raw, "here") == {"text": text}


def test_what_could_not_be_read_is_not_saved(tmp_path: Path) -> None:
    table = Table(dim=2, name="user")
    for state in ([0] * 400_000, {"deep": [[]] * 400_000}, "x" * (2**26 + 1)):
        with pytest.raises(ValueError, match="user_state has .* keep long lists in numpy arrays"):
            table.save(tmp_path / "one", user_state=state)
    assert not (tmp_path / "one").exists()
    table.save(tmp_path / "one", user_state={"list": [0.5] * 100_000, "array": np.zeros(10**6)})
    with pytest.raises(CheckpointError):
        table.save(tmp_path / "one")
