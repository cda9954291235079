"""Reads frozen checkpoints with Python and numpy alone: what docs/reference/frozen.md says.

    python frozen_reader.py FOLDER TABLE KEY...      the rows of some keys

It is written to be read beside that page, and shares no code with recsdk. Checksums of files are
compared if the package xxhash is installed.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np

try:
    import xxhash
except ImportError:
    xxhash = None

DTYPES = ("float32", "bfloat16", "float16", "int8", "int4")
WORD = 2**64 - 1
HEADER, TAGS = 8192, 28


def mix64(word: int) -> int:
    word = (word + 0x9E3779B97F4A7C15) & WORD
    word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & WORD
    word = ((word ^ word >> 27) * 0x94D049BB133111EB) & WORD
    return word ^ word >> 31


class File:
    """One shard's file."""

    def __init__(self, raw: bytes, token: str) -> None:
        magic, version, order, dtype, self.default = struct.unpack_from("<8sIIIf", raw)
        require(magic == b"RECSDKFZ" and version == 1, "this is no frozen file of version 1")
        require(order == 0x01020304, "this has another order of bytes")
        self.dtype = DTYPES[dtype]
        self.dim, self.row_bytes, self.num_rows, self.num_lines = struct.unpack_from("<4q", raw, 24)
        (self.seed,) = struct.unpack_from("<Q", raw, 56)
        require(raw[72:88].hex() == token, "this file belongs to another frozen checkpoint")
        size, of_index, of_records = struct.unpack_from("<qQQ", raw, 88)
        require(size == len(raw), "this file was cut short")
        self.shard, num_shards = struct.unpack_from("<II", raw, 64)
        self.num_shared, of_shared = struct.unpack_from("<qQ", raw, 4216)
        first_virtual_shard = -(-self.shard * 65536 // num_shards)
        self.first_shared = first_virtual_shard * self.num_shared >> 16
        records = HEADER + 64 * self.num_lines
        shared = records + self.num_rows * (8 + self.row_bytes)
        self.index, self.records, self.shared = (
            raw[HEADER:records],
            raw[records:shared],
            raw[shared:],
        )
        if self.num_shared:
            check64(self.shared, of_shared)
        check64(raw[: HEADER - 8], struct.unpack_from("<Q", raw, HEADER - 8)[0])
        check64(self.index, of_index)
        check64(self.records, of_records)

    def row(self, key: int) -> np.ndarray | None:
        """float32 (D,); None if the key has no row."""
        hashed = mix64((key ^ self.seed) & WORD)
        line = hashed * self.num_lines >> 64
        (begin_and_count,) = struct.unpack_from("<Q", self.index, 64 * line)
        tags = struct.unpack_from(f"<{TAGS}H", self.index, 64 * line + 8)
        begin, count = begin_and_count & 2**56 - 1, begin_and_count >> 56
        for i in range(count):
            if i >= TAGS or tags[i] == hashed >> 8 & 0xFFFF:
                at = (begin + i) * (8 + self.row_bytes)
                if struct.unpack_from("<q", self.records, at)[0] == key:
                    return self.values(self.records[at + 8 : at + 8 + self.row_bytes])
        return None

    def shared_row(self, virtual_shard: int) -> np.ndarray:
        """float32 (D,): what a missing key reads."""
        if self.num_shared == 0:
            return np.full(self.dim, self.default, np.float32)
        number = (virtual_shard * self.num_shared >> 16) - self.first_shared
        at = number * (8 + self.row_bytes)
        return self.values(self.shared[at + 8 : at + 8 + self.row_bytes])

    def values(self, row: bytes) -> np.ndarray:
        """A stored row as float32 (D,)."""
        if self.dtype == "float32":
            return np.frombuffer(row, "<f4")
        if self.dtype == "float16":
            return np.frombuffer(row, "<f2").astype(np.float32)
        if self.dtype == "bfloat16":
            return (np.frombuffer(row, "<u2").astype(np.uint32) << 16).view(np.float32)
        scalar = "<f4" if self.dtype == "int8" else "<f2"
        size = 2 * np.dtype(scalar).itemsize
        scale, bias = np.frombuffer(row[-size:], scalar).astype(np.float32)
        steps = np.frombuffer(row[:-size], np.uint8)
        if self.dtype == "int4":
            steps = np.stack([steps & 15, steps >> 4], axis=1).reshape(-1)[: self.dim]
        product: np.ndarray = steps.astype(np.float32) * scale
        return product + bias


class Table:
    """All shards of a table."""

    def __init__(self, folder: Path, name: str) -> None:
        manifest = read_manifest(folder)
        [entry] = [table for table in manifest["tables"] if table["name"] == name]
        self.files = [
            File((folder / file["path"]).read_bytes(), manifest["token"]) for file in entry["files"]
        ]

    def row(self, key: int) -> np.ndarray:
        """float32 (D,); of a missing key the default value, or the row that it shares."""
        virtual_shard = mix64(key & WORD) & 0xFFFF
        file = self.files[virtual_shard * len(self.files) >> 16]
        found = file.row(key)
        return file.shared_row(virtual_shard) if found is None else found


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, after comparing its SHA-256."""
    raw = (folder / "manifest.json").read_bytes()
    manifest = json.loads(raw)
    text = b'"sha256":"%s"'
    unsealed = raw.replace(text % manifest["sha256"].encode(), text % (b"0" * 64))
    require(hashlib.sha256(unsealed).hexdigest() == manifest["sha256"], "the manifest was changed")
    require(manifest["format"] == "recsdk-frozen", "this is no frozen checkpoint")
    require(manifest["version"] == 1, "this is a version of the format from the future")
    return manifest


def check64(data: bytes, checksum: int) -> None:
    require(xxhash is None or xxhash.xxh3_64_intdigest(data) == checksum, "a checksum differs")


def require(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


if __name__ == "__main__":
    table = Table(Path(sys.argv[1]), sys.argv[2])
    for text in sys.argv[3:]:
        print(text, *table.row(int(text)).tolist())
