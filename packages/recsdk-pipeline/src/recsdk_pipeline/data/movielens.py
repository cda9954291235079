"""MovieLens 100K: who rated which film, and when.

Source: F. Maxwell Harper and Joseph A. Konstan, "The MovieLens Datasets: History and Context",
ACM Transactions on Interactive Intelligent Systems 5(4), 2015. The files are not part of recsdk.

Shapes: N ratings, U users, M items.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recsdk_core.files import local_path
from recsdk_core.files.paths import is_url
from recsdk_pipeline._internal.checks import options_of
from recsdk_pipeline._internal.urls import url_within
from recsdk_pipeline.data.examples import Float32s, IdBags
from recsdk_pipeline.data.held_out_split import HeldOutSplit
from recsdk_pipeline.data.keys import Int64s, category_key, category_keys
from recsdk_pipeline.data.lines import BadLine, BadLines, check_bad
from recsdk_pipeline.data.rows import Bags, Rows
from recsdk_pipeline.data.stream import FileData, Options
from recsdk_pipeline.data.text import Parsed, TextSource, Wanted, held_out, needing_pyarrow

if TYPE_CHECKING:
    from recsdk_pipeline.data.text_files import TextFormat
    from recsdk_pipeline.data.text_rows import Lines

GENRES = (
    "unknown",
    "Action",
    "Adventure",
    "Animation",
    "Children's",
    "Comedy",
    "Crime",
    "Documentary",
    "Drama",
    "Fantasy",
    "Film-Noir",
    "Horror",
    "Musical",
    "Mystery",
    "Romance",
    "Sci-Fi",
    "Thriller",
    "War",
    "Western",
)
"""The genres of u.item's flags, in their order."""

FEATURES = ("user", "item", "age", "gender", "occupation", "zip_code", "genres", "hour")
LOWEST_POSITIVE_RATING = 4
_OF_USERS = ("user", "age", "gender", "occupation", "zip_code")
_SECONDS_AN_HOUR = 3600
_HOURS_A_DAY = 24
_WINDOW_BYTES = 64 << 20
_RATING_COLUMNS = ("user_id", "item_id", "rating", "timestamp")
_USER_COLUMNS = ("user_id", "age", "gender", "occupation", "zip_code")
_ITEM_COLUMNS = ("item_id", "movie_title", "release_date", "video_date", "url", *GENRES)


class MovieLensData(FileData):
    """Batches of a MovieLens 100K folder, a part for each rank and DataLoader worker.

    `folder`, files and features are those of `read_movielens`; the rest is that of `CriteoData`.
    Users and items are held in memory, ratings are streamed. Malformed lines of users and items
    are counted when this is made.
    """

    def __init__(
        self,
        folder: Any,
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
        check_bad(bad)
        bad = bad if bad is not None else BadLines()
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
            movielens_source(folder, checked_options.window_bytes, options, bad), checked_options
        )


def read_movielens(
    folder: Any,
    *,
    most: int | None = None,
    seed: int = 0,
    bad: BadLines | None = None,
    options: Mapping[str, Any] | None = None,
) -> HeldOutSplit:
    """Read the first `most` ratings of a MovieLens 100K folder as clicks; all by default.

    A rating of 4 or 5 is a click. `folder` (str, bytes, os.PathLike, or an fsspec URL, to which
    `options` go) holds either u.data, u.user and u.item, or ml-100k.inter, ml-100k.user and
    ml-100k.item (tab-separated, with a header of typed columns), each plain or packed by gzip as
    NAME.gz. The features are user, item, age, gender, occupation, zip_code, genres (a bag) and hour
    (of day, UTC); the dense column is age / 100. Malformed lines go to `bad`; by default the first
    one is raised as `BadLine`. Ratings of users and items whose own lines were skipped are left
    out, and do not count as malformed. Raises FileNotFoundError for a folder with neither,
    NotADirectoryError for a file, another OSError for what cannot be read, TypeError or ValueError
    for what is no path or has fewer than ten ratings, ImportError without pyarrow and fsspec.
    """
    wanted = Wanted.of(most, seed, bad)
    return held_out(movielens_source(folder, _WINDOW_BYTES, options, wanted.bad), wanted)


