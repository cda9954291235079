"""CSV files as tables, each column of one type over all files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.csv as pv

from recsdk_pipeline.data.text_files import packing_of

_BLOCK_BYTES = 1 << 20


def types_of(given: Sequence[str]) -> dict[str, pa.DataType]:
    """What texts such as "user=uint64" say of columns; ValueError for what says nothing."""
    types: dict[str, pa.DataType] = {}
    for text in given:
        name, _, kind = text.rpartition("=")
        if not name:
            raise ValueError(f"--type is {text!r}; pass COLUMN=TYPE, as user=uint64")
        if name in types:
            raise ValueError(f"--type gives column {name!r} two types; pass one")
        try:
            types[name] = pa.type_for_alias(kind)
        except ValueError:
            raise ValueError(
                f"--type {text}: Arrow has no type {kind!r}; pass one such as int64, uint64, string"
            ) from None
    return types


@dataclass(frozen=True, kw_only=True)
class CsvFiles:
    """Files with one header."""

    paths: Sequence[str]
    delimiter: str
    types: Mapping[str, pa.DataType] = field(default_factory=dict)
    """Of columns; the others' are found in the first megabyte of the first file."""

    def __post_init__(self) -> None:
        if len(self.delimiter) != 1:
            raise ValueError(f"--delimiter is {self.delimiter!r}; pass one character")

    def pieces(self) -> Iterator[tuple[pa.Table, int]]:
        """Tables in order, each with the bytes read after it."""
        before, types = 0, None
        for path in self.paths:
            with _naming(path):
                types = types or self._found(path)
                done = before
                for table, read in self._tables(path, types):
                    done = before + read
                    yield table, done
                before = done

    def _tables(
        self, path: str, types: Mapping[str, pa.DataType]
    ) -> Iterator[tuple[pa.Table, int]]:
        """Those of one file, each with the bytes of it that were read."""
        with fsspec.open(path, "rb") as raw:
            # Held until the end: it closes the file when it goes.
            batches = self._batches(_unpacked(raw, path), types)
            for batch in batches:
                yield pa.Table.from_batches([batch]).select(list(types)), raw.tell()

    def _found(self, path: str) -> dict[str, pa.DataType]:
        with fsspec.open(path, "rb") as raw:
            file = _unpacked(raw, path)
            # The first block is whole: no line of the second is looked at.
            head = pa.py_buffer(file.read(2 * _BLOCK_BYTES))
        batches = self._batches(pa.BufferReader(head), self.types)
        types = dict(zip(batches.schema.names, batches.schema.types, strict=True))
        if absent := sorted(set(self.types) - set(types)):
            raise ValueError(f"{path}: there is no column {absent[0]!r}; it has {', '.join(types)}")
        first = next(iter(batches), None)
        if first is None:
            return types
        for name in list(types):
            if name not in self.types and _may_be_unsigned(first.column(name)):
                types = self._unsigned(head, types, name)
        return types

    def _unsigned(
        self, head: pa.Buffer, types: dict[str, pa.DataType], name: str
    ) -> dict[str, pa.DataType]:
        """The types with uint64 for a column, if it holds such numbers."""
        changed = {**types, name: pa.uint64()}
        try:
            self._batches(pa.BufferReader(head), changed)
        except pa.ArrowInvalid:
            return types
        return changed

    def _batches(self, file: Any, types: Mapping[str, pa.DataType]) -> Any:
        """A reader, which has read the first block."""
        return pv.open_csv(
            file,
            read_options=pv.ReadOptions(block_size=_BLOCK_BYTES),
            parse_options=pv.ParseOptions(delimiter=self.delimiter, newlines_in_values=True),
            convert_options=pv.ConvertOptions(column_types=types),
        )


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Has what is wrong with a file say its name, and what to do."""
    try:
        yield
    except (pa.ArrowException, KeyError) as error:
        hint = "; pass --type COLUMN=TYPE" if "conversion error" in str(error) else ""
        raise ValueError(f"{path}: cannot be read as csv: {error}{hint}") from error


def _unpacked(raw: Any, path: str) -> Any:
    packing = packing_of(path, {})
    file = pa.PythonFile(raw, mode="r")
    return file if packing is None else pa.CompressedInputStream(file, packing)


def _may_be_unsigned(column: Any) -> bool:
    """Whether pyarrow took integers for floating numbers, as it does if one is above int64's."""
    if column.type != pa.float64():
        return False
    numbers = column.drop_null().to_numpy()
    above = numbers >= 2.0**63
    return bool(above.any() and np.all(numbers >= 0) and np.all(numbers <= 2.0**64))
