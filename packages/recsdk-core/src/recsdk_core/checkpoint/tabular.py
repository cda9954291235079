"""Rows in files of other formats: parquet, safetensors, npz. Their libraries are extras.

Shape letters: N keys, D row width.
"""

from __future__ import annotations

import errno
import json
import shutil
import struct
import tempfile
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recsdk_core._internal.checks import require_table_name
from recsdk_core._internal.extras import require
from recsdk_core.checkpoint.comparing import as_floats
from recsdk_core.checkpoint.joining import table_named, whole_fields, whole_rows
from recsdk_core.checkpoint.manifest import Field, Sharding, TableEntry
from recsdk_core.checkpoint.merging import KeySet, Rows
from recsdk_core.checkpoint.owners import Owner
from recsdk_core.checkpoint.reading import Checkpoint, Position, Progress
from recsdk_core.checkpoint.replacing import as_stored
from recsdk_core.checkpoint.saving import SaveOptions, fields_of
from recsdk_core.checkpoint.transforming import write_snapshot
from recsdk_core.files import file_to_read, file_to_write, local_path
from recsdk_core.files.naming import naming_file
from recsdk_core.files.whole_file import written_whole

__all__ = ["FORMATS", "export_table", "import_table", "read_arrays"]

FORMATS = ("parquet", "safetensors")

_SAFETENSORS = {
    "float32": "F32",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "uint64": "U64",
    "uint32": "U32",
    "uint8": "U8",
}
_IMPORTS = {
    ".npz": "npz",
    ".npy": "npy",
    ".parquet": "parquet",
    ".safetensors": "safetensors",
}


def export_table(
    chain: Sequence[Checkpoint],
    name: str,
    path: Any,
    format: str,
    progress: Progress | None = None,
) -> int:
    """Writes a table's rows to a file that must not exist; returns the number of rows.

    A table that ranks had cut by columns is whole; a field that each range has a number of has them
    side by side. It takes 70 bytes a key of memory, and disk for its rows once more meanwhile.

    parquet: a row per key, columns "key" int64 and a fixed-size list per field, streamed.
    safetensors: tensors "key" (N,) and one (N, width) per field, streamed through temporary files
    beside it. bfloat16 becomes float32. Raises ValueError for another format, TypeError or
    ValueError for a path that is not local, ImportError, which says what to install,
    FileExistsError if the file is there, BlockingIOError if another process is writing it, another
    OSError if it cannot be written. On a file system without locks the first of two to end wins.
    """
    if format not in FORMATS:
        raise ValueError(f"format must be one of {FORMATS}, got {format!r}")
    path = file_to_write(path)
    table = table_named(chain[-1], name)
    fields = whole_fields(table)
    rows_of_table = whole_rows(chain, table, str(path.parent), progress)
    source = (_plain(rows, fields) for rows in rows_of_table)
    write = _write_parquet if format == "parquet" else _write_safetensors
    with written_whole(path) as part, naming_file(str(path), "writing"):
        return write(part, source, fields)


def _plain(rows: Rows, fields: Sequence[Field]) -> Rows:
    return Rows(rows.keys, {f.name: as_floats(rows.fields[f.name], f.dtype) for f in fields})


def _dtype(field: Field) -> Any:
    return np.dtype("float32" if field.dtype == "bfloat16" else field.dtype)


def _write_parquet(path: Path, source: Iterable[Rows], fields: Sequence[Field]) -> int:
    require("pyarrow", extra="parquet", user="parquet")
    import pyarrow as pa
    from pyarrow import parquet

    lists = [(f.name, pa.list_(pa.from_numpy_dtype(_dtype(f)), f.width)) for f in fields]
    schema = pa.schema([("key", pa.int64()), *lists])
    num_rows = 0
    # Opened here: pyarrow takes no name that is not UTF-8.
    with path.open("wb") as file, parquet.ParquetWriter(file, schema) as writer:
        for rows in source:
            columns = [pa.array(rows.keys)]
            for field, (_, kind) in zip(fields, lists, strict=True):
                flat = pa.array(np.ascontiguousarray(rows.fields[field.name]).reshape(-1))
                columns.append(pa.FixedSizeListArray.from_arrays(flat, type=kind))
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))
            num_rows += len(rows.keys)
    return num_rows


