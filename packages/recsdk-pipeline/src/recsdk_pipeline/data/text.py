"""Rows of text files, for streams and for memory. Imports pyarrow only when files are read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from recsdk_pipeline._internal.checks import int_within
from recsdk_pipeline.data.dealing import Group, Piece
from recsdk_pipeline.data.held_out_split import HeldOutSplit
from recsdk_pipeline.data.lines import BadLine, BadLines, check_bad
from recsdk_pipeline.data.rows import Rows, joined
from recsdk_pipeline.data.window_reading import Loaded, Read

if TYPE_CHECKING:
    from recsdk_pipeline.data.text_files import Block, TextFiles, TextFormat
    from recsdk_pipeline.data.text_rows import Lines


@dataclass(frozen=True)
class Parsed:
    """The good rows of some lines."""

    parts: list[Rows]
    """In order, at least one."""
    lines: Lines | None = None
    """What was wrong with the others; None: nothing, and no row was left out."""
    is_good: Any = None
    """Which of `lines` the rows are, (N,)."""


class Parser(Protocol):
    """How rows are made of lines. It goes to other processes by pickle."""

    @property
    def features(self) -> tuple[str, ...]:
        """Of batches, in order."""
        ...

    @property
    def num_dense(self) -> int:
        """Dense columns."""
        ...

    def __call__(self, data: bytes, text: TextFormat, *, threads: bool) -> Parsed:
        """The rows of whole lines."""
        ...


@dataclass(frozen=True)
class TextSource:
    """Files of lines."""

    files: TextFiles
    parser: Parser

    @property
    def features(self) -> tuple[str, ...]:
        """Of batches, in order."""
        return self.parser.features

    @property
    def num_dense(self) -> int:
        """Dense columns."""
        return self.parser.num_dense

    @property
    def groups(self) -> tuple[Group, ...]:
        """The blocks of all files."""
        return self.files.groups

    def name(self) -> str:
        """What the rows follow from, as text: sizes, not names, so that files may move."""
        blocks = [(each.start, each.stop) for each in self.files.blocks]
        return f"{type(self.parser).__name__} {blocks}"

    def is_small(self, piece: Piece) -> bool:
        """No block is: pyarrow.csv cuts it for its threads."""
        return False

    def reader(self, *, threads: bool) -> Read:
        """A function that reads the rows of a block."""
        read = partial(self._read, _Opened(self.files.options), threads)
        return lambda piece: read(self.files.blocks[piece.group])

    def parsed(self, *, threads: bool) -> Iterator[tuple[Parsed, list[BadLine]]]:
        """The rows of all blocks in order, and the errors of the others."""
        files = _Opened(self.files.options)
        for block in self.files.blocks:
            yield self._parse(files, threads, block)

    def _read(self, files: _Opened, threads: bool, block: Block) -> Iterator[Loaded]:
        parsed, errors = self._parse(files, threads, block)
        for part in parsed.parts:
            yield part, errors
            errors = []

    def _parse(self, files: _Opened, threads: bool, block: Block) -> tuple[Parsed, list[BadLine]]:
        from recsdk_pipeline.data.text_files import lines_of
        from recsdk_pipeline.data.text_rows import bad_lines

        begin, data = lines_of(files.of(block), block)
        parsed = self.parser(data, block.file.format, threads=threads)
        if parsed.lines is None:
            return parsed, []
        return parsed, bad_lines(block, begin, parsed.lines, self.files.options)


class _Opened:
    """The file that was read last, held open."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._path: str | None = None
        self._file: Any = None

    def of(self, block: Block) -> Any:
        """The file of a block."""
        from recsdk_pipeline.data.text_files import open_file

        if self._path != block.file.path:
            self.close()
            self._file = open_file(block.file.path, block.file.packing, self._options)
            self._path = block.file.path
        return self._file

    def close(self) -> None:
        """Let go of it."""
        if self._file is not None:
            self._file.close()
        self._path = self._file = None

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_exiting():  # modules are emptied then
            self.close()


@dataclass(frozen=True)
class Wanted:
    """The arguments of functions that read into memory."""

    most: int | None
    """Rows; None: all."""
    seed: int
    bad: BadLines
    """Where malformed lines go."""

    @classmethod
    def of(cls, most: Any, seed: Any, bad: BadLines | None) -> Wanted:
        """The arguments, checked; raise TypeError or ValueError for wrong ones."""
        most = None if most is None else int_within("most", most, 0)
        seed = int_within("seed", seed, 0)
        check_bad(bad)
        return cls(most, seed, BadLines() if bad is None else bad)


def held_out(source: TextSource, wanted: Wanted) -> HeldOutSplit:
    """The first rows in memory, a tenth of them held out; errors before them to `bad`."""
    parts: list[Rows] = []
    left = wanted.most
    for parsed, errors in source.parsed(threads=True):
        rows, last = joined(parsed.parts), len(errors)
        if left is not None and left <= len(rows):
            rows, last = rows.part(0, left), _errors_before(parsed, left)
        for error in errors[:last]:
            wanted.bad.add(error)
        parts.append(rows)
        if left is not None:
            left -= len(rows)
            if left == 0:
                break
    return HeldOutSplit(source.features, joined(parts), seed=wanted.seed)


def _errors_before(parsed: Parsed, num_rows: int) -> int:
    """How many malformed lines come before the last of the first `num_rows` good ones."""
    if parsed.lines is None or not num_rows:
        return 0
    last = parsed.lines.numbers[np.flatnonzero(parsed.is_good)[num_rows - 1]]
    return sum(number < last for number in parsed.lines.problems)


def needing_pyarrow(name: str) -> ImportError:
    """The error of a reader without pyarrow and fsspec."""
    return ImportError(f'{name} needs pyarrow and fsspec; run pip install "recsdk-pipeline[data]"')
