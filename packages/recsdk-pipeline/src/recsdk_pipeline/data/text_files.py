"""Files of lines, plain or packed, local or behind fsspec URLs, in blocks of whole lines."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import fsspec
import pyarrow as pa

from recsdk_core.files import file_to_read, local_path
from recsdk_core.files.paths import is_url
from recsdk_core.files.urls import require_protocols
from recsdk_pipeline._internal.urls import is_pattern, urls_of
from recsdk_pipeline.data.dealing import Group

_MOST_BLOCK_BYTES = 4 << 20
_LEAST_BLOCK_BYTES = 64
_BLOCKS_A_WINDOW = 4
_MEMORY_A_BYTE = 3
_READ_BYTES = 1 << 20
_LONGEST_LINE = 16 << 20
_MAGICS = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bz2",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}


@dataclass(frozen=True, kw_only=True)
class TextFormat:
    """How the lines of a file are split into named columns."""

    columns: tuple[str, ...]
    separator: str
    has_header: bool = False


@dataclass(frozen=True)
class TextFile:
    """One file."""

    path: str
    packing: str | None
    """A codec of pyarrow; None: plain."""
    size: int
    """Bytes, unpacked."""
    start: int
    """Bytes before the first line that is data."""
    format: TextFormat


@dataclass(frozen=True)
class Block:
    """The lines that begin in the bytes start..stop of a file."""

    file: TextFile
    start: int
    stop: int


@dataclass(frozen=True)
class TextFiles:
    """What was found once; it is the same in every process, and can be pickled."""

    groups: tuple[Group, ...]
    """One for each block; the blocks of a packed file keep together."""
    blocks: tuple[Block, ...]
    options: Mapping[str, Any]


def find_text(
    source: Any,
    format_of: Callable[[str, str], TextFormat],
    *,
    window_bytes: int,
    options: Mapping[str, Any],
) -> TextFiles:
    """The blocks of all files of `source`; `format_of` is told a path and its first line.

    A packed file is unpacked once to measure it.
    """
    wanted = window_bytes // (_BLOCKS_A_WINDOW * _MEMORY_A_BYTE)
    size = max(_LEAST_BLOCK_BYTES, min(_MOST_BLOCK_BYTES, wanted))
    groups: list[Group] = []
    blocks: list[Block] = []
    for number, path in enumerate(paths_of(source, options)):
        file = _look(path, format_of, options)
        for start in range(file.start, file.size, size):
            blocks.append(Block(file, start, min(file.size, start + size)))
            taken = _MEMORY_A_BYTE * (blocks[-1].stop - start)
            run = number if file.packing is not None else None
            groups.append(Group(rows=1, bytes=taken, run=run))
    return TextFiles(tuple(groups), tuple(blocks), options)


def paths_of(source: Any, options: Mapping[str, Any]) -> list[str]:
    """All files of `source`: a file, a URL, a pattern, or a list of them; in order."""
    is_one = isinstance(source, str | bytes | os.PathLike) or not isinstance(source, Sequence)
    found = [path for each in ([source] if is_one else source) for path in _expanded(each, options)]
    if not found:
        raise FileNotFoundError(f"{source}: names no file")
    return found


def _expanded(place: Any, options: Mapping[str, Any]) -> list[str]:
    text = os.fsdecode(place) if isinstance(place, str | bytes | os.PathLike) else ""
    if not is_url(text):
        path = local_path(place)
        if path.exists() or not is_pattern(text):
            return [str(file_to_read(path))]
        text = str(path)
    require_protocols(text)
    fs, inner = fsspec.core.url_to_fs(text, **options)
    if not is_pattern(inner):
        return [text]
    found = sorted(fs.glob(inner))
    if not found:
        raise FileNotFoundError(f"{text}: names no file; look at the pattern for mistakes")
    return urls_of(found, text, inner)


def _look(
    path: str, format_of: Callable[[str, str], TextFormat], options: Mapping[str, Any]
) -> TextFile:
    packing = packing_of(path, options)
    with opened(path, packing, options) as file:
        first = line_at(file, 0)
        size = file.size()
    line_format = format_of(path, first.decode("utf-8", "replace").rstrip("\r\n"))
    start = len(first) if line_format.has_header else 0
    return TextFile(path, packing, size, start, line_format)


def packing_of(path: str, options: Mapping[str, Any]) -> str | None:
    """The codec that packed a file; None: it is plain. Raises ValueError for an empty one."""
    try:
        with opened(path, None, options) as file:
            magic = file.read_at(0, 4)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{path}: there is no such file; look at the path for mistakes"
        ) from error
    if not magic:
        raise ValueError(f"{path}: is empty; was it written or copied to its end?")
    return next((codec for mark, codec in _MAGICS.items() if magic.startswith(mark)), None)


class LocalFile:
    """A plain file of this machine."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read_at(self, start: int, size: int) -> bytes:
        """At most `size` bytes; fewer only at the end."""
        return os.pread(self._file, size, start)

    def size(self) -> int:
        """Bytes."""
        return os.fstat(self._file).st_size

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)


