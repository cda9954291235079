"""The manifest of a checkpoint: what it holds, every file with size and checksum, and its parent.

Its JSON is described field by field in docs/reference/checkpoint.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from recsdk_core.checkpoint._fields import MAX_MANIFEST_BYTES, Fields, sealed, unsealed
from recsdk_core.checkpoint.columns import name_of
from recsdk_core.checkpoint.user_state import MAX_DEPTH
from recsdk_core.leavers import LeaveCause

__all__ = [
    "FORMAT",
    "FROZEN_FORMAT",
    "MANIFEST_NAME",
    "MAX_MANIFEST_BYTES",
    "METADATA",
    "RECORD_FIELDS",
    "VERSION",
    "AdmissionEntry",
    "ChainLink",
    "ColumnsEntry",
    "Described",
    "EvictionEntry",
    "Field",
    "FileEntry",
    "Manifest",
    "RowsEntry",
    "Sharding",
    "TableEntry",
    "UserEntry",
    "path_of_counts",
    "path_of_rows",
    "path_of_user_file",
]

FORMAT = "recsdk-checkpoint"
FROZEN_FORMAT = "recsdk-frozen"
"""Of what `recsdk freeze` makes, which may lie beside the checkpoints that it is made of."""
VERSION = 1
MANIFEST_NAME = "manifest.json"
MAX_RANKS = 65_536
MAX_TABLES = 10_000
MAX_USER_FILES = 100_000

_INT64 = 2**63 - 1
_MOST_UPDATES = 2**62
_UINT64 = 2**64 - 1
_WIDTH = 2**20
_MOST_DEPTH = 10
_HEX32 = re.compile("[0-9a-f]{32}")
_HEX64 = re.compile("[0-9a-f]{64}")
_NAME = re.compile(r"(?s:.{1,1024})")
_WORD = re.compile("[A-Za-z_][A-Za-z0-9_]{0,63}")
_PATH = re.compile("[0-9a-z_./]{1,128}")
_WRITER = re.compile("[ -~]{1,200}")
_DTYPES = ("float32", "bfloat16", "float16", "int64", "int32", "uint64", "uint32", "uint8")
_ROWS = ("virtual_shard", "modulo")


@dataclass(frozen=True, kw_only=True)
class Described:
    """A setting of a table, as its optimizer: the name of a class of recsdk_core, and arguments."""

    kind: str
    """Name of the class, as "Adagrad"."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Its arguments: JSON values. A function (`init.Custom`) is not kept, or its name (`Evict`)."""

    def __str__(self) -> str:
        given = ((name, value) for name, value in self.arguments.items() if value is not None)
        return f"{self.kind}({', '.join(f'{name}={value!r}' for name, value in given)})"

    @staticmethod
    def _read(fields: Fields) -> Described:
        kind = fields.text("kind", _WORD)
        arguments = fields.flat("arguments", _MOST_DEPTH)
        if not isinstance(arguments, dict):
            fields.fail("arguments", "must be an object")
        fields.done()
        return Described(kind=kind, arguments=arguments)


@dataclass(frozen=True, kw_only=True)
class Field:
    """One field of a row: the weights, then optimizer state, then metadata."""

    name: str
    """Its name; the first is "weight"."""
    dtype: str
    """As numpy names it, or "bfloat16"."""
    width: int
    """Numbers in each row."""

    @staticmethod
    def _read(fields: Fields) -> Field:
        name = fields.text("name", _WORD)
        dtype = fields.choice("dtype", _DTYPES)
        width = fields.integer("width", 1, _WIDTH)
        fields.done()
        return Field(name=name, dtype=dtype, width=width)


_NUMBERS_BY_CAUSE = ("num_evicted", "num_expired")

METADATA = (
    Field(name="evict_step", dtype="int64", width=1),
    Field(name="evict_time", dtype="int64", width=1),
    Field(name="evict_count", dtype="int64", width=1),
    Field(name="evict_score", dtype="float32", width=1),
    Field(name="evict_show_click", dtype="int64", width=1),
    Field(name="evict_totals", dtype="int64", width=1),
    Field(name="evict_worth", dtype="int64", width=1),
    Field(name="evict_norm", dtype="float32", width=1),
    Field(name="evict_place", dtype="float32", width=1),
    Field(name="evict_born", dtype="int64", width=1),
)
"""What eviction may keep of a key, in the order of a file."""


