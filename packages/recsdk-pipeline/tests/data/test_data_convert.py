"""`recsdk data convert`: what was text reads the same from Parquet."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from recsdk_core.cli import main
from recsdk_pipeline.data import CriteoData, MovieLensData, ParquetData
from recsdk_pipeline.data.criteo import CATEGORIES, NUMBERS
from recsdk_pipeline.data.movielens import FEATURES


def convert(*arguments: Any) -> Any:
    return CliRunner().invoke(main, ["data", "convert", *map(str, arguments)])


def rows_of(data: Any) -> list[Any]:
    """Label, dense numbers and ids of each row, in order."""
    found = []
    for batch in data:
        bags = [batch.sparse[name].to_dense() for name in data.features]
        for row in range(len(batch)):
            ids = [bag[row].tolist() for bag in bags]
            found.append((batch.labels[row].item(), batch.dense[row].tolist(), ids))
    return found


def write_clicks(path: Path, num_rows: int) -> None:
    generator = np.random.default_rng(0)
    lines = []
    for _ in range(num_rows):
        numbers = ["" if n < 20 else str(n) for n in generator.integers(0, 100, 13)]
        ids = ["" if n < 50 else f"{n:08x}" for n in generator.integers(0, 1 << 9, 26)]
        lines.append("\t".join([str(generator.integers(0, 2)), *numbers, *ids]))
    path.write_text("\n".join(lines))


def test_criteo(tmp_path: Path) -> None:
    source, target = tmp_path / "clicks", tmp_path / "clicks.parquet"
    write_clicks(source, 250)
    done = convert("criteo", source, target, "--rows-a-group", 100)
    assert done.exit_code == 0, done.output
    assert "250 rows" in done.stdout
    groups = pq.ParquetFile(target).metadata
    assert [groups.row_group(n).num_rows for n in range(groups.num_row_groups)] == [100, 100, 50]
    options: dict[str, Any] = {"batch_size": 60, "shuffle": False, "rank": 0, "world_size": 1}
    again = ParquetData(str(target), ids=CATEGORIES, dense=NUMBERS, labels="label", **options)
    assert rows_of(again) == rows_of(CriteoData(source, **options))


def test_movielens(tmp_path: Path) -> None:
    (tmp_path / "u.user").write_text("1|24|M|writer|85711\n2|53|F|other|94043\n")
    films = ["1|Film|01-Jan-1995||x|" + "|".join("01"[g in (3, 7)] for g in range(19))]
    films += ["2|Other|01-Jan-1995||x|" + "|".join(["0"] * 19)]
    (tmp_path / "u.item").write_text("\n".join(films))
    lines = [f"{1 + n % 2}\t{1 + n % 2}\t{1 + n % 5}\t{n * 3600}" for n in range(50)]
    lines[30] = "nothing"
    (tmp_path / "u.data").write_text("\n".join(lines))
    target = tmp_path / "ratings.parquet"
    refused = convert("movielens", tmp_path, target)
    assert refused.exit_code == 1
    assert "line 31, column 2: the line has 1 columns" in refused.stderr
    assert not target.exists()
    done = convert("movielens", tmp_path, target, "--max-bad-lines", 1)
    assert done.exit_code == 0, done.output
    assert "49 rows" in done.stdout
    assert "1 malformed lines skipped" in done.stdout
    lines.pop(30)
    (tmp_path / "u.data").write_text("\n".join(lines))
    options: dict[str, Any] = {"batch_size": 60, "shuffle": False, "rank": 0, "world_size": 1}
    again = ParquetData(str(target), ids=FEATURES, dense=["age_share"], labels="label", **options)
    assert rows_of(again) == rows_of(MovieLensData(tmp_path, **options))


@pytest.mark.parametrize("is_packed", [False, True])
def test_csv(tmp_path: Path, is_packed: bool) -> None:
    for part in range(2):
        text = "user;city;age\n" + "".join(f"{n};Bonn;{n}.5\n" for n in range(part, part + 3))
        data = gzip.compress(text.encode()) if is_packed else text.encode()
        (tmp_path / f"{part}.csv").write_bytes(data)
    target = tmp_path / "all.parquet"
    done = convert("csv", tmp_path / "*.csv", target, "--delimiter", ";")
    assert done.exit_code == 0, done.output
    table = pq.read_table(target)
    assert table.schema.types == [pa.int64(), pa.string(), pa.float64()]
    assert table.column("user").to_pylist() == [0, 1, 2, 1, 2, 3]


def test_csv_with_ids_that_take_all_64_bits(tmp_path: Path) -> None:
    largest = 2**64 - 1
    (tmp_path / "a.csv").write_text(f"user,price\n7,1e19\n,0.5\n{largest},2\n")
    target = tmp_path / "a.parquet"
    assert convert("csv", tmp_path / "a.csv", target).exit_code == 0
    table = pq.read_table(target)
    assert table.schema.types == [pa.uint64(), pa.float64()]
    assert table.column("user").to_pylist() == [7, None, largest]


def test_csv_with_lines_in_its_values(tmp_path: Path) -> None:
    texts = [f"a\nb,{n}" for n in range(90_000)]
    (tmp_path / "a.csv").write_text("text,n\n" + "".join(f'"{text}",1\n' for text in texts))
    target = tmp_path / "a.parquet"
    done = convert("csv", tmp_path / "a.csv", target)
    assert done.exit_code == 0, done.output
    assert pq.read_table(target).column("text").to_pylist() == texts


def test_csv_with_types_that_its_first_megabyte_does_not_show(tmp_path: Path) -> None:
    largest = 2**64 - 1
    lines = ["user,zip"] + ["1,01234"] * 200_000 + [f"{largest},0"]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    target = tmp_path / "a.parquet"
    done = convert("csv", tmp_path / "a.csv", target)
    assert done.exit_code == 1
    assert "pass --type COLUMN=TYPE" in done.stderr
    done = convert(
        "csv", tmp_path / "a.csv", target, "--type", "user=uint64", "--type", "zip=string"
    )
    assert done.exit_code == 0, done.output
    last = pq.read_table(target).slice(199_999).to_pydict()
    assert last == {"user": [1, largest], "zip": ["01234", "0"]}


@pytest.mark.parametrize(
    ("kind", "option", "match"),
    [
        ("csv", ["--max-bad-lines", "2"], "--max-bad-lines is no option of csv"),
        ("criteo", ["--delimiter", ";"], "--delimiter is no option of criteo"),
        ("movielens", ["--type", "a=int64"], "--type is no option of movielens"),
        ("csv", ["--type", "a"], "--type is 'a'; pass COLUMN=TYPE"),
        ("csv", ["--type", "a=int65"], "Arrow has no type 'int65'"),
        ("csv", ["--type", "a=int8", "--type", "a=string"], "gives column 'a' two types"),
        ("csv", ["--type", "b=int64"], "there is no column 'b'; it has a"),
        ("csv", ["--delimiter", "::"], "--delimiter is '::'; pass one character"),
    ],
)
def test_options_are_honoured_or_refused(
    tmp_path: Path, kind: str, option: list[str], match: str
) -> None:
    (tmp_path / "a.csv").write_text("a\n1\n")
    done = convert(kind, tmp_path / "a.csv", tmp_path / "a.parquet", *option)
    assert done.exit_code != 0
    assert match in done.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["a.csv"]


def test_what_cannot_be_converted(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("user,age\n1,2\n3,4\n")
    (tmp_path / "b.csv").write_text("user,age\n1,2\n3,old\n")
    target = tmp_path / "all.parquet"
    target.write_bytes(b"before")
    done = convert("csv", tmp_path / "*.csv", target)
    assert done.exit_code == 1
    assert f"{tmp_path}/b.csv: cannot be read as csv" in done.stderr
    assert convert("criteo", tmp_path / "none", target).exit_code == 1
    assert target.read_bytes() == b"before"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.csv", "all.parquet", "b.csv"]
