"""Malformed lines: named, counted, and skipped up to a limit."""

from __future__ import annotations

import gzip
import math
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from io import BufferedIOBase
from pathlib import Path
from typing import TypeVar

from recsdk_core import RecsdkError

T = TypeVar("T")

_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_GZIP = b"\x1f\x8b"
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


class BadLine(RecsdkError, ValueError):
    """A line or row that cannot be read; the message names file, line and column."""

    def __init__(
        self,
        path: Path | str,
        line: int,
        column: str,
        problem: str,
        fields: Mapping[str, str] | None = None,
        *,
        noun: str = "line",
    ) -> None:
        super().__init__(f"{path}, {noun} {line}, column {column}: {problem}")
        self.path = path
        self.line = line
        self.column = column
        self.problem = problem
        self.fields = dict(fields or {})
        """The line's columns by name, as far as it has them."""


@dataclass(kw_only=True)
class BadLines:
    """Counts malformed lines and stops the reading after too many."""

    limit: int = 0
    """How many malformed lines are skipped; the next one is raised."""

    count: int = 0
    """Malformed lines met so far, skipped ones and the one raised."""

    first: list[str] = field(default_factory=list)
    """The messages of the first ten."""

    _noted: tuple[str, set[str]] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.limit < 0:
            raise ValueError(f"limit is {self.limit}; pass 0 to stop at the first bad line")

    def add(self, error: BadLine) -> None:
        """Count `error`; raise it if more than `limit` lines are malformed."""
        self.count += 1
        if len(self.first) < 10:
            self.first.append(str(error))
        if self.count > self.limit:
            raise error
        if self._noted is not None:
            column, values = self._noted
            values.add(error.fields.get(column, ""))

    @contextmanager
    def noting(self, column: str) -> Iterator[set[str]]:
        """Collect the values that the lines skipped inside have in `column`."""
        self._noted = (column, set())
        try:
            yield self._noted[1]
        finally:
            self._noted = None

    def skipping(self, read: Callable[[], T]) -> Iterator[T]:
        """Yield what `read` returns; nothing, and count, if it raises `BadLine`."""
        try:
            value = read()
        except BadLine as error:
            self.add(error)
        else:
            yield value


@dataclass(frozen=True, kw_only=True)
class TextFormat:
    """How the lines of a file are split into named columns."""

    columns: tuple[str, ...]
    separator: str
    encoding: str = "utf-8"


@dataclass(frozen=True)
class Line:
    """One line of a file, split into columns."""

    path: Path
    number: int
    fields: dict[str, str]

    def bad(self, column: str, problem: str) -> BadLine:
        """Return the error for a value of this line."""
        return BadLine(self.path, self.number, column, problem, self.fields)

    def integer(self, column: str) -> int:
        """Return the value of `column`, a whole number."""
        value = self.fields[column]
        if not _INTEGER.fullmatch(value):
            raise self.bad(column, f"{value!r} is not a whole number")
        return int(value)

    def number_of(self, column: str) -> float:
        """Return the value of `column`, a finite number."""
        value = self.fields[column]
        try:
            number = float(value)
        except ValueError:
            raise self.bad(column, f"{value!r} is not a number") from None
        if not _NUMBER.fullmatch(value) and math.isfinite(number):
            raise self.bad(column, f"{value!r} is not a number")  # as 1_0, which Python takes
        if not math.isfinite(number):
            raise self.bad(column, f"{value!r} is not a finite number")
        return number

    def one_of(self, column: str, allowed: Collection[str]) -> str:
        """Return the value of `column`, one of `allowed`."""
        value = self.fields[column]
        if value not in allowed:
            raise self.bad(column, f"{value!r} is none of {', '.join(sorted(allowed))}")
        return value


@contextmanager
def open_lines(path: Path) -> Iterator[BufferedIOBase]:
    """The bytes of a file, unpacked if it is a gzip file.

    Raises OSError for what cannot be read.
    """
    with path.open("rb") as file:
        if not file.peek(len(_GZIP)).startswith(_GZIP):
            yield file
            return
        try:
            with gzip.GzipFile(fileobj=file) as unpacked:
                yield unpacked
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise OSError(
                f"{path}: is damaged or cut off, so gzip cannot unpack it; copy it again: {error}"
            ) from error


def read_lines(path: Path, text: TextFormat, bad: BadLines, *, skip: int = 0) -> Iterator[Line]:
    """Yield the lines of `path` after the first `skip`; malformed ones go to `bad`."""
    with open_lines(path) as file:
        for number, raw in enumerate(file, start=1):
            if number <= skip:
                continue
            yield from bad.skipping(partial(_split, path, number, raw, text))


def parse_lines(lines: Iterable[Line], parse: Callable[[Line], T], bad: BadLines) -> Iterator[T]:
    """Yield `parse` of each line; lines on which it raises `BadLine` go to `bad`."""
    for line in lines:
        yield from bad.skipping(partial(parse, line))


def _split(path: Path, number: int, raw: bytes, text: TextFormat) -> Line:
    try:
        decoded = raw.decode(text.encoding)
    except UnicodeDecodeError as error:
        column = str(raw[: error.start].count(text.separator.encode()) + 1)
        fields = _fields(raw.decode(text.encoding, "replace"), text)
        found = dict(zip(text.columns, fields, strict=False))
        problem = f"not {text.encoding}: {error.reason}"
        raise BadLine(path, number, column, problem, found) from None
    fields = _fields(decoded, text)
    wanted = len(text.columns)
    if len(fields) != wanted:
        column = str(min(len(fields), wanted) + 1)
        problem = f"the line has {len(fields)} columns; {wanted} are expected"
        found = dict(zip(text.columns, fields, strict=False))
        raise BadLine(path, number, column, problem, found)
    return Line(path, number, dict(zip(text.columns, fields, strict=True)))


def _fields(line: str, text: TextFormat) -> list[str]:
    return line.rstrip("\r\n").split(text.separator)