@dataclass(frozen=True, kw_only=True)
class _Files:
    """One of the two layouts in which the data set is handed on."""

    ratings: str
    users: str
    items: str
    is_typed: bool


_ORIGINAL = _Files(ratings="u.data", users="u.user", items="u.item", is_typed=False)
_TYPED = _Files(ratings="ml-100k.inter", users="ml-100k.user", items="ml-100k.item", is_typed=True)


class _Folder:
    """A folder, local or behind an fsspec URL."""

    def __init__(self, folder: Any, options: Mapping[str, Any]) -> None:
        text = os.fsdecode(folder) if isinstance(folder, str | bytes | os.PathLike) else ""
        self.options = options
        self._url = text if is_url(text) else None
        self._path = Path() if self._url else local_path(folder)

    def __str__(self) -> str:
        return self._url or str(self._path)

    def find(self, name: str) -> str:
        """A file of it, plain or else packed by gzip."""
        packed = f"{name}.gz"
        return self._place(packed if not self.has(name) and self.has(packed) else name)

    def has(self, name: str) -> bool:
        """Whether the file is there."""
        if self._url is None:
            return (self._path / name).exists()
        import fsspec

        fs, path = fsspec.core.url_to_fs(self._place(name), **self.options)
        return bool(fs.exists(path))

    def files(self) -> _Files:
        """The layout that it has."""
        for files in (_TYPED, _ORIGINAL):
            if self.has(files.ratings) or self.has(f"{files.ratings}.gz"):
                return files
        if self._url is None and self._path.exists() and not self._path.is_dir():
            raise NotADirectoryError(
                f"{self}: is a file; pass the folder that holds {_ORIGINAL.ratings}, unpacked"
            )
        names = f"{_ORIGINAL.ratings} or {_TYPED.ratings}"
        raise FileNotFoundError(f"{self} holds no {names}; pass the folder that holds it")

    def _place(self, name: str) -> str:
        return url_within(self._url, name) if self._url else str(self._path / name)


def movielens_paths(folder: Any) -> list[str]:
    """The files that `movielens_source` reads."""
    place = _Folder(folder, {})
    files = place.files()
    return [place.find(name) for name in (files.ratings, files.users, files.items)]


def movielens_source(
    folder: Any, window_bytes: int, options: Mapping[str, Any] | None, bad: BadLines
) -> TextSource:
    """The files of `MovieLensData`; malformed lines of users and items go to `bad`."""
    place = _Folder(folder, options_of(options))
    files = place.files()
    try:
        from recsdk_pipeline.data.text_files import find_text
    except ImportError as error:
        raise needing_pyarrow("read_movielens") from error
    users = _read_users(_lines(place, files.users, _Columns(_USER_COLUMNS, "|", files)), bad)
    items = ("item_id", "class") if files.is_typed else _ITEM_COLUMNS
    films = _read_items(_lines(place, files.items, _Columns(items, "|", files)), files, bad)
    found = find_text(
        [place.find(files.ratings)],
        _Columns(_RATING_COLUMNS, "\t", files),
        window_bytes=window_bytes,
        options=place.options,
    )
    return TextSource(found, MovieLensParser(users, films))


@dataclass(frozen=True)
class _Columns:
    """The format of one of the files."""

    wanted: tuple[str, ...]
    separator: str
    files: _Files

    def __call__(self, path: str, first_line: str) -> TextFormat:
        from recsdk_pipeline.data.text_files import TextFormat

        if not self.files.is_typed:
            return TextFormat(columns=self.wanted, separator=self.separator)
        columns = tuple(name.partition(":")[0] for name in first_line.split("\t"))
        missing = sorted(set(self.wanted) - set(columns))
        if missing:
            found = ", ".join(columns)
            raise BadLine(path, 1, missing[0], f"no such column in the header; it has {found}")
        return TextFormat(columns=columns, separator="\t", has_header=True)


_Read = tuple["Lines", list[BadLine]]