class RemoteFile:
    """A plain file behind an fsspec URL: a request for each read."""

    def __init__(self, path: str, options: Mapping[str, Any]) -> None:
        self.path = path
        self._fs, self._inner = fsspec.core.url_to_fs(path, **options)
        self._size = int(self._fs.info(self._inner)["size"])

    def read_at(self, start: int, size: int) -> bytes:
        """At most `size` bytes; fewer only at the end."""
        stop = min(self._size, start + size)
        return bytes(self._fs.cat_file(self._inner, start=start, end=stop)) if start < stop else b""

    def size(self) -> int:
        """Bytes."""
        return self._size

    def close(self) -> None:
        """Nothing is held."""


class PackedFile:
    """A packed file, best read from front to back: what lies further back is unpacked anew."""

    def __init__(self, path: str, codec: str, options: Mapping[str, Any]) -> None:
        self.path, self._codec, self._options = path, codec, options
        self._raw: Any = None
        self._start, self._held = 0, b""
        self._begin()

    def read_at(self, start: int, size: int) -> bytes:
        """At most `size` bytes; fewer only at the end."""
        if start < self._start:
            self._begin()
        while self._start + len(self._held) < start + size and (more := self._more()):
            # Lines reach a little back behind what is read next.
            drop = min(len(self._held), max(0, start - _READ_BYTES - self._start))
            self._held = self._held[drop:] + more
            self._start += drop
        return self._held[start - self._start : start - self._start + size]

    def size(self) -> int:
        """Bytes, unpacked; unpacks all."""
        while more := self._more():
            self._start += len(self._held)
            self._held = more
        return self._start + len(self._held)

    def close(self) -> None:
        """Let go of the file."""
        if self._raw is not None:
            self._raw.close()

    def _begin(self) -> None:
        self.close()
        if is_url(self.path):
            fs, path = fsspec.core.url_to_fs(self.path, **self._options)
            self._raw = fs.open(path, "rb")
        else:
            self._raw = open(self.path, "rb")  # noqa: SIM115
        self._unpacked = pa.CompressedInputStream(pa.PythonFile(self._raw, mode="r"), self._codec)
        self._start, self._held = 0, b""

    def _more(self) -> bytes:
        try:
            return bytes(self._unpacked.read(_READ_BYTES))
        except (pa.ArrowException, OSError, EOFError) as error:
            raise OSError(
                f"{self.path}: is damaged or cut off, so {self._codec} cannot unpack it; copy it "
                f"again: {error}"
            ) from error


@contextmanager
def opened(path: str, packing: str | None, options: Mapping[str, Any]) -> Iterator[Any]:
    """A file with `read_at`, closed at the end."""
    file = open_file(path, packing, options)
    try:
        yield file
    finally:
        file.close()


def open_file(path: str, packing: str | None, options: Mapping[str, Any]) -> Any:
    """A file with `read_at`, `size` and `close`."""
    if packing is not None:
        return PackedFile(path, packing, options)
    return RemoteFile(path, options) if is_url(path) else LocalFile(path)


def line_at(file: Any, start: int) -> bytes:
    """The line that begins at `start`, its end included. Raises ValueError for a line too long."""
    found: bytes = b""
    size = 1 << 12
    more: bytes
    while more := file.read_at(start + len(found), size):
        end = more.find(b"\n")
        if end >= 0:
            return bytes(found + more[: end + 1])
        found, size = found + more, 2 * size
        if len(found) > _LONGEST_LINE:
            raise ValueError(
                f"{file.path}: has a line of more than {_LONGEST_LINE} bytes; is it a text file?"
            )
    return found


def lines_of(file: Any, block: Block) -> tuple[int, bytes]:
    """(where they begin, the lines that begin in a block), the last one whole."""
    before = block.start > block.file.start
    data = file.read_at(block.start - before, block.stop - block.start + before)
    if before:
        end = data.find(b"\n")
        # No line begins here: the end that a block's last byte may be belongs to the next.
        if end < 0 or end + 1 >= len(data):
            return block.stop, b""
        data = data[end + 1 :]
    begin = block.stop - len(data)
    return begin, data if data.endswith(b"\n") else data + line_at(file, block.stop)


def line_number(file: Any, begin: int) -> int:
    """The number, from 1, of the line that begins at byte `begin`."""
    count, at = 1, 0
    while at < begin and (data := file.read_at(at, min(_READ_BYTES, begin - at))):
        count += data.count(b"\n")
        at += len(data)
    return count
