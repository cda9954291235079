"""Reads checkpoints with Python and numpy alone: what docs/reference/checkpoint.md says, as code.

    python checkpoint_reader.py SNAPSHOT [DELTA ...]      the number of rows of each table

It is written to be read beside that page, and shares no code with recsdk. Checksums of rows are
compared if the package xxhash is installed; compressed blocks need the package zstandard.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

try:
    import xxhash
except ImportError:
    xxhash = None

DTYPES = {
    1: "<f4", 2: "<f2", 3: "<u2", 4: "<i8", 5: "<u8", 6: "<i4", 7: "<u4", 8: "u1",
}  # fmt: skip
"""numpy's type of a field's type number; bfloat16 (3) is the upper half of a float32."""
ROWS, ERASED, END = 1, 2, 255


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, after comparing its SHA-256."""
    raw = (folder / "manifest.json").read_bytes()
    manifest = json.loads(raw)
    text = b'"sha256":"%s"'
    unsealed = raw.replace(text % manifest["sha256"].encode(), text % (b"0" * 64))
    require(hashlib.sha256(unsealed).hexdigest() == manifest["sha256"], "the manifest was changed")
    require(manifest["format"] == "recsdk-checkpoint", "this is no checkpoint")
    require(manifest["version"] == 1, "this is a version of the format from the future")
    return manifest


def read_blocks(raw: bytes, token: str) -> Iterator[tuple[int, np.ndarray, dict[str, np.ndarray]]]:
    """(type, keys int64 (n,), fields (n, width) by name) of each block of rows or erased keys.

    Of erased keys the field "cause" (n,) says why they left: 0 evicted, 1 erased, 2 expired.
    """
    magic, version, header_bytes, _kind, num_fields, _dim = struct.unpack_from("<8sIIIIQ", raw)
    require(magic == b"RECSDKRF" and version == 1, "this is no file of rows of version 1")
    require(raw[32:48].hex() == token, "this file belongs to another checkpoint")
    (header_checksum,) = struct.unpack_from("<Q", raw, header_bytes - 8)
    check64(raw[: header_bytes - 8], header_checksum)
    entries = [struct.unpack_from("<48sIIQ", raw, 48 + 64 * i) for i in range(num_fields)]
    fields = [(n.rstrip(b"\0").decode(), DTYPES[kind], width) for n, kind, _, width in entries]
    at, counts = header_bytes, [0, 0, 0]
    while True:
        head = struct.unpack_from("<4sBBBBQQQQQQQ", raw, at)
        magic, kind, codec, cause, _, index, num_rows, raw_bytes, stored_bytes = head[:9]
        require(magic == b"RFBK" and index == counts[2], "a block is missing")
        require(head[10] == header_checksum, "a block belongs to another file")
        check64(raw[at : at + 56], head[11])
        stored = raw[at + 64 : at + 64 + stored_bytes]
        check64(stored, head[9])
        at += 64 + stored_bytes
        payload = stored if codec == 0 else decompress(stored, raw_bytes)
        require(len(payload) == raw_bytes, "a block has another size")
        if kind == END:
            require(list(struct.unpack("<QQQ", payload)) == counts, "the totals differ")
            require(at == len(raw), "there is something after the end")
            return
        counts[2] += 1
        if kind in (ROWS, ERASED):
            counts[kind - 1] += num_rows
            keys = np.frombuffer(payload, "<i8", num_rows)
            of_left = {"cause": np.full(num_rows, cause)}
            yield kind, keys, split(payload, num_rows, fields) if kind == ROWS else of_left


def split(
    payload: bytes, num_rows: int, fields: list[tuple[str, str, int]]
) -> dict[str, np.ndarray]:
    """The fields of a block of rows; each begins at a multiple of 8 bytes."""
    found, at = {}, 8 * num_rows
    for name, dtype, width in fields:
        flat = np.frombuffer(payload, dtype, num_rows * width, at)
        found[name] = flat.reshape(num_rows, width)
        at += -(-flat.nbytes // 8) * 8
    return found


def decompress(stored: bytes, raw_bytes: int) -> bytes:
    import zstandard

    return zstandard.ZstdDecompressor().decompress(stored, max_output_size=raw_bytes)


def check64(data: bytes, checksum: int) -> None:
    require(xxhash is None or xxhash.xxh3_64_intdigest(data) == checksum, "a checksum differs")


def require(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


Table = dict[int, dict[str, np.ndarray]]


def read_chain(folders: list[Path]) -> dict[str, Table]:
    """What a snapshot and its deltas, in order, hold: rows by table and key."""
    tables: dict[str, Table] = {}
    parent = None
    for folder in folders:
        manifest = read_manifest(folder)
        chain = manifest["chain"]
        require((chain and chain["parent"]) == parent, f"{folder} does not follow the one before")
        for table in manifest["tables"]:
            rows = tables.setdefault(table["name"], {})
            for file in table["files"]:
                apply(rows, folder, file, manifest["token"])
        parent = hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
    return tables


def apply(rows: Table, folder: Path, file: dict[str, Any], token: str) -> None:
    """Puts the rows of a file in the place of older ones, and removes erased keys."""
    raw = (folder / file["path"]).read_bytes()
    require(len(raw) == file["num_bytes"], f"{file['path']} has another size")
    if xxhash is not None:
        require(xxhash.xxh3_128_hexdigest(raw) == file["checksum"], f"{file['path']} was changed")
    for kind, keys, fields in read_blocks(raw, token):
        for index, key in enumerate(keys.tolist()):
            if kind == ERASED:
                rows.pop(key, None)
            else:
                rows[key] = {name: values[index] for name, values in fields.items()}


if __name__ == "__main__":
    for name, rows in read_chain([Path(argument) for argument in sys.argv[1:]]).items():
        print(f"{name}: {len(rows)} rows")
