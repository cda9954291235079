"""Criteo's display advertising data: was the ad clicked?

Source: the column layout of the Kaggle Display Advertising Challenge (Criteo Labs, 2014). The
files are not part of recsdk.

Shapes: N rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from recsdk_pipeline._internal.checks import options_of
from recsdk_pipeline.data.held_out_split import HeldOutSplit
from recsdk_pipeline.data.keys import category_keys
from recsdk_pipeline.data.lines import BadLines
from recsdk_pipeline.data.rows import Bags, Rows
from recsdk_pipeline.data.stream import FileData, Options
from recsdk_pipeline.data.text import Parsed, TextSource, Wanted, held_out, needing_pyarrow

if TYPE_CHECKING:
    from recsdk_pipeline.data.text_files import TextFormat
    from recsdk_pipeline.data.text_rows import Lines

NUMBERS = tuple(f"I{i}" for i in range(1, 14))
CATEGORIES = tuple(f"C{i}" for i in range(1, 27))
COLUMNS = ("label", *NUMBERS, *CATEGORIES)
_HEXADECIMAL = b"0123456789abcdefABCDEF"
_CATEGORY = r"\A[0-9a-fA-F]{0,16}\z"
_MOST_DIGITS = 16
_WINDOW_BYTES = 64 << 20


class CriteoData(FileData):
    """Batches of files in Criteo's format, a part for each rank and DataLoader worker.

    `source` is a file or pattern, local or by fsspec URL, or a list of them, each plain or packed
    by gzip, bzip2, zstd or lz4; `options` go to fsspec. Formats, features and numbers are those of
    `read_criteo`. A batch has `batch_size` rows of this rank, the last one the rest, or nothing
    with `drop_last`.

    Each row is read once an epoch, by one rank and worker: blocks of up to 4 MiB of text are dealt
    so that two ranks, or two workers of one, differ by one block at most. With `shuffle`, blocks
    come in an order drawn from `seed` and the epoch, and the rows in a window are shuffled. The
    blocks of a packed file stay side by side. Each rank and worker unpacks all of it, and this call
    unpacks it once to measure it. Pack many small files rather than a large one, or convert them.

    `num_threads` threads each read a window: the batches are the same, in the same order, for any
    number of them. Only one of them at a time unpacks a packed file. By default one window is read
    ahead; a DataLoader worker reads none ahead.

    Memory: a batch, and at most three windows; in a worker two, and with `num_threads` two and two
    for each thread. A window has `window_bytes` (default 64 MiB): three times its text. Malformed
    lines go to `bad`; by default the first is raised as `BadLine`. Each worker counts its own.

    `rank` and `world_size` are those of torch.distributed at this call, or 0 of 1. Not thread-safe.
    Raises ImportError without pyarrow and fsspec, OSError, ValueError or TypeError for what cannot
    be read so.
    """

    def __init__(
        self,
        source: Any,
        *,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        window_bytes: int = _WINDOW_BYTES,
        bad: BadLines | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        num_threads: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        checked_options = Options(
            batch_size=batch_size,
            window_bytes=window_bytes,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
            bad=bad,
            rank=rank,
            world_size=world_size,
            num_threads=num_threads,
        )
        super().__init__(
            criteo_source(source, checked_options.window_bytes, options), checked_options
        )


def read_criteo(
    source: Any,
    *,
    most: int | None = None,
    seed: int = 0,
    bad: BadLines | None = None,
    options: Mapping[str, Any] | None = None,
) -> HeldOutSplit:
    """Read the first `most` well-formed lines of Criteo files into memory; all by default.

    `source` and `options` are those of `CriteoData`. A file's format is either Criteo's own
    (tab-separated, no header: label, 13 integers, 26 hexadecimal categories) or comma-separated
    with a header of the names label, I1..I13, C1..C26. A missing number reads as 0 and a missing
    category as an empty bag. Numbers x become sign(x) * log(1 + |x|). Malformed lines go to `bad`;
    by default the first is raised as `BadLine`. Raises OSError for a file that cannot be read,
    TypeError or ValueError for what is no file (a pipe) and for fewer than ten examples.
    ImportError without pyarrow and fsspec.
    """
    wanted = Wanted.of(most, seed, bad)
    return held_out(criteo_source(source, _WINDOW_BYTES, options), wanted)


def criteo_source(source: Any, window_bytes: int, options: Mapping[str, Any] | None) -> TextSource:
    """The files of `CriteoData`."""
    try:
        from recsdk_pipeline.data.text_files import find_text
    except ImportError as error:
        raise needing_pyarrow("Criteo's format") from error
    files = find_text(source, _format_of, window_bytes=window_bytes, options=options_of(options))
    return TextSource(files, CriteoParser())


def _format_of(path: str, first_line: str) -> TextFormat:
    from recsdk_pipeline.data.text_files import TextFormat

    if tuple(first_line.split(",")) == COLUMNS:
        return TextFormat(columns=COLUMNS, separator=",", has_header=True)
    return TextFormat(columns=COLUMNS, separator="\t")


@dataclass(frozen=True)
class CriteoParser:
    """Rows of lines in Criteo's format."""

    features: tuple[str, ...] = CATEGORIES
    num_dense: int = len(NUMBERS)

    def __call__(self, data: bytes, text: TextFormat, *, threads: bool) -> Parsed:
        """The rows of whole lines."""
        import pyarrow as pa

        from recsdk_pipeline.data import text_rows

        types = dict.fromkeys(("label", *NUMBERS), pa.float32())
        types |= dict.fromkeys(CATEGORIES, pa.binary())
        table = text_rows.read_quickly(data, text, types, threads=threads)
        batches = [] if table is None else table.to_batches()
        if batches and all(map(_is_sound, batches)):
            return Parsed([_rows(batch) for batch in batches])
        lines = text_rows.read_exactly(data, text)
        numbers = _check(lines)
        is_good, table = lines.good()
        for name, values in numbers.items():
            place = table.column_names.index(name)
            table = table.set_column(place, name, pa.array(values[is_good]))
        return Parsed([_rows(each) for each in text_rows.batches_of(table)], lines, is_good)