RECORD_FIELDS = (
    Field(name="weight", dtype="int64", width=1),
    Field(name="admit_step", dtype="int64", width=1),
    Field(name="admit_clicks", dtype="int64", width=1),
)
"""What a file of counts has of a key without a row: how often it was seen, in which step last, and
with a rule that keeps them its clicks."""


@dataclass(frozen=True, kw_only=True)
class EvictionEntry:
    """The rule for who leaves the table, and where its clock stands."""

    rule: Described
    """An `Evict` and its arguments."""
    step: int | None
    """The step of the last call that inserted, as the table counts; None: there was none."""
    time: int | None
    """The time of calls that bring none, if it is set."""

    def __str__(self) -> str:
        time = "" if self.time is None else f", time {self.time}"
        return f"{self.rule}, at step {self.step}{time}"

    @staticmethod
    def _read(fields: Fields) -> EvictionEntry:
        def number(name: str) -> int | None:
            return fields.optional(name, lambda n: fields.integer(n, -_INT64 - 1, _INT64))

        entry = EvictionEntry(
            rule=Described._read(fields.child("rule")),
            step=number("step"),
            time=number("time"),
        )
        fields.done()
        return entry


@dataclass(frozen=True, kw_only=True)
class ColumnsEntry:
    """Of a table that is a range of columns of another: that one, and where the range begins."""

    table: str
    """The name of the table that is cut."""
    first: int
    """The first column of the range, which has `dim` of them."""

    @staticmethod
    def _read(fields: Fields) -> ColumnsEntry:
        entry = ColumnsEntry(
            table=fields.text("table", _NAME), first=fields.integer("first", 0, _WIDTH)
        )
        fields.done()
        return entry


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Which rank's file has a key."""

    rule: Literal["virtual_shard", "modulo"] = "virtual_shard"
    """"virtual_shard": by a fixed hash of the key; "modulo": `uint64(key) % W`, W files."""
    num_virtual_shards: int = 65_536
    """V, a power of two; of V virtual shards, file r of W has those with
    `virtual_shard * W // V == r`."""

    @staticmethod
    def _read(fields: Fields) -> Sharding:
        rule = fields.choice("rule", _ROWS)
        shards = fields.integer("num_virtual_shards", 1, MAX_RANKS)
        if shards & (shards - 1) or (rule == "modulo" and shards != MAX_RANKS):
            fields.fail(
                "num_virtual_shards",
                f"must be a power of two, and {MAX_RANKS} with the rule 'modulo', got {shards}",
            )
        fields.done()
        return Sharding(rule="modulo" if rule == "modulo" else "virtual_shard",
                        num_virtual_shards=shards)  # fmt: skip


def path_of_rows(token: str, table: int, shard: int) -> str:
    """Where the file of a shard lies."""
    return f"{token}/tables/{table:04d}/rank_{shard:05d}.rows"


def path_of_counts(token: str, table: int, shard: int) -> str:
    """Where the counts of a shard lie."""
    return f"{token}/tables/{table:04d}/rank_{shard:05d}.counts"


def path_of_user_file(token: str, index: int) -> str:
    """Where a file of user state lies."""
    return f"{token}/user/{index:05d}.bin"


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """A file of the checkpoint."""

    path: str
    """Relative to the checkpoint; computed from token, table and rank."""
    num_bytes: int
    """Its size."""
    checksum: str
    """Of its bytes, in hexadecimal: XXH3-128 of a file of rows, SHA-256 of a file of user state."""


@dataclass(frozen=True, kw_only=True)
class RowsEntry(FileEntry):
    """A file of rows of one table."""

    num_rows: int
    """Rows in it."""
    num_erased: int
    """Keys in it that left the table, for whatever cause; 0 in a snapshot."""
    num_evicted: int = 0
    """Those of them that were evicted."""
    num_expired: int = 0
    """Those of them that had expired."""

    @staticmethod
    def _read(fields: Fields) -> RowsEntry:
        entry = RowsEntry(
            path=fields.text("path", _PATH),
            num_bytes=fields.integer("num_bytes", 0, _INT64),
            checksum=fields.text("checksum", _HEX32),
            num_rows=fields.integer("num_rows", 0, _INT64),
            num_erased=fields.integer("num_erased", 0, _INT64),
            **{
                name: fields.integer(name, 1, _INT64)
                for name in _NUMBERS_BY_CAUSE
                if fields.has(name)
            },
        )
        fields.done()
        if entry.num_evicted + entry.num_expired > entry.num_erased:
            fields.fail("num_erased", "is less than those that were evicted or had expired")
        return entry