def _write_safetensors(path: Path, source: Iterable[Rows], fields: Sequence[Field]) -> int:
    """Writes a file for each tensor first, since the number of rows is known only at the end.

    Source: the format of https://github.com/huggingface/safetensors: the length of the header as a
    u64, the header as JSON, then the tensors without gaps.
    """
    widths = {"key": (), **{field.name: (field.width,) for field in fields}}
    dtypes = {"key": np.dtype(np.int64), **{f.name: _dtype(f) for f in fields}}
    num_rows = 0
    with ExitStack() as stack:
        spools = {
            name: stack.enter_context(tempfile.TemporaryFile(dir=path.parent)) for name in widths
        }
        for rows in source:
            for name, values in {"key": rows.keys, **rows.fields}.items():
                spools[name].write(np.ascontiguousarray(values).data)
            num_rows += len(rows.keys)
        header, at = {}, 0
        for name, width in widths.items():
            end = at + spools[name].tell()
            dtype = _SAFETENSORS[dtypes[name].name]
            header[name] = {"dtype": dtype, "shape": [num_rows, *width], "data_offsets": [at, end]}
            at = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # so that the tensors are aligned
        target = stack.enter_context(path.open("wb"))
        target.write(struct.pack("<Q", len(text)) + text)
        for spool in spools.values():
            spool.seek(0)
            shutil.copyfileobj(spool, target, 2**20)
    return num_rows


def read_arrays(path: Any, names: Collection[str] | None = None) -> dict[str, NDArray[Any]]:
    """The arrays of a .npz, .safetensors or .parquet file by name; bfloat16 as float32.

    With `names` these alone are read. A .npy file has one array without a name; a .parquet may be a
    folder of files. Raises ValueError for another suffix, for names that a file lacks and for what
    is damaged or empty, OSError for what cannot be read, ImportError, which says what to install.
    """
    path = local_path(path)
    if not (path.is_dir() and path.suffix.lower() == ".parquet"):
        file_to_read(path)
    kind = _IMPORTS.get(path.suffix.lower())
    if kind is None:
        raise ValueError(
            f"{path}: must end in one of {', '.join(_IMPORTS)}, got "
            f"{path.suffix or 'no such end'!r}; give it the end of its format"
        )
    read: Mapping[str, Callable[[Path, _Choose], dict[str, NDArray[Any]]]] = {
        "npz": _read_npz,
        "npy": _read_npy,
        "parquet": _read_parquet,
        "safetensors": _read_safetensors,
    }
    with naming_file(str(path), "reading"):
        try:
            return read[kind](path, partial(_chosen, str(path), names))
        except (ImportError, _Lacks):
            raise
        except Exception as error:  # each library raises kinds of its own
            if isinstance(error, OSError) and not _tells_damage(error):
                raise
            raise ValueError(f"{path}: cannot be read as {kind}: {error}") from error


def _tells_damage(error: OSError) -> bool:
    """Whether it is no answer of the system, or its answer to a place that no file can have."""
    return error.errno in (None, errno.EINVAL)


class _Lacks(ValueError):
    """A file lacks an array that is wanted."""


_Choose: TypeAlias = Callable[[Collection[str]], list[str]]
"""Of the names of a file's arrays those that are wanted."""


def _chosen(path: str, names: Collection[str] | None, there: Collection[str]) -> list[str]:
    for name in () if names is None else names:
        if name not in there:
            raise _Lacks(f"{path}: has no array {name!r}; it has {', '.join(there) or 'none'}")
    return [name for name in there if names is None or name in names]


def _read_npz(path: Path, choose: _Choose) -> dict[str, NDArray[Any]]:
    if not zipfile.is_zipfile(path):
        raise ValueError("it is no zip archive")
    with np.load(path, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in choose(arrays.files)}


def _read_npy(path: Path, _: _Choose) -> dict[str, NDArray[Any]]:
    with path.open("rb") as file:
        return {"": np.lib.format.read_array(file, allow_pickle=False)}


def _read_safetensors(path: Path, choose: _Choose) -> dict[str, NDArray[Any]]:
    require("safetensors", extra="safetensors", user="safetensors")
    from safetensors import safe_open

    found, without_numpy = {}, []
    with safe_open(path, framework="numpy") as file:  # which checks the header, too
        for name in choose(file.keys()):  # it is no dict
            if file.get_slice(name).get_dtype() == "BF16":
                without_numpy.append(name)
            else:
                found[name] = file.get_tensor(name)
    return {**found, **_read_bfloat16(path, without_numpy)}