def _check(lines: Lines) -> dict[str, Any]:
    """Note what is wrong; returns the labels and numbers."""
    import pyarrow as pa

    labels = lines.floats("label", pa.float32())
    is_bad = (labels != 0) & (labels != 1)
    lines.refuse("label", is_bad, lambda value: f"{value!r} is neither 0 nor 1")
    numbers = {name: lines.floats(name, pa.float32(), missing=0.0) for name in NUMBERS}
    for name in CATEGORIES:
        lines.require(name, _CATEGORY, "a hexadecimal category")
    return {"label": labels, **numbers}


def _is_sound(batch: Any) -> bool:
    labels = batch.column("label")
    values = labels.to_numpy(zero_copy_only=False)
    if labels.null_count or not ((values == 0) | (values == 1)).all():
        return False
    return all(_is_finite(batch.column(name)) for name in NUMBERS) and all(
        _is_hexadecimal(batch.column(name)) for name in CATEGORIES
    )


def _is_finite(array: Any) -> bool:
    _, data = array.buffers()
    values = np.frombuffer(data, np.float32)[array.offset : array.offset + len(array)]
    return bool(np.isfinite(values).all())  # what stands below a null is 0


def _is_hexadecimal(array: Any) -> bool:
    ends, data = _text_of(array)
    if (ends[1:] - ends[:-1]).max(initial=0) > _MOST_DIGITS:
        return False
    return not data[int(ends[0]) : int(ends[-1])].tobytes().translate(None, _HEXADECIMAL)


def _text_of(array: Any) -> tuple[Any, Any]:
    """(offsets (N + 1,), bytes) of an array of bytes."""
    _, offsets, data = array.buffers()
    ends = np.frombuffer(offsets, np.int32)[array.offset : array.offset + len(array) + 1]
    return ends, np.frombuffer(data or b"", np.uint8)


def _rows(batch: Any) -> Rows:
    """The rows of a record batch in which nothing is wrong."""
    from recsdk_pipeline.data.text_rows import filled

    dense = np.empty((len(batch), len(NUMBERS)), np.float32)
    for index, name in enumerate(NUMBERS):
        numbers = filled(batch.column(name), 0.0)
        dense[:, index] = np.copysign(np.log1p(np.abs(numbers)), numbers)
    labels = batch.column("label").to_numpy(zero_copy_only=False).reshape(-1, 1)
    bags = {name: _bags(name, batch.column(name)) for name in CATEGORIES}
    return Rows(labels.astype(np.float32), dense, bags)


def _bags(name: str, array: Any) -> Bags:
    if not len(array):
        return Bags(np.empty(0, np.int64))
    ends, _ = _text_of(array)
    is_there = ends[1:] > ends[:-1]
    keys = category_keys(name, array)
    return Bags(keys) if is_there.all() else Bags(keys, is_there=is_there)
