"""The manifest of a frozen checkpoint: its tables, and the files of their shards."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias, get_args

from recsdk_core.checkpoint._fields import Fields, sealed, unsealed
from recsdk_core.checkpoint.manifest import FROZEN_FORMAT, MAX_RANKS, MAX_TABLES
from recsdk_core.errors import CheckpointError
from recsdk_core.virtual_shards import NUM_VIRTUAL_SHARDS

__all__ = [
    "DTYPES",
    "FrozenDType",
    "FrozenFileEntry",
    "FrozenManifest",
    "FrozenSource",
    "FrozenTableEntry",
]

VERSION = 1

FrozenDType: TypeAlias = Literal["float32", "bfloat16", "float16", "int8", "int4"]
"""How rows are stored; int8 and int4 have a scale and a bias for each row."""
DTYPES: tuple[FrozenDType, ...] = get_args(FrozenDType)

_INT64 = 2**63 - 1
_WIDTH = 2**20
_HEX16 = re.compile("[0-9a-f]{16}")
_HEX32 = re.compile("[0-9a-f]{32}")
_HEX64 = re.compile("[0-9a-f]{64}")
_NAME = re.compile(r"(?s:.{1,1024})")
_PATH = re.compile("[0-9a-z_./]{1,128}")
_WRITER = re.compile("[ -~]{1,200}")


@dataclass(frozen=True, kw_only=True)
class FrozenFileEntry:
    """The file of one shard of a frozen table."""

    path: str
    """Relative to the frozen checkpoint; computed from token, table and shard."""
    num_bytes: int
    """Its size."""
    num_rows: int
    """Rows in it."""
    checksum: str
    """XXH3-64 of its header, 16 hexadecimal digits; the header has those of its other parts."""

    @staticmethod
    def path_of(token: str, table: int, shard: int) -> str:
        """Where the file of a shard lies."""
        return f"{token}/tables/{table:04d}/shard_{shard:05d}.frozen"

    @staticmethod
    def _read(fields: Fields) -> FrozenFileEntry:
        entry = FrozenFileEntry(
            path=fields.text("path", _PATH),
            num_bytes=fields.integer("num_bytes", 0, _INT64),
            num_rows=fields.integer("num_rows", 0, _INT64),
            checksum=fields.text("checksum", _HEX16),
        )
        fields.done()
        return entry


@dataclass(frozen=True, kw_only=True)
class FrozenTableEntry:
    """One table of a frozen checkpoint."""

    name: str
    """Its name in the checkpoint."""
    dim: int
    """Row width."""
    dtype: FrozenDType
    """How its rows are stored."""
    default_value: float
    """What every column of a missing key reads."""
    num_shared: int
    """Rows that missing keys share, and read in place of that; 0: none."""
    files: tuple[FrozenFileEntry, ...]
    """One a shard; shard s of W has the keys of virtual shards v with `v * W // 65536 == s`."""

    @property
    def num_rows(self) -> int:
        """Rows of all shards."""
        return sum(entry.num_rows for entry in self.files)

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(entry.num_bytes for entry in self.files)

    @staticmethod
    def _read(fields: Fields) -> FrozenTableEntry:
        choice = fields.choice("dtype", DTYPES)
        entry = FrozenTableEntry(
            name=fields.text("name", _NAME),
            dim=fields.integer("dim", 1, _WIDTH),
            dtype=next(dtype for dtype in DTYPES if dtype == choice),
            default_value=fields.number("default_value"),
            num_shared=fields.integer("num_shared", 0, NUM_VIRTUAL_SHARDS),
            files=tuple(
                FrozenFileEntry._read(item) for item in fields.children("files", 1, MAX_RANKS)
            ),
        )
        fields.done()
        return entry


@dataclass(frozen=True, kw_only=True)
class FrozenSource:
    """The checkpoint that was frozen."""

    hash: str
    """SHA-256 of its manifest's bytes, as in `Position.hash`."""
    base: str
    """That of the snapshot at the start of its chain."""
    sequence: int
    """Deltas after that snapshot."""
    step: int | None
    """The caller's step, if it has one."""

    @staticmethod
    def _read(fields: Fields) -> FrozenSource:
        source = FrozenSource(
            hash=fields.text("hash", _HEX64),
            base=fields.text("base", _HEX64),
            sequence=fields.integer("sequence", 0, _INT64),
            step=fields.optional("step", lambda name: fields.integer(name, 0, _INT64)),
        )
        fields.done()
        return source


@dataclass(frozen=True, kw_only=True)
class FrozenManifest:
    """What a frozen checkpoint holds."""

    token: str
    """128 random bits, 32 hexadecimal digits: names the folder of the files and stands in each."""
    source: FrozenSource | None
    """The checkpoint it was made of; None: tables in memory."""
    tables: tuple[FrozenTableEntry, ...]
    """The tables, in the order of the checkpoint."""
    writer: str
    """Software that wrote it."""

    @property
    def num_bytes(self) -> int:
        """Size of all files but the manifest."""
        return sum(entry.num_bytes for entry in self.tables)

    def table(self, name: str | None, where: str) -> tuple[int, FrozenTableEntry]:
        """Number and entry of a table; None: of the only one. CheckpointError if there is none."""
        if name is not None and not isinstance(name, str):
            raise TypeError(f"{where}: name must be that of a table, got {name!r}")
        names = [entry.name for entry in self.tables]
        if name is None and len(names) == 1:
            return 0, self.tables[0]
        if name is None or name not in names:
            given = "say which table" if name is None else f"there is no table {name!r}"
            raise CheckpointError(f"{where}: {given}; it has {names}")
        index = names.index(name)
        return index, self.tables[index]

    def to_bytes(self) -> bytes:
        """The file's bytes: canonical JSON with its own SHA-256; CheckpointError if too large."""
        return sealed(asdict(self), FROZEN_FORMAT, VERSION, "freeze into fewer shards")

    @staticmethod
    def from_bytes(raw: bytes, where: str) -> FrozenManifest:
        """Reads the bytes of a file; raises CheckpointError, naming `where` and the wrong field."""
        advice = "make it of a checkpoint by `recsdk freeze`"
        fields = unsealed(raw, where, FROZEN_FORMAT, VERSION, advice)
        manifest = FrozenManifest(
            token=fields.text("token", _HEX32),
            source=fields.optional("source", lambda name: FrozenSource._read(fields.child(name))),
            tables=tuple(
                FrozenTableEntry._read(item) for item in fields.children("tables", 0, MAX_TABLES)
            ),
            writer=fields.text("writer", _WRITER),
        )
        fields.done()
        _check_whole(manifest, fields)
        return manifest


def _check_whole(manifest: FrozenManifest, fields: Fields) -> None:
    names = [table.name for table in manifest.tables]
    if len(set(names)) < len(names):
        fields.fail("tables", "names a table twice")
    for index, table in enumerate(manifest.tables):
        for shard, entry in enumerate(table.files):
            expected = FrozenFileEntry.path_of(manifest.token, index, shard)
            if entry.path != expected:
                fields.fail(f"tables[{index}].files[{shard}].path", f"must be {expected!r}, got "
                            f"{entry.path!r}")  # fmt: skip
