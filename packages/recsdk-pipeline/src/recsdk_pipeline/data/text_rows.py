"""Lines as Arrow's columns, read by pyarrow.csv; and what is wrong with them.

Shapes: N rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pv

from recsdk_pipeline.data.keys import Int64s
from recsdk_pipeline.data.lines import BadLine
from recsdk_pipeline.data.text_files import Block, TextFormat, line_number, opened

WHOLE = r"\A[+-]?[0-9]{1,18}\z"
NUMBER = r"\A[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\z"
_LONE_RETURN = re.compile(rb"\r(?!\n)")
_MARK = b"\x00"


def read_quickly(
    data: bytes, text: TextFormat, types: Mapping[str, pa.DataType], *, threads: bool
) -> pa.Table | None:
    """The lines as columns of `types`, or None if any is odd: then `read_exactly` tells which.

    Numbers that are empty are null. A column that is not in `types` is left out.
    """
    # Arrow trims numbers, and takes a lone carriage return for the end of a line.
    if not data or b" " in data:
        return None
    if b"\r" in data and data.count(b"\r") != data.count(b"\r\n"):
        return None
    if text.separator != "\t" and b"\t" in data:
        return None
    options = pv.ConvertOptions(
        column_types=types,
        include_columns=list(types),
        null_values=[""],
        strings_can_be_null=False,
        check_utf8=False,
    )
    size = (2 << 20) if threads else len(data) + 1
    try:
        return pv.read_csv(
            pa.BufferReader(data),
            pv.ReadOptions(column_names=text.columns, use_threads=threads, block_size=size),
            pv.ParseOptions(delimiter=text.separator, quote_char=False, ignore_empty_lines=False),
            options,
        )
    except pa.ArrowInvalid:
        return None


@dataclass
class Lines:
    """N lines in columns of bytes, and what is wrong with them and the lines between them."""

    table: pa.Table
    """Columns (N,) of bytes."""
    numbers: Int64s
    """(N,) of the lines, from 0 at the first that was passed."""
    problems: dict[int, tuple[str, str, dict[str, str]]] = field(default_factory=dict)
    """(column, problem, the line's fields) of each malformed line, by number."""

    def column(self, name: str) -> Any:
        """One column (N,), in one piece."""
        found = self.table.column(name).combine_chunks()
        return found if isinstance(found, pa.Array) else pa.array([], pa.binary())

    def refuse(self, column: str, is_bad: Any, problem: Callable[[str], str]) -> None:
        """Note the rows of the mask `is_bad` (N,) that nothing else is wrong with."""
        for row in np.flatnonzero(is_bad).tolist():
            number = int(self.numbers[row])
            if number not in self.problems:
                found = self.fields(row)
                self.problems[number] = (column, problem(found[column]), found)

    def fields(self, row: int) -> dict[str, str]:
        """The columns of one row as text."""
        return {
            name: self.table.column(name)[row].as_py().decode("utf-8", "replace")
            for name in self.table.column_names
        }

    def require(self, column: str, pattern: str, what: str) -> Any:
        """Refuse what does not match; the column with 0 in place of that."""
        values = self.column(column)
        fits = pc.match_substring_regex(values, pattern=pattern)
        self.refuse(column, _flags(pc.invert(fits)), lambda value: f"{value!r} is not {what}")
        return pc.if_else(fits, values, pa.scalar(b"0"))

    def require_text(self, *columns: str) -> None:
        """Refuse what is not UTF-8."""
        for column in columns:
            if not _is_all_text(self.column(column)):
                values = self.column(column).to_pylist()
                is_bad = np.array([not _is_all_text(pa.array([value])) for value in values])
                self.refuse(column, is_bad, lambda value: f"{value!r} is not utf-8")

    def floats(self, column: str, kind: Any, *, missing: float | None = None) -> Any:
        """A column of finite numbers of a type (N,); others are refused. `missing`: what "" is."""
        pattern = NUMBER if missing is None else rf"{NUMBER}|\A\z"
        values = self.require(column, pattern, "a number")
        if missing is not None:
            is_empty = pc.equal(pc.binary_length(values), 0)
            values = pc.if_else(is_empty, pa.scalar(repr(missing).encode()), values)
        numbers = values.cast(pa.string()).cast(kind).to_numpy(zero_copy_only=False)
        is_bad = ~np.isfinite(numbers)
        self.refuse(column, is_bad, lambda value: f"{value!r} is not finite as {kind}")
        return numbers

    def good(self) -> tuple[Any, pa.Table]:
        """(mask (N,), rows): those with which nothing is wrong."""
        bad = np.fromiter(self.problems, np.int64, len(self.problems))
        is_good = ~np.isin(self.numbers, bad)
        return is_good, self.table.filter(pa.array(is_good))


def read_exactly(data: bytes, text: TextFormat) -> Lines:
    """The lines as columns of bytes; those with too many or too few columns are noted."""
    data = data if data.endswith(b"\n") or not data else data + b"\n"
    returns = [match.start() for match in _LONE_RETURN.finditer(data)]
    marked = np.frombuffer(_LONE_RETURN.sub(_MARK, data) if returns else data, np.uint8)
    ends = np.concatenate([[0], np.flatnonzero(marked == ord("\n")) + 1])
    separators = np.flatnonzero(marked == ord(text.separator))
    columns = np.diff(np.searchsorted(separators, ends)) + 1
    is_whole = columns == len(text.columns)
    kept = marked if is_whole.all() else marked[np.repeat(is_whole, np.diff(ends))]
    lines = Lines(_table(kept.tobytes(), text), np.flatnonzero(is_whole))
    for number in np.flatnonzero(~is_whole).tolist():
        line = data[ends[number] : ends[number + 1]]
        lines.problems[number] = _of_columns(line, text)
    _refuse_returns(lines, data, returns, text)
    return lines


def _table(data: bytes, text: TextFormat) -> pa.Table:
    if not data:
        return pa.table({name: pa.array([], pa.binary()) for name in text.columns})
    return pv.read_csv(
        pa.BufferReader(data),
        pv.ReadOptions(column_names=text.columns, use_threads=False, block_size=len(data) + 1),
        pv.ParseOptions(delimiter=text.separator, quote_char=False, ignore_empty_lines=False),
        pv.ConvertOptions(
            column_types=dict.fromkeys(text.columns, pa.binary()), strings_can_be_null=False
        ),
    )


def _of_columns(line: bytes, text: TextFormat) -> tuple[str, str, dict[str, str]]:
    fields = line.rstrip(b"\r\n").decode("utf-8", "replace").split(text.separator)
    found, wanted = len(fields), len(text.columns)
    problem = f"the line has {found} columns; {wanted} are expected"
    named = dict(zip(text.columns, fields, strict=False))
    return str(min(found, wanted) + 1), problem, named


def _refuse_returns(lines: Lines, data: bytes, returns: Sequence[int], text: TextFormat) -> None:
    for at in returns:
        start = data.rfind(b"\n", 0, at) + 1
        column = data.count(text.separator.encode(), start, at)
        name = text.columns[min(column, len(text.columns) - 1)]
        is_here = lines.numbers == data.count(b"\n", 0, at)
        lines.refuse(name, is_here, lambda _: "a carriage return within the line")


def bad_lines(block: Block, begin: int, lines: Lines, options: Mapping[str, Any]) -> list[BadLine]:
    """The errors of the malformed lines of a block, which begins at byte `begin`."""
    if not lines.problems:
        return []
    with opened(block.file.path, block.file.packing, options) as file:
        first = line_number(file, begin)
    return [
        BadLine(block.file.path, first + number, column, problem, fields)
        for number, (column, problem, fields) in sorted(lines.problems.items())
    ]


def filled(array: Any, default: float) -> Any:
    """Numbers (N,) as numpy's, nulls as `default`."""
    array = pc.fill_null(array, default) if array.null_count else array
    return array.to_numpy(zero_copy_only=False)


def _is_all_text(values: Any) -> bool:
    try:
        values.cast(pa.string())
    except pa.ArrowInvalid:
        return False
    return True


def _flags(mask: Any) -> Any:
    return mask.to_numpy(zero_copy_only=False)


def batches_of(table: pa.Table) -> list[pa.RecordBatch]:
    """The record batches of a table, at least one."""
    return table.to_batches() or [pa.RecordBatch.from_pylist([], schema=table.schema)]