@dataclass(frozen=True, kw_only=True)
class AdmissionEntry:
    """The rule for which new keys get a row, and how often keys without one were seen."""

    rule: Described
    """An `Admit`: its terms in postfix order, `max_records`, and of a sketch `max_bytes`."""
    step: int | None
    """The step of the last call that inserted, as the table counts; None: there was none."""
    files: tuple[RowsEntry, ...]
    """The counts of keys without a row: one beside each file of rows."""

    def __str__(self) -> str:
        return f"{self.rule}, at step {self.step}"

    @property
    def fields(self) -> tuple[Field, ...]:
        """What its files have of a key: clicks only if a term of the rule keeps them."""
        terms = self.rule.arguments.get("rule")
        kinds = [term.get("kind") for term in terms if isinstance(term, dict)] if terms else []
        return RECORD_FIELDS if "show_click" in kinds else RECORD_FIELDS[:2]

    @property
    def has_sketch(self) -> bool:
        """Whether the counts are the words of a sketch."""
        return self.rule.arguments.get("max_bytes") is not None

    @staticmethod
    def _read(fields: Fields) -> AdmissionEntry:
        entry = AdmissionEntry(
            rule=Described._read(fields.child("rule")),
            step=fields.optional("step", lambda n: fields.integer(n, -_INT64 - 1, _INT64)),
            files=tuple(RowsEntry._read(item) for item in fields.children("files", 1, MAX_RANKS)),
        )
        fields.done()
        return entry


@dataclass(frozen=True, kw_only=True)
class UserEntry(FileEntry):
    """A file of user state."""

    kind: Literal["bytes", "array"]
    """Plain bytes, or an array as a .npy file."""

    @staticmethod
    def _read(fields: Fields) -> UserEntry:
        kind = fields.choice("kind", ("bytes", "array"))
        entry = UserEntry(
            path=fields.text("path", _PATH),
            num_bytes=fields.integer("num_bytes", 0, _INT64),
            checksum=fields.text("checksum", _HEX64),
            kind="array" if kind == "array" else "bytes",
        )
        fields.done()
        return entry


