"""CSV files as tables, each column of one type over all files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pv

from recsdk_pipeline.data.text_files import packing_of

_BLOCK_BYTES = 1 << 20
_WHOLE_NUMBER = "^-?[0-9]+$"


def types_of(given: Sequence[str]) -> dict[str, pa.DataType]:
    """What texts such as "user=uint64" say of columns; ValueError for what says nothing."""
    types: dict[str, pa.DataType] = {}
    for text in given:
        name, _, kind = text.rpartition("=")
        if not name:
            raise ValueError(f"--type must be COLUMN=TYPE, as user=uint64, got {text!r}")
        if name in types:
            raise ValueError(f"--type must give a column one type, got two for {name!r}")
        try:
            types[name] = pa.type_for_alias(kind)
        except ValueError:
            raise ValueError(
                f"--type must be one of Arrow, such as int64, uint64 or string, got {text!r}"
            ) from None
    return types


_OTHER_DELIMITERS = "\t;|"
"""What parts columns of files that are not comma-separated; no name of a column has it."""


@dataclass(frozen=True, kw_only=True)
class CsvFiles:
    """Files with one header."""

    paths: Sequence[str]
    delimiter: str
    types: Mapping[str, pa.DataType] = field(default_factory=dict)
    """Of columns; the others' are found in the first megabyte of the first file with rows."""

    def pieces(self) -> Iterator[tuple[pa.Table, int]]:
        """Tables in order, each with the bytes read after it."""
        before, header = 0, None
        types: dict[str, pa.DataType] | None = None
        for path in self.paths:
            with _naming(path):
                header = header or self._header(path)
                types = types or self._found(path)
                done = before
                for table, read in self._tables(path, types or self.types, header):
                    done = before + read
                    yield table, done
                before = done

    def _header(self, path: str) -> list[str]:
        with fsspec.open(path, "rb") as raw:
            header = list(self._batches(_unpacked(raw, path), self.types).schema.names)
        if len(header) == 1 and (others := set(_OTHER_DELIMITERS) & set(header[0])):
            raise ValueError(
                f"{path}: has one column, named {header[0]!r:.60}; if its columns are parted by "
                f"{min(others)!r}, pass --delimiter, and else give the column another name"
            )
        if absent := sorted(set(self.types) - set(header)):
            raise ValueError(
                f"{path}: there is no column {absent[0]!r}; it has {', '.join(header)}"
            )
        return header

    def _tables(
        self, path: str, types: Mapping[str, pa.DataType], header: Sequence[str]
    ) -> Iterator[tuple[pa.Table, int]]:
        """Those of one file, each with the bytes of it that were read."""
        with fsspec.open(path, "rb") as raw:
            # Held until the end: it closes the file when it goes.
            batches = self._batches(_unpacked(raw, path), types)
            if others := sorted(set(batches.schema.names) ^ set(header)):
                raise ValueError(
                    f"{path}: its columns are {', '.join(batches.schema.names)}, and those of "
                    f"{self.paths[0]} are {', '.join(header)}; {others[0]!r} is in one of them "
                    "only; give the files one header, or convert them one by one"
                )
            for batch in batches:
                yield pa.Table.from_batches([batch]).select(list(header)), raw.tell()

    def _found(self, path: str) -> dict[str, pa.DataType] | None:
        """The types of a file's columns; None: it has no rows."""
        with fsspec.open(path, "rb") as raw:
            file = _unpacked(raw, path)
            # The first block is whole: no line of the second is looked at.
            head = pa.py_buffer(file.read(2 * _BLOCK_BYTES))
        batches = self._batches(pa.BufferReader(head), self.types)
        types = dict(zip(batches.schema.names, batches.schema.types, strict=True))
        first = next(iter(batches), None)
        if first is None:
            return None
        for name in list(types):
            if name not in self.types and _is_beyond_int64(first.column(name)):
                types = self._unsigned(head, types, name)
                if types[name] == pa.float64():
                    self._refuse_whole_numbers(path, head, name)
        return types

    def _refuse_whole_numbers(self, path: str, head: pa.Buffer, name: str) -> None:
        """Raise ValueError for a column that only its size makes one of floating numbers."""
        batches = self._batches(pa.BufferReader(head), {name: pa.string()}, are_null=True)
        texts = pc.utf8_trim_whitespace(next(iter(batches)).column(name).drop_null())
        if pc.all(pc.match_substring_regex(texts, _WHOLE_NUMBER)).as_py():
            ordered = texts.take(pc.sort_indices(texts.cast(pa.float64())))
            raise ValueError(
                f"{path}: column {name!r} has whole numbers from {ordered[0]} to {ordered[-1]}, "
                "more than int64 or uint64 holds, and double would round them; pass "
                f"--type {name}=string, or --type {name}=double to have them rounded"
            )

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

    def _batches(
        self, file: Any, types: Mapping[str, pa.DataType], *, are_null: bool = False
    ) -> Any:
        """A reader, which has read the first block; `are_null`: so are texts such as "NA"."""
        return pv.open_csv(
            file,
            read_options=pv.ReadOptions(block_size=_BLOCK_BYTES),
            parse_options=pv.ParseOptions(delimiter=self.delimiter, newlines_in_values=True),
            convert_options=pv.ConvertOptions(column_types=types, strings_can_be_null=are_null),
        )


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Has what is wrong with a file say its name, and what to do."""
    try:
        yield
    except (pa.ArrowException, KeyError) as error:
        hint = "; pass --type COLUMN=TYPE" if "conversion error" in str(error) else ""
        raise ValueError(f"{path}: cannot be read as csv: {error}{hint}") from error
    except OSError as error:
        if error.filename is not None or str(error).startswith(f"{path}:"):
            raise
        raise OSError(
            f"{path}: is damaged or cut off, or cannot be reached; copy it again: {error}"
        ) from error


def _unpacked(raw: Any, path: str) -> Any:
    packing = packing_of(path, {})
    file = pa.PythonFile(raw, mode="r")
    return file if packing is None else pa.CompressedInputStream(file, packing)


def _is_beyond_int64(column: Any) -> bool:
    """Whether pyarrow may have taken integers for floating numbers, as int64 does not hold them."""
    if column.type != pa.float64():
        return False
    return bool(np.any(np.abs(column.drop_null().to_numpy()) >= 2.0**63))
