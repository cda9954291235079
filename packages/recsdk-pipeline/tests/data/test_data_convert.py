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