@dataclass(frozen=True, kw_only=True)
class TableEntry:
    """One table of a checkpoint."""

    name: str
    """Its name; part of the identity of initial rows."""
    dim: int
    """Row width."""
    columns: ColumnsEntry | None = None
    """Of which table they are a range of columns; None: it has all columns."""
    seed: int | None
    """Drives initial rows; None: not known, as for imported rows."""
    initializer: Described | None
    """How new rows get their values; None: not known."""
    default_value: float
    """What a missing key reads."""
    optimizer: Described | None
    """With the learning rate in use; None: rows without optimizer state."""
    update_count: int
    """Optimizer updates so far."""
    log_decay: float = 0.0
    """What the rows' state "log_decay" is compared with; see `Table.log_decay`."""
    eviction: EvictionEntry | None = None
    """Who leaves; None: nobody."""
    admission: AdmissionEntry | None = None
    """Which new keys get a row; None: all."""
    default: Described | None = None
    """The `Default` of a table whose keys without a row read no constant. If they share rows, these
    are a table of the checkpoint of their own, see `columns.shared_name`; None: `default_value`."""
    fields: tuple[Field, ...]
    """What a row consists of, in the order of the file."""
    sharding: Sharding
    """Which file has a key."""
    files: tuple[RowsEntry, ...]
    """One for each shard of the rows, in order; often one a rank."""

    @property
    def num_rows(self) -> int:
        """Rows of all files; in a delta, those that changed."""
        return sum(entry.num_rows for entry in self.files)

    @property
    def num_erased(self) -> int:
        """Erased keys of all ranks' files."""
        return sum(entry.num_erased for entry in self.files)

    @property
    def num_by_cause(self) -> dict[LeaveCause, int]:
        """Those erased keys by why they left."""
        evicted = sum(entry.num_evicted for entry in self.files)
        expired = sum(entry.num_expired for entry in self.files)
        return {
            LeaveCause.EVICTED: evicted,
            LeaveCause.ERASED: self.num_erased - evicted - expired,
            LeaveCause.EXPIRED: expired,
        }

    @property
    def num_bytes(self) -> int:
        """Size of all ranks' files."""
        return sum(entry.num_bytes for entry in self.files)

    @property
    def whole_name(self) -> str:
        """The name that its table has in the model, which a range of columns says in its own."""
        return self.name if self.columns is None else self.columns.table

    @property
    def identity(self) -> tuple[Any, ...]:
        """What must be equal along a chain: all that training and resharding do not change."""
        kind = None if self.optimizer is None else self.optimizer.kind
        reads = self.default_value, self.default
        return self.name, self.columns, self.seed, self.initializer, reads, kind, self.fields

    @staticmethod
    def _read(fields: Fields) -> TableEntry:
        entry = TableEntry(
            name=fields.text("name", _NAME),
            dim=fields.integer("dim", 1, _WIDTH),
            columns=ColumnsEntry._read(fields.child("columns")) if fields.has("columns") else None,
            seed=fields.optional("seed", lambda name: fields.integer(name, 0, _UINT64)),
            initializer=fields.optional("initializer", lambda n: Described._read(fields.child(n))),
            default_value=fields.number("default_value"),
            optimizer=fields.optional("optimizer", lambda n: Described._read(fields.child(n))),
            update_count=fields.integer("update_count", 0, _MOST_UPDATES),
            log_decay=fields.number("log_decay"),
            eviction=(
                EvictionEntry._read(fields.child("eviction")) if fields.has("eviction") else None
            ),
            admission=(
                AdmissionEntry._read(fields.child("admission")) if fields.has("admission") else None
            ),
            default=Described._read(fields.child("default")) if fields.has("default") else None,
            fields=tuple(Field._read(item) for item in fields.children("fields", 1, 32)),
            sharding=Sharding._read(fields.child("sharding")),
            files=tuple(RowsEntry._read(item) for item in fields.children("files", 1, MAX_RANKS)),
        )
        fields.done()
        names = [item.name for item in entry.fields]
        if names[0] != "weight" or entry.fields[0].width != entry.dim:
            fields.fail("fields", f"must begin with 'weight' of width {entry.dim}")
        if len(set(names)) < len(names):
            fields.fail("fields", "names a field twice")
        if entry.columns is not None:
            first = entry.columns.first
            expected = name_of(entry.columns.table, (first, first + entry.dim))
            if entry.name != expected:
                fields.fail("name", f"must be {expected!r} by its columns, got {entry.name!r}")
        if entry.log_decay > 0:
            fields.fail("log_decay", f"must be 0.0 or less, got {entry.log_decay}")
        return entry


