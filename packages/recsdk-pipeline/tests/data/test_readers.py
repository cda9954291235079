"""Files of the two public formats: what is written comes back, and what is malformed is named."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from recsdk_pipeline.data import (
    BadLine,
    BadLines,
    HeldOutSplit,
    Share,
    category_key,
    read_criteo,
    read_movielens,
)
from recsdk_pipeline.data.criteo import CATEGORIES, NUMBERS
from recsdk_pipeline.data.movielens import GENRES

fresh_files = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])

Row = tuple[float, tuple[float, ...], tuple[tuple[int, ...], ...]]
"""Label, dense columns, and the ids of each feature in order."""


def rows_of(data: HeldOutSplit) -> list[Row]:
    """All examples, training and held out, sorted."""
    everything = Share()
    found: list[Row] = []
    for batches in (
        data.train(epoch=0, batch_size=7, share=everything),
        data.held_out(batch_size=7, share=everything),
    ):
        for batch in batches:
            bags = [batch.sparse[name].to_dense() for name in data.features]
            for row in range(len(batch)):
                ids = tuple(tuple(feature[row].tolist()) for feature in bags)
                dense = tuple(round(x, 4) for x in batch.dense[row].tolist())
                found.append((float(batch.labels[row]), dense, ids))
    return sorted(found)


def one(feature: str, value: object) -> tuple[int, ...]:
    return (category_key(feature, str(value)),)


# Criteo

hexadecimal = st.text("0123456789abcdef", min_size=1, max_size=8)
clicks = st.tuples(
    st.sampled_from([0, 1]),
    st.tuples(*[st.none() | st.integers(-3, 10**6)] * len(NUMBERS)),
    st.tuples(*[st.none() | hexadecimal] * len(CATEGORIES)),
)


def fields_of(click: tuple) -> list[str]:
    label, numbers, categories = click
    return [str(label), *("" if x is None else str(x) for x in (*numbers, *categories))]


def expected_of(click: tuple) -> Row:
    label, numbers, categories = click
    dense = [math.copysign(math.log1p(abs(x or 0)), x or 0) for x in numbers]
    ids = (
        () if value is None else one(name, value)
        for name, value in zip(CATEGORIES, categories, strict=True)
    )
    return float(label), tuple(round(float(np.float32(x)), 4) for x in dense), tuple(ids)


def write_criteo(path: Path, rows: list[list[str]], separator: str = "\t") -> Path:
    lines = [["label", *NUMBERS, *CATEGORIES]] if separator == "," else []
    path.write_text("".join(separator.join(line) + "\n" for line in [*lines, *rows]))
    return path


@fresh_files
@given(st.lists(clicks, min_size=10, max_size=20), st.sampled_from(["\t", ","]))
@example([(1, (None,) * 13, (None,) * 26)] * 10, "\t")
def test_criteo_rows_come_back(tmp_path: Path, given_clicks: list, separator: str) -> None:
    path = write_criteo(tmp_path / "clicks", [fields_of(c) for c in given_clicks], separator)
    found = rows_of(read_criteo(path))
    expected = sorted(map(expected_of, given_clicks))
    assert [row[2] for row in found] == [row[2] for row in expected]
    assert [row[0] for row in found] == [row[0] for row in expected]
    np.testing.assert_allclose([row[1] for row in found], [row[1] for row in expected], atol=2e-4)


def good_click() -> list[str]:
    return ["1", *["3"] * 13, *["0a1b2c3d"] * 26]


@pytest.mark.parametrize("separator", ["\t", ","])
@pytest.mark.parametrize(
    ("spoil", "column", "problem"),
    [
        (lambda f: f.__setitem__(0, "2"), "label", "'2' is neither 0 nor 1"),
        (lambda f: f.__setitem__(0, ""), "label", "'' is not a number"),
        (lambda f: f.__setitem__(5, "many"), "I5", "'many' is not a number"),
        (lambda f: f.__setitem__(13, "inf"), "I13", "'inf' is not a number"),
        (lambda f: f.__setitem__(13, "1e39"), "I13", "'1e39' is not finite as float"),
        (lambda f: f.__setitem__(13, "1\r2"), "I13", "a carriage return within the line"),
        (lambda f: f.__setitem__(3, "1_0"), "I3", "'1_0' is not a number"),
        (lambda f: f.__setitem__(3, " 10"), "I3", "' 10' is not a number"),
        (lambda f: f.__setitem__(14, "0xyz"), "C1", "'0xyz' is not a hexadecimal category"),
        (lambda f: f.__setitem__(39, "1" * 17), "C26", "is not a hexadecimal category"),
        (lambda f: f.pop(), "40", "the line has 39 columns; 40 are expected"),
        (lambda f: f.append(""), "41", "the line has 41 columns; 40 are expected"),
        (lambda f: f.__delitem__(slice(1, None)), "2", "the line has 1 columns"),
    ],
)
def test_malformed_click_names_file_line_and_column(
    tmp_path: Path, spoil: Callable[[list[str]], None], column: str, problem: str, separator: str
) -> None:
    rows = [good_click() for _ in range(12)]
    spoil(rows[4])
    path = write_criteo(tmp_path / "clicks.txt", rows, separator)
    with pytest.raises(BadLine) as caught:
        read_criteo(path)
    line = 5 if separator == "\t" else 6
    assert str(caught.value).startswith(f"{path}, line {line}, column {column}: ")
    assert problem in str(caught.value)
    assert (caught.value.line, caught.value.column) == (line, column)
    bad = BadLines(limit=1)
    assert len(rows_of(read_criteo(path, bad=bad))) == 11
    assert bad.count == 1
    assert bad.first == [str(caught.value)]


@given(
    bad_lines=st.sets(st.integers(0, 29), max_size=20),
    limit=st.integers(0, 20),
)
@fresh_files
def test_so_many_bad_lines_are_skipped_and_no_more(
    tmp_path: Path, bad_lines: set[int], limit: int
) -> None:
    rows = [good_click() for _ in range(30)]
    for index in bad_lines:
        rows[index][0] = "bad"
    path = write_criteo(tmp_path / "clicks", rows)
    bad = BadLines(limit=limit)
    if len(bad_lines) > limit:
        with pytest.raises(BadLine) as caught:
            read_criteo(path, bad=bad)
        assert caught.value.line == sorted(bad_lines)[limit] + 1
    else:
        assert len(rows_of(read_criteo(path, bad=bad))) == 30 - len(bad_lines)
        assert bad.count == len(bad_lines)


@given(st.binary(max_size=400), st.integers(0, 11))
@fresh_files
def test_arbitrary_bytes_are_read_or_refused_by_line(
    tmp_path: Path, garbage: bytes, where: int
) -> None:
    lines = ["\t".join(good_click()).encode() for _ in range(12)]
    lines[where:where] = [garbage]
    path = tmp_path / "clicks"
    path.write_bytes(b"\n".join(lines) + b"\n")
    bad = BadLines(limit=len(garbage) + 1)
    num_lines = path.read_bytes().count(b"\n")
    assert len(rows_of(read_criteo(path, bad=bad))) + bad.count == num_lines


@pytest.mark.parametrize(("most", "bad"), [(12, 15), (12, 12), (19, 19)])
def test_only_the_first_lines_are_read(tmp_path: Path, most: int, bad: int) -> None:
    rows = [good_click() for _ in range(20)]
    rows[bad][0] = "bad"
    data = read_criteo(write_criteo(tmp_path / "clicks", rows), most=most)
    assert data.num_train + data.num_held_out == most


def test_too_few_examples_are_refused(tmp_path: Path) -> None:
    path = write_criteo(tmp_path / "clicks", [good_click()] * 9)
    with pytest.raises(ValueError, match="9 examples are too few"):
        read_criteo(path)


# MovieLens

text = st.text(
    st.characters(codec="latin-1", exclude_characters="|\t\r\n", exclude_categories=["Cc"])
)
users = st.lists(
    st.tuples(st.integers(0, 120), st.sampled_from("MF"), text, text), min_size=1, max_size=5
)
films = st.lists(st.tuples(text, st.sets(st.sampled_from(GENRES))), min_size=1, max_size=5)


def write_original(folder: Path, users: list, films: list, ratings: list) -> None:
    people = "".join(f"{i}|{'|'.join(map(str, u))}\n" for i, u in enumerate(users, 1))
    (folder / "u.user").write_text(people, encoding="utf-8", newline="")
    items = [
        "|".join([str(i), title, "01-Jan-1995", "", "http://x", *("01"[g in has] for g in GENRES)])
        for i, (title, has) in enumerate(films, 1)
    ]
    (folder / "u.item").write_text("\n".join(items) + "\n", encoding="latin-1", newline="")
    rows = ["\t".join(map(str, rating)) for rating in ratings]
    (folder / "u.data").write_text("\n".join(rows) + "\n")


def write_typed(folder: Path, users: list, films: list, ratings: list) -> None:
    people = ["user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token"]
    people += ["\t".join(map(str, (i, *u))) for i, u in enumerate(users, 1)]
    items = ["item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq"]
    items += [
        f"{i}\t{title}\t1995\t{' '.join(g for g in GENRES if g in has)}"
        for i, (title, has) in enumerate(films, 1)
    ]
    rows = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    rows += ["\t".join(map(str, rating)) for rating in ratings]
    for name, lines in (("user", people), ("item", items), ("inter", rows)):
        path = folder / f"ml-100k.{name}"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="")


@fresh_files
@given(st.data(), users, films, st.sampled_from([write_original, write_typed]))
def test_movielens_rows_come_back(
    tmp_path: Path, data: st.DataObject, users: list, films: list, write: Callable
) -> None:
    rating = st.tuples(
        st.integers(1, len(users)),
        st.integers(1, len(films)),
        st.integers(1, 5),
        st.integers(0, 2**31),
    )
    ratings = data.draw(st.lists(rating, min_size=10, max_size=20))
    for old in tmp_path.iterdir():
        old.unlink()
    write(tmp_path, users, films, ratings)
    expected = []
    for user, item, stars, seconds in ratings:
        age, gender, occupation, zip_code = users[user - 1]
        ids = (
            one("user", user),
            one("item", item),
            one("age", age),
            one("gender", gender),
            one("occupation", occupation),
            one("zip_code", zip_code),
            tuple(category_key("genres", g) for g in GENRES if g in films[item - 1][1]),
            one("hour", seconds // 3600 % 24),
        )
        dense = (round(float(np.float32(age / 100)), 4),)
        expected.append((float(stars >= 4), dense, ids))
    assert rows_of(read_movielens(tmp_path)) == sorted(expected)


USERS = [(24, "M", "writer", "85711"), (53, "F", "other", "94043")]
FILMS = [("Film", {"Drama"}), ("Cr\u00e8me", {"Comedy", "War"})]
RATINGS = [[1 + i % 2, 1 + i % 2, 3 + i % 3, 880000000 + i] for i in range(20)]


@pytest.mark.parametrize(
    ("name", "old", "new", "where"),
    [
        ("u.data", "\n2\t2\t4\t880000001\n", "\n2\t2\tfour\t880000001\n", "line 2, column rating"),
        ("u.data", "\n2\t2\t4\t880000001\n", "\n7\t2\t4\t880000001\n", "line 2, column user_id"),
        ("u.data", "\n2\t2\t4\t880000001\n", "\n2\t9\t4\t880000001\n", "line 2, column item_id"),
        ("u.data", "\n2\t2\t4\t880000001\n", "\n2\t2\t4\n", "line 2, column 4"),
        ("u.data", "\n2\t2\t4\t880000001\n", "\n2\t2\t4\tlate\n", "line 2, column timestamp"),
        ("u.data", "\n2\t2\t4\t880000001\n", "\n2\t2\t6\t880000001\n", "line 2, column rating"),
        ("u.data", "\n2\t2\t4\t880000001\n", "\n2\t2\t0\t880000001\n", "line 2, column rating"),
        ("u.data", "\n2\t2\t4\t880000001\n", "\n2\t2\t4\t-1\n", "line 2, column timestamp"),
        ("u.data", "\n2\t2\t4\t880000001\n", "\n2\t2\t4\t8_8\n", "line 2, column timestamp"),
        ("u.user", "1|24|", "1|old|", "line 1, column age"),
        ("u.user", "1|24|", "1|2_4|", "line 1, column age"),
        ("u.user", "1|24|", "1| 24|", "line 1, column age"),
        ("u.user", "1|24|", "1|240|", "line 1, column age"),
        ("u.user", "2|53|F", "2|53|X", "line 2, column gender"),
        ("u.user", "2|53|F", "2|53", "line 2, column 5"),
        ("u.item", "|http://x|0|", "|http://x|5|", "line 1, column unknown"),
    ],
)
def test_malformed_movielens_line_is_named(
    tmp_path: Path, name: str, old: str, new: str, where: str
) -> None:
    write_original(tmp_path, USERS, FILMS, RATINGS)
    path = tmp_path / name
    content = path.read_text(encoding="latin-1")
    assert old in content
    path.write_text(content.replace(old, new, 1), encoding="latin-1", newline="")
    with pytest.raises(BadLine) as caught:
        read_movielens(tmp_path)
    assert str(caught.value).startswith(f"{path}, {where}: ")


def test_missing_column_of_a_typed_file_is_named(tmp_path: Path) -> None:
    write_typed(tmp_path, USERS, FILMS, RATINGS)
    path = tmp_path / "ml-100k.inter"
    path.write_text(path.read_text().replace("rating:float", "stars:float"))
    with pytest.raises(BadLine, match="line 1, column rating: no such column"):
        read_movielens(tmp_path)


def test_columns_of_typed_files_may_come_in_any_order(tmp_path: Path) -> None:
    write_typed(tmp_path, USERS, FILMS, RATINGS)
    expected = rows_of(read_movielens(tmp_path))
    path = tmp_path / "ml-100k.inter"
    lines = [line.split("\t")[::-1] for line in path.read_text().splitlines()]
    path.write_text("".join("\t".join(line) + "\n" for line in lines))
    assert rows_of(read_movielens(tmp_path)) == expected


def test_folder_without_ratings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no u\.data or ml-100k\.inter"):
        read_movielens(tmp_path)


def test_negative_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="limit must be at least 0, got -1"):
        BadLines(limit=-1)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("u.user", "1|24|", "1|old|"),
        ("u.user", "1|24|M|writer|85711", "1|24"),
        ("u.item", "1|Film|", "1|Film"),
        ("u.item", "|http://x|0|", "|http://x|5|"),
    ],
)
def test_ratings_of_a_skipped_line_are_left_out(
    tmp_path: Path, name: str, old: str, new: str
) -> None:
    write_original(tmp_path, USERS, FILMS, RATINGS)
    path = tmp_path / name
    content = path.read_text(encoding="latin-1")
    assert old in content
    path.write_text(content.replace(old, new, 1), encoding="latin-1", newline="")
    bad = BadLines(limit=1)
    data = read_movielens(tmp_path, bad=bad)
    assert data.num_train + data.num_held_out == len(RATINGS) // 2
    assert bad.count == 1
    assert bad.first[0].startswith(f"{path}, line 1, column ")