def _read_bfloat16(path: Path, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Tensors of a type that numpy does not have, as float32. For the format: `_write_safetensors`.

    The file was read by its library before.
    """
    found = {}
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
        for name in names:
            begin, end = header[name]["data_offsets"]
            file.seek(8 + size + begin)
            raw = np.fromfile(file, np.dtype("<u2"), (end - begin) // 2)
            found[name] = as_floats(raw, "bfloat16").reshape(header[name]["shape"])
    return found


def _read_parquet(path: Path, choose: _Choose) -> dict[str, NDArray[Any]]:
    require("pyarrow", extra="parquet", user="parquet")
    from pyarrow import parquet

    with ExitStack() as stack:
        # A file is opened here: pyarrow takes no name that is not UTF-8.
        source = path if path.is_dir() else stack.enter_context(path.open("rb"))
        files = parquet.ParquetDataset(source)
        if not files.schema.names:
            raise ValueError("it has no columns")
        table = files.read(choose(files.schema.names)).combine_chunks()
    found = {}
    for name in table.column_names:
        column = table[name].combine_chunks()
        if column.null_count:
            raise ValueError(
                f"column {name!r} must have no missing values, got {column.null_count} of "
                f"{len(column)}; leave such rows out, or fill them in"
            )
        if hasattr(column, "flatten") and hasattr(column.type, "value_type"):
            found[name] = _rows_of_lists(column, f"column {name!r}")
        else:
            found[name] = column.to_numpy(zero_copy_only=False)
    return found


def _rows_of_lists(column: Any, where: str) -> NDArray[Any]:
    """A column of lists as (n, width); ValueError if they differ in length or lack a value."""
    from pyarrow import compute

    lengths = set(compute.list_value_length(column).to_pylist())
    if len(lengths) > 1:
        raise ValueError(
            f"{where} must have lists of one length, got {sorted(lengths)[:5]}; give each row as "
            "many numbers"
        )
    values = column.flatten()
    if values.null_count:
        raise ValueError(
            f"{where} must have no missing values in its lists, got {values.null_count} of "
            f"{len(values)}; fill them in"
        )
    flat: NDArray[Any] = values.to_numpy(zero_copy_only=False)
    width = lengths.pop() if lengths else getattr(column.type, "list_size", 1)
    return flat.reshape(len(column), width)


def import_table(
    path: Any,
    name: str,
    keys: NDArray[Any],
    weights: NDArray[Any],
    *,
    dtype: str = "float32",
    seed: int | None = None,
    world_size: int = 1,
    options: SaveOptions | None = None,
    called: tuple[str, str] = ("keys", "weights"),
) -> Position:
    """Writes weights (N, D) of 64-bit keys (N,) as a snapshot with one table.

    It names no optimizer or initializer, so it loads into any table of the same width and `dtype`,
    with fresh optimizer state. Weights of 16 bits are rounded to the nearest, as by `Table.upsert`.
    Raises ValueError for shapes or dtypes that do not fit and for repeated keys; `called` is what
    keys and weights are called there.
    """
    require_table_name("import_table", name)
    keys, weights = _checked(keys, weights, *called)
    stored = as_stored(weights, dtype)
    entry = TableEntry(
        name=name,
        dim=weights.shape[1],
        seed=seed,
        initializer=None,
        default_value=0.0,
        optimizer=None,
        update_count=0,
        fields=fields_of(weights.shape[1], (), dtype),
        sharding=Sharding(),
        files=(),
    )

    def rows_of(_: str, owner: Owner, progress: Progress | None) -> Iterator[Rows]:
        is_owned = owner.owns(keys)
        if is_owned.any():
            yield Rows(keys[is_owned], {"weight": stored[is_owned]})

    given = options or SaveOptions()
    told = SaveOptions(**{**vars(given), "world_size": world_size})
    return write_snapshot(path, [entry], rows_of, told)


def _checked(
    keys: NDArray[Any], weights: NDArray[Any], of_keys: str, of_weights: str
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    if keys.ndim != 1 or keys.dtype.kind not in "iu":
        raise ValueError(f"{of_keys} must be whole numbers (N,), got {keys.dtype} {keys.shape}")
    if weights.ndim != 2 or len(weights) != len(keys) or not weights.shape[1]:
        raise ValueError(
            f"{of_weights} must have shape ({len(keys)}, D), got {weights.shape}: a row for each "
            "key"
        )
    if weights.dtype.kind != "f":
        raise ValueError(f"{of_weights} must be floats, got {weights.dtype}")
    if keys.dtype == np.uint64:
        keys = keys.view(np.int64)
    keys = np.ascontiguousarray(keys, dtype=np.int64)
    is_new = KeySet().add(keys)
    if not is_new.all():
        raise ValueError(f"{of_keys} must not repeat, got {keys[~is_new][0]} again; give each once")
    return keys, np.ascontiguousarray(weights, dtype=np.float32)