@dataclass(frozen=True, kw_only=True)
class ChainLink:
    """Where a checkpoint stands in a chain; hashes are SHA-256 of a manifest's bytes."""

    parent: str
    """Hash of the checkpoint that the delta builds on."""
    base: str
    """Hash of the snapshot that the chain begins with."""
    sequence: int
    """1 for the first delta after the snapshot."""

    @staticmethod
    def _read(fields: Fields) -> ChainLink:
        link = ChainLink(
            parent=fields.text("parent", _HEX64),
            base=fields.text("base", _HEX64),
            sequence=fields.integer("sequence", 1, _INT64),
        )
        fields.done()
        return link


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds."""

    token: str
    """128 random bits, 32 hexadecimal digits: names the folder of the files and stands in each."""
    chain: ChainLink | None
    """None for a snapshot."""
    world_size: int
    """Ranks that wrote it."""
    step: int | None
    """The caller's step, if given."""
    tables: tuple[TableEntry, ...]
    """The tables, in the order of their files' folders."""
    user_state: Any = None
    """JSON values; {"$file": i} stands for file i of `user_files`."""
    user_files: tuple[UserEntry, ...] = ()
    """Bytes and arrays of the user's state."""
    writer: str
    """Software that wrote it."""

    @property
    def kind(self) -> Literal["snapshot", "delta"]:
        """ "snapshot" or "delta"."""
        return "snapshot" if self.chain is None else "delta"

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """All files but the manifest."""
        rows = [entry for table in self.tables for entry in table.files]
        with_counts = (table.admission for table in self.tables if table.admission is not None)
        counts = [entry for admission in with_counts for entry in admission.files]
        return (*rows, *counts, *self.user_files)

    @property
    def num_bytes(self) -> int:
        """Size of all files but the manifest."""
        return sum(entry.num_bytes for entry in self.files)

    def to_bytes(self) -> bytes:
        """The file's bytes: canonical JSON with its own SHA-256; CheckpointError if too large."""
        value = asdict(self)
        for table in value["tables"]:
            for file in table["files"] + ((table["admission"] or {}).get("files") or ()):
                for name in _NUMBERS_BY_CAUSE:
                    if file[name] == 0:
                        del file[name]
            for if_any in ("columns", "eviction", "admission", "default"):
                if table[if_any] is None:
                    del table[if_any]
        advice = "save fewer tables, or cut them into fewer shards"
        return sealed(value, FORMAT, VERSION, advice)

    @staticmethod
    def from_bytes(raw: bytes, where: str) -> Manifest:
        """Reads the bytes of a file; raises CheckpointError, naming `where` and the wrong field."""
        advice = "this is no checkpoint of recsdk, or a frozen one, which ServingTable opens"
        fields = unsealed(raw, where, FORMAT, VERSION, advice)
        manifest = _read(fields)
        _check_whole(manifest, fields)
        return manifest


def _read(fields: Fields) -> Manifest:
    chain = fields.optional("chain", fields.child)
    manifest = Manifest(
        token=fields.text("token", _HEX32),
        chain=None if chain is None else ChainLink._read(chain),
        world_size=fields.integer("world_size", 1, MAX_RANKS),
        step=fields.optional("step", lambda name: fields.integer(name, 0, _INT64)),
        tables=tuple(TableEntry._read(item) for item in fields.children("tables", 0, MAX_TABLES)),
        user_state=fields.flat("user_state", MAX_DEPTH + 1),
        user_files=tuple(
            UserEntry._read(item) for item in fields.children("user_files", 0, MAX_USER_FILES)
        ),
        writer=fields.text("writer", _WRITER),
    )
    fields.done()
    return manifest


def _check_whole(manifest: Manifest, fields: Fields) -> None:
    """Checks what several fields together can get wrong."""
    names = [table.name for table in manifest.tables]
    if len(set(names)) < len(names):
        fields.fail("tables", "names a table twice")
    if manifest.num_bytes > _INT64:
        fields.fail("tables", f"lists files of {manifest.num_bytes} bytes together")
    for index, table in enumerate(manifest.tables):
        for rank, entry in enumerate(table.files):
            expected = path_of_rows(manifest.token, index, rank)
            if entry.path != expected:
                fields.fail(f"tables[{index}].files[{rank}].path", f"must be {expected!r}, got "
                            f"{entry.path!r}")  # fmt: skip
            if manifest.chain is None and entry.num_erased:
                fields.fail(f"tables[{index}].files[{rank}].num_erased", "must be 0 in a snapshot")
        _check_counts(manifest, index, fields)
    for index, user_file in enumerate(manifest.user_files):
        expected = path_of_user_file(manifest.token, index)
        if user_file.path != expected:
            fields.fail(f"user_files[{index}].path", f"must be {expected!r}, got "
                        f"{user_file.path!r}")  # fmt: skip


def _check_counts(manifest: Manifest, index: int, fields: Fields) -> None:
    """Checks the files of counts of a table."""
    table = manifest.tables[index]
    files = () if table.admission is None else table.admission.files
    if table.admission is not None and len(files) != len(table.files):
        fields.fail(f"tables[{index}].admission.files", f"must be {len(table.files)}, as of rows")
    for rank, entry in enumerate(files):
        expected = path_of_counts(manifest.token, index, rank)
        if entry.path != expected or entry.num_erased:
            fields.fail(f"tables[{index}].admission.files[{rank}]", f"must be {expected!r} without "
                        "erased keys")  # fmt: skip