def _lines(place: _Folder, name: str, format_of: _Columns) -> Any:
    """A whole file as (lines, a function that gives the errors noted in them)."""
    from recsdk_pipeline.data.text_files import Block, find_text, lines_of, opened
    from recsdk_pipeline.data.text_rows import bad_lines, read_exactly

    path = place.find(name)
    found = find_text([path], format_of, window_bytes=_WINDOW_BYTES, options=place.options)
    if not found.blocks:
        raise ValueError(f"{path}: has no line but its header")
    file = found.blocks[0].file
    whole = Block(file, file.start, file.size)
    with opened(path, file.packing, place.options) as opened_file:
        begin, data = lines_of(opened_file, whole)
    lines = read_exactly(data, file.format)
    return lines, lambda: bad_lines(whole, begin, lines, place.options)


@dataclass(frozen=True)
class _Known:
    """Ids of users or items that ratings may refer to, and what goes with each."""

    ids: Any
    """Bytes (U,)."""
    skipped: Any
    """Bytes, the ids whose own lines are malformed."""
    keys: Mapping[str, Int64s]
    """Of each feature (U,)."""
    ages: Float32s
    """(U,) age / 100; of items empty."""
    bags: Mapping[str, IdBags]


def _read_users(found: Any, bad: BadLines) -> _Known:
    lines, errors = found
    from recsdk_pipeline.data.text_rows import WHOLE

    ages = lines.require("age", WHOLE, "a whole number")
    numbers = _floats(ages)
    is_no_age = (numbers < 0) | (numbers > 150)
    lines.refuse("age", is_no_age, lambda value: f"{int(value)} is not an age")
    lines.require("gender", r"\A[MF]\z", "one of F, M")
    lines.require_text("occupation", "zip_code")
    is_good, table, skipped = _good(lines, errors, "user_id", bad)
    numbers = numbers[is_good]
    keys = {
        "user": category_keys("user", _text(table, "user_id")),
        "age": category_keys("age", [str(int(age)) for age in numbers]),
        **{name: category_keys(name, _text(table, name)) for name in _OF_USERS[2:]},
    }
    shares = (numbers / 100).astype(np.float32)
    return _Known(_text(table, "user_id"), skipped, keys, shares, {})


def _read_items(found: Any, files: _Files, bad: BadLines) -> _Known:
    lines, errors = found
    keys_of = {name: category_key("genres", name) for name in GENRES}
    if not files.is_typed:
        for name in GENRES:
            lines.require(name, r"\A[01]\z", "one of 0, 1")
    else:
        lines.require_text("class")
    _, table, skipped = _good(lines, errors, "item_id", bad)
    if files.is_typed:
        names = [each.decode().split() for each in _text(table, "class").to_pylist()]
        bags = [[category_key("genres", name) for name in each] for each in names]
    else:
        flags = np.array([_text(table, name).to_pylist() for name in GENRES]) == b"1"
        bags = [[keys_of[GENRES[g]] for g in np.flatnonzero(each)] for each in flags.T]
    ids = _text(table, "item_id")
    genres = {"genres": IdBags.of_lists(bags)}
    return _Known(
        ids, skipped, {"item": category_keys("item", ids)}, np.empty(0, np.float32), genres
    )


def _good(lines: Lines, errors: Any, column: str, bad: BadLines) -> tuple[Any, Any, Any]:
    """(mask, rows) of the lines that are well-formed; the ids of the others."""
    import pyarrow as pa

    for error in errors():
        bad.add(error)
    lost = [fields.get(column, "").encode() for _, _, fields in lines.problems.values()]
    is_good, table = lines.good()
    return is_good, table, pa.array(lost, pa.binary())


def _text(table: Any, name: str) -> Any:
    import pyarrow as pa

    found = table.column(name).combine_chunks()
    return found if isinstance(found, pa.Array) else pa.array([], pa.binary())


def _floats(values: Any) -> Any:
    import pyarrow as pa

    return values.cast(pa.string()).cast(pa.float64()).to_numpy(zero_copy_only=False)


def _not_listed(column: str, value: str) -> str:
    kind = column.removesuffix("_id")
    return f"{kind} {value!r} is not in the list of {kind}s"


