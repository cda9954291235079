"""MovieLens 100K: who rated which film, and when.

Source: F. Maxwell Harper and Joseph A. Konstan, "The MovieLens Datasets: History and Context",
ACM Transactions on Interactive Intelligent Systems 5(4), 2015. The files are not part of recsdk.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from recsdk_core.files import file_to_read, local_path
from recsdk_pipeline.data.examples import Examples, IdBags
from recsdk_pipeline.data.held_out_split import HeldOutSplit
from recsdk_pipeline.data.keys import category_key, category_keys
from recsdk_pipeline.data.lines import (
    BadLine,
    BadLines,
    Line,
    TextFormat,
    open_lines,
    parse_lines,
    read_lines,
)

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

LOWEST_POSITIVE_RATING = 4
_SECONDS_AN_HOUR = 3600
_HOURS_A_DAY = 24


@dataclass(frozen=True)
class _User:
    age: int
    gender: str
    occupation: str
    zip_code: str


@dataclass(frozen=True)
class _Rating:
    user: str
    item: str
    label: float
    hour: int


@dataclass(frozen=True)
class _Known:
    """Ids of users or items that ratings may refer to."""

    read: Collection[str]
    skipped: Collection[str]
    """Ids whose own lines are malformed."""

    def has(self, line: Line, column: str, kind: str) -> bool:
        """Whether the id was read; False if its line was skipped, else the line is malformed."""
        value = line.fields[column]
        if value not in self.read and value not in self.skipped:
            raise line.bad(column, f"{kind} {value!r} is not in the list of {kind}s")
        return value in self.read


@dataclass(frozen=True, kw_only=True)
class _Files:
    """One of the two layouts in which the data set is handed on."""

    ratings: str
    users: str
    items: str
    typed: bool

    def lines(self, path: Path, text: TextFormat, bad: BadLines) -> Iterator[Line]:
        if not self.typed:
            return read_lines(path, text, bad)
        tabbed = TextFormat(columns=_header(path), separator="\t")
        missing = sorted(set(text.columns) - set(tabbed.columns))
        if missing:
            found = ", ".join(tabbed.columns)
            raise BadLine(path, 1, missing[0], f"no such column in the header; it has {found}")
        return read_lines(path, tabbed, bad, skip=1)


_ORIGINAL = _Files(ratings="u.data", users="u.user", items="u.item", typed=False)
_TYPED = _Files(ratings="ml-100k.inter", users="ml-100k.user", items="ml-100k.item", typed=True)

_RATING_COLUMNS = ("user_id", "item_id", "rating", "timestamp")
_USER_COLUMNS = ("user_id", "age", "gender", "occupation", "zip_code")
_RATINGS = TextFormat(columns=_RATING_COLUMNS, separator="\t")
_USERS = TextFormat(columns=_USER_COLUMNS, separator="|")
_FLAGGED_ITEMS = TextFormat(
    columns=("item_id", "movie_title", "release_date", "video_date", "url", *GENRES),
    separator="|",
    encoding="latin-1",
)
_TYPED_ITEMS = TextFormat(columns=("item_id", "class"), separator="\t")


FEATURES = ("user", "item", "age", "gender", "occupation", "zip_code", "genres", "hour")


def read_movielens(
    folder: Any, *, most: int | None = None, seed: int = 0, bad: BadLines | None = None
) -> HeldOutSplit:
    """Read the first `most` ratings of a MovieLens 100K folder as clicks; all by default.

    A rating of 4 or 5 is a click. `folder` (str, bytes or os.PathLike) holds either u.data, u.user
    and u.item, or ml-100k.inter, ml-100k.user and ml-100k.item (tab-separated, with a header of
    typed columns), each plain or packed by gzip as NAME.gz. The features are user, item, age,
    gender, occupation, zip_code, genres (a bag) and hour (of day, UTC); the dense column is age /
    100. Malformed lines go to `bad`; by default the first one is raised as `BadLine`. Ratings of
    users and items whose own lines were skipped are left out, and do not count as malformed. Raises
    FileNotFoundError for a folder with neither, NotADirectoryError for a file, another OSError for
    what cannot be read, and TypeError or ValueError for what is no local path or has fewer than ten
    ratings.
    """
    examples = _read(local_path(folder), most, bad if bad is not None else BadLines())
    return HeldOutSplit(FEATURES, examples, seed=seed)


def _read(folder: Path, most: int | None, bad: BadLines) -> Examples:
    files = next((f for f in (_TYPED, _ORIGINAL) if _find(folder, f.ratings).is_file()), None)
    if files is None and folder.exists() and not folder.is_dir():
        raise NotADirectoryError(
            f"{folder}: is a file; pass the folder that holds {_ORIGINAL.ratings}, unpacked"
        )
    if files is None:
        names = f"{_ORIGINAL.ratings} or {_TYPED.ratings}"
        raise FileNotFoundError(f"{folder} holds no {names}; pass the folder that holds it")
    with bad.noting("user_id") as lost_users:
        users = _read_users(file_to_read(_find(folder, files.users)), files, bad)
    with bad.noting("item_id") as lost_items:
        genres = _read_genres(file_to_read(_find(folder, files.items)), files, bad)
    lines = files.lines(file_to_read(_find(folder, files.ratings)), _RATINGS, bad)
    parse = _rating_parser(_Known(users, lost_users), _Known(genres, lost_items))
    ratings = list(islice(filter(None, parse_lines(lines, parse, bad)), most))
    return _examples(ratings, users, genres)


def _find(folder: Path, name: str) -> Path:
    """The path of a file, plain or else packed by gzip."""
    packed = folder / f"{name}.gz"
    return packed if not (folder / name).exists() and packed.exists() else folder / name


def _header(path: Path) -> tuple[str, ...]:
    with open_lines(path) as file:
        names = file.readline().decode("utf-8", "replace").rstrip("\r\n").split("\t")
    return tuple(name.partition(":")[0] for name in names)


def _read_users(path: Path, files: _Files, bad: BadLines) -> dict[str, _User]:
    def parse(line: Line) -> tuple[str, _User]:
        age = line.integer("age")
        if not 0 <= age <= 150:
            raise line.bad("age", f"{age} is not an age")
        gender = line.one_of("gender", ("M", "F"))
        fields = line.fields
        return fields["user_id"], _User(age, gender, fields["occupation"], fields["zip_code"])

    return dict(parse_lines(files.lines(path, _USERS, bad), parse, bad))


def _read_genres(path: Path, files: _Files, bad: BadLines) -> dict[str, list[int]]:
    def parse_typed(line: Line) -> tuple[str, list[int]]:
        names = line.fields["class"].split()
        return line.fields["item_id"], [category_key("genres", name) for name in names]

    def parse_flags(line: Line) -> tuple[str, list[int]]:
        names = [name for name in GENRES if line.one_of(name, ("0", "1")) == "1"]
        return line.fields["item_id"], [category_key("genres", name) for name in names]

    text, parse = (_TYPED_ITEMS, parse_typed) if files.typed else (_FLAGGED_ITEMS, parse_flags)
    return dict(parse_lines(files.lines(path, text, bad), parse, bad))


def _rating_parser(users: _Known, items: _Known) -> Callable[[Line], _Rating | None]:
    def parse(line: Line) -> _Rating | None:
        user, item = line.fields["user_id"], line.fields["item_id"]
        has_user, has_item = users.has(line, "user_id", "user"), items.has(line, "item_id", "item")
        stars, seconds = line.number_of("rating"), line.number_of("timestamp")
        if not 1 <= stars <= 5:
            raise line.bad("rating", f"{line.fields['rating']!r} is not from 1 to 5")
        if seconds < 0:
            raise line.bad("timestamp", f"{line.fields['timestamp']!r} is negative")
        if not (has_user and has_item):
            return None
        hour = int(seconds) // _SECONDS_AN_HOUR % _HOURS_A_DAY
        return _Rating(user, item, float(stars >= LOWEST_POSITIVE_RATING), hour)

    return parse


def _examples(
    ratings: list[_Rating], users: dict[str, _User], genres: dict[str, list[int]]
) -> Examples:
    who = [users[rating.user] for rating in ratings]
    singles = {
        "user": [rating.user for rating in ratings],
        "item": [rating.item for rating in ratings],
        "age": [str(user.age) for user in who],
        "gender": [user.gender for user in who],
        "occupation": [user.occupation for user in who],
        "zip_code": [user.zip_code for user in who],
        "hour": [str(rating.hour) for rating in ratings],
    }
    bags = {name: _single(name, values) for name, values in singles.items()}
    bags["genres"] = IdBags.of_lists([genres[rating.item] for rating in ratings])
    ages = np.array([user.age for user in who], dtype=np.float32)
    return Examples(
        labels=np.array([rating.label for rating in ratings], dtype=np.float32),
        dense=(ages[:, None] / 100).astype(np.float32),
        bags={name: bags[name] for name in FEATURES},
    )


def _single(feature: str, values: list[str]) -> IdBags:
    return IdBags.single(category_keys(feature, values))