@dataclass(frozen=True)
class MovieLensParser:
    """Rows of lines of ratings."""

    users: _Known
    items: _Known
    features: tuple[str, ...] = FEATURES
    num_dense: int = 1

    def __call__(self, data: bytes, text: TextFormat, *, threads: bool) -> Parsed:
        """The rows of whole lines."""
        import pyarrow as pa

        from recsdk_pipeline.data import text_rows

        types = dict.fromkeys(("user_id", "item_id"), pa.binary())
        types |= dict.fromkeys(("rating", "timestamp"), pa.float64())
        table = text_rows.read_quickly(data, text, types, threads=threads)
        batches = [] if table is None else table.to_batches()
        parts = [self._rows_if_sound(batch) for batch in batches]
        rows = [part for part in parts if part is not None]
        if parts and len(rows) == len(parts):
            return Parsed(rows)
        return self._exactly(text_rows.read_exactly(data, text))

    def _rows_if_sound(self, batch: Any) -> Rows | None:
        """The rows of a record batch, None if any is odd or left out."""
        which = [self._places(known, batch.column(c)) for known, c in self._sides()]
        numbers = [batch.column(name) for name in ("rating", "timestamp")]
        if any(array.null_count for array in (*which, *numbers)):
            return None
        stars, seconds = (array.to_numpy(zero_copy_only=False) for array in numbers)
        is_sound = (stars >= 1) & (stars <= 5) & (seconds >= 0) & (seconds < np.inf)
        if not is_sound.all():
            return None
        users, items = (array.to_numpy(zero_copy_only=False) for array in which)
        return self._rows(users, items, stars, seconds)

    def _exactly(self, lines: Lines) -> Parsed:
        import pyarrow as pa
        import pyarrow.compute as pc

        places, is_left_out = [], np.zeros(len(lines.numbers), bool)
        for known, column in self._sides():
            ids = lines.column(column)
            found = self._places(known, ids)
            is_skipped = pc.is_in(ids, known.skipped).to_numpy(zero_copy_only=False)
            is_absent = found.is_null().to_numpy(zero_copy_only=False)
            lines.refuse(column, is_absent & ~is_skipped, partial(_not_listed, column))
            is_left_out |= is_absent
            places.append(pc.fill_null(found, 0).to_numpy(zero_copy_only=False))
        stars, seconds = (lines.floats(name, pa.float64()) for name in ("rating", "timestamp"))
        is_odd = ~((stars >= 1) & (stars <= 5))
        lines.refuse("rating", is_odd, lambda value: f"{value!r} is not from 1 to 5")
        lines.refuse("timestamp", seconds < 0, lambda value: f"{value!r} is negative")
        is_good = lines.good()[0] & ~is_left_out
        users, items = (each[is_good] for each in places)
        rows = self._rows(users, items, stars[is_good], seconds[is_good])
        return Parsed([rows], lines, is_good)

    def _sides(self) -> tuple[tuple[_Known, str], ...]:
        return (self.users, "user_id"), (self.items, "item_id")

    def _places(self, known: _Known, ids: Any) -> Any:
        import pyarrow.compute as pc

        return pc.index_in(ids, known.ids)

    def _rows(self, users: Any, items: Any, stars: Any, seconds: Any) -> Rows:
        hours = seconds.astype(np.int64) // _SECONDS_AN_HOUR % _HOURS_A_DAY
        bags = {name: Bags(self.users.keys[name], at=users) for name in _OF_USERS}
        bags["item"] = Bags(self.items.keys["item"], at=items)
        bags["hour"] = Bags(_keys_of_hours(), at=hours)
        genres = self.items.bags["genres"]
        bags["genres"] = Bags(genres.values, genres.offsets, at=items)
        return Rows(
            (stars >= LOWEST_POSITIVE_RATING).astype(np.float32).reshape(-1, 1),
            self.users.ages.take(users).reshape(-1, 1),
            {name: bags[name] for name in FEATURES},
        )


@lru_cache(maxsize=1)
def _keys_of_hours() -> Int64s:
    return np.array([category_key("hour", str(hour)) for hour in range(_HOURS_A_DAY)])
