"""`recsdk data convert`: what was text reads the same from Parquet."""

from __future__ import annotations

import gzip
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from recsdk_core.cli import main
from recsdk_pipeline.data import CriteoData, MovieLensData, ParquetData
from recsdk_pipeline.data.criteo import CATEGORIES, NUMBERS
from recsdk_pipeline.data.movielens import FEATURES
from recsdk_pipeline.data_command.conversion import Conversion


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
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    assert "250 rows" in done.stdout
    groups = pq.ParquetFile(target).metadata
    assert [groups.row_group(n).num_rows for n in range(groups.num_row_groups)] == [100, 100, 50]
    options: dict[str, Any] = {"batch_size": 60, "shuffle": False, "rank": 0, "world_size": 1}
    again = ParquetData(str(target), ids=CATEGORIES, dense=NUMBERS, labels="label", **options)
    assert rows_of(again) == rows_of(CriteoData(source, **options))


def test_several_sources_follow_each_other(tmp_path: Path) -> None:
    names, target = ["clicks", "packed.gz", "more"], tmp_path / "clicks.parquet"
    for number, name in enumerate(names):
        write_clicks(tmp_path / name, 3 + number)
    packed = tmp_path / names[1]
    packed.write_bytes(gzip.compress(packed.read_bytes()))
    sources = [tmp_path / names[2], packed.as_uri(), tmp_path / names[0]]
    done = convert("criteo", *sources, target)
    assert done.exit_code == 0, done.output
    options: dict[str, Any] = {"batch_size": 60, "shuffle": False, "rank": 0, "world_size": 1}
    again = ParquetData(str(target), ids=CATEGORIES, dense=NUMBERS, labels="label", **options)
    assert rows_of(again) == [
        row for each in sources for row in rows_of(CriteoData(each, **options))
    ]
    before = target.read_bytes()
    for kind, others, status in (
        ("criteo", [target], 1),
        ("criteo", ["none"], 1),
        ("criteo", [tmp_path / "none*"], 1),
        ("movielens", sources, 2),
    ):
        assert convert(kind, *sources, *others, target, "--overwrite").exit_code == status
    assert target.read_bytes() == before
    assert convert("criteo", target).exit_code == 2


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
    listed = [tmp_path / "0.csv", f"file://{tmp_path}/1.csv"]
    for sources in ([tmp_path / "*.csv"], listed):
        done = convert("csv", *sources, target, "--delimiter", ";", "--overwrite")
        assert done.exit_code == 0, done.output
        check_csv(pq.read_table(target))


def check_csv(table: pa.Table) -> None:
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


@pytest.mark.parametrize("other", ["-1", str(2**64), str(-(2**63) - 1)])
def test_csv_with_ids_that_no_64_bits_hold_together(tmp_path: Path, other: str) -> None:
    (tmp_path / "a.csv").write_text(f"user,n\n{2**64 - 1},1\nNA,2\n{other},3\n")
    target = tmp_path / "a.parquet"
    done = convert("csv", tmp_path / "a.csv", target)
    assert done.exit_code == 1
    assert f"{tmp_path}/a.csv: column 'user' has whole numbers from " in done.stderr
    assert "pass --type user=string" in done.stderr
    assert not target.exists()
    for kind, values in (
        ("string", [str(2**64 - 1), "NA", other]),
        ("double", [float(2**64 - 1), None, float(other)]),
    ):
        options = ["--type", f"user={kind}", "--overwrite"]
        assert convert("csv", tmp_path / "a.csv", target, *options).exit_code == 0
        assert pq.read_table(target).column("user").to_pylist() == values


def test_csv_with_one_number_that_no_64_bits_hold(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"user,n\n {2**64} ,1\n")
    done = convert("csv", tmp_path / "a.csv", tmp_path / "a.parquet")
    assert done.exit_code == 1
    assert f"whole numbers from {2**64} to {2**64}, more than int64 or uint64" in done.stderr


def test_csv_with_large_numbers_that_are_no_ids(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"a,b\n{2**64},inf\n-1.5,{2**64}\n")
    assert convert("csv", tmp_path / "a.csv", tmp_path / "a.parquet").exit_code == 0
    assert pq.read_table(tmp_path / "a.parquet").schema.types == [pa.float64()] * 2


@pytest.mark.parametrize(
    ("first", "second", "problem"),
    [
        ("user,age", "user,age,city\n3,4,Bonn", "'city' is in one of them only"),
        ("user,age\n1,2", "age,user,city\n4,3,Bonn", "'city' is in one of them only"),
        ("user,age\n1,2", "user\n3", "'age' is in one of them only"),
    ],
)
def test_csv_files_of_other_columns(tmp_path: Path, first: str, second: str, problem: str) -> None:
    (tmp_path / "1.csv").write_text(first + "\n")
    (tmp_path / "2.csv").write_text(second + "\n")
    target = tmp_path / "all.parquet"
    done = convert("csv", tmp_path / "*.csv", target)
    assert done.exit_code == 1
    assert f"{tmp_path}/2.csv: its columns are " in done.stderr
    assert f"those of {tmp_path}/1.csv are user, age" in done.stderr
    assert problem in done.stderr
    assert not target.exists()


def test_csv_files_of_one_header_in_another_order_some_without_rows(tmp_path: Path) -> None:
    for name, text in (("1", "user,age"), ("2", "age,user\n.5,7"), ("3", "user,age\n8,1")):
        (tmp_path / f"{name}.csv").write_text(text + "\n")
    target = tmp_path / "all.parquet"
    done = convert("csv", tmp_path / "*.csv", target)
    assert done.exit_code == 0, done.output
    assert pq.read_table(target).to_pydict() == {"user": [7, 8], "age": [0.5, 1]}


@pytest.mark.parametrize("delimiter", ["\t", ";", "|"])
def test_csv_of_another_delimiter_is_not_taken_as_one_column(
    tmp_path: Path, delimiter: str
) -> None:
    (tmp_path / "a.csv").write_text(f"user{delimiter}age\n1{delimiter}2\n")
    target = tmp_path / "a.parquet"
    done = convert("csv", tmp_path / "a.csv", target)
    assert done.exit_code == 1
    assert f"parted by {delimiter!r}, pass --delimiter" in done.stderr
    assert not target.exists()
    assert convert("csv", tmp_path / "a.csv", target, "--delimiter", delimiter).exit_code == 0
    assert pq.read_table(target).column_names == ["user", "age"]


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
        ("csv", ["--type", "a"], "--type must be COLUMN=TYPE, as user=uint64, got 'a'"),
        ("csv", ["--type", "a=int65"], "or string, got 'a=int65'"),
        ("csv", ["--type", "a=int8", "--type", "a=string"], "one type, got two for 'a'"),
        ("csv", ["--delimiter", "::"], "the end of a line, got '::'"),
        ("csv", ["--delimiter", "\N{SECTION SIGN}"], "--delimiter must be one character of ASCII"),
        ("csv", ["--delimiter", "\n"], "the end of a line, got '\\n'"),
        ("csv", ["--delimiter", '"'], "not a quote"),
        ("csv", ["--delimiter", r"\t"], r"got '\\t'; for a tab pass $'\t'"),
    ],
)
def test_options_are_honoured_or_refused(
    tmp_path: Path, kind: str, option: list[str], match: str
) -> None:
    (tmp_path / "a.csv").write_text("a\n1\n")
    done = convert(kind, tmp_path / "a.csv", tmp_path / "a.parquet", *option)
    assert done.exit_code == 2
    assert match in done.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["a.csv"]


def test_what_cannot_be_converted(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("user,age\n1,2\n3,4\n")
    (tmp_path / "b.csv").write_text("user,age\n1,2\n3,old\n")
    target = tmp_path / "all.parquet"
    target.write_bytes(b"before")
    done = convert("csv", tmp_path / "*.csv", target, "--overwrite")
    assert done.exit_code == 1
    assert f"{tmp_path}/b.csv: cannot be read as csv" in done.stderr
    assert convert("criteo", tmp_path / "none", target, "--overwrite").exit_code == 1
    done = convert("csv", tmp_path / "a.csv", target, "--overwrite", "--type", "b=int64")
    assert (done.exit_code, "no column 'b'; it has user, age" in done.stderr) == (1, True)
    assert target.read_bytes() == b"before"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.csv", "all.parquet", "b.csv"]


def test_a_file_is_replaced_only_if_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("user,age\n1,2\n3,4\n")
    target = tmp_path / "a.parquet"
    target.write_bytes(b"before")
    done = convert("csv", tmp_path / "a.csv", target)
    assert done.exit_code == 1
    assert done.stderr == (
        f"Error: {target} exists already; choose another path or pass --overwrite\n"
    )
    assert target.read_bytes() == b"before"
    assert convert("csv", tmp_path / "a.csv", target, "--overwrite").exit_code == 0
    assert pq.read_table(target).column("user").to_pylist() == [1, 3]


def test_a_link_stays_where_its_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("user\n1\n")
    (tmp_path / "disk").mkdir()
    for name, before in (("full", b"before"), ("none", None)):
        if before is not None:
            (tmp_path / "disk" / name).write_bytes(before)
        (tmp_path / name).symlink_to(Path("disk", name))
        refused = convert("csv", tmp_path / "a.csv", tmp_path / name)
        assert (refused.exit_code, "exists already" in refused.stderr) == (1, True)
        done = convert("csv", tmp_path / "a.csv", tmp_path / name, "--overwrite")
        assert done.exit_code == 0, done.output
        assert (tmp_path / name).is_symlink()
        assert pq.read_table(tmp_path / "disk" / name).column("user").to_pylist() == [1]
    assert sorted(each.name for each in (tmp_path / "disk").iterdir()) == ["full", "none"]


@pytest.mark.parametrize("options", [(), ("--overwrite",)])
def test_no_file_takes_the_place_of_a_pipe_or_a_device(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    (tmp_path / "a.csv").write_text("user,age\n1,2\n")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "null").symlink_to(os.devnull)
    for name in ("pipe", "null"):
        done = convert("csv", tmp_path / "a.csv", tmp_path / name, *options)
        assert (done.exit_code, "is a folder, pipe or device" in done.stderr) == (1, True)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.csv", "null", "pipe"]


def test_what_comes_to_the_target_meanwhile_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.csv").write_text("user,age\n1,2\n")
    target = tmp_path / "a.parquet"
    write = Conversion._write

    def beside_another(self: Conversion, *arguments: Any) -> None:
        write(self, *arguments)
        assert "by process" in convert("csv", tmp_path / "a.csv", target).stderr
        target.write_bytes(b"another")

    with monkeypatch.context() as patched:
        patched.setattr(Conversion, "_write", beside_another)
        done = convert("csv", tmp_path / "a.csv", target)
    assert (done.exit_code, "exists already" in done.stderr) == (1, True), done.output
    assert target.read_bytes() == b"another"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.csv", "a.parquet"]


@pytest.mark.parametrize("kind", ["csv", "criteo"])
@pytest.mark.parametrize("name", ["clicks", "link", "other/../clicks"])
def test_the_source_is_not_replaced(tmp_path: Path, kind: str, name: str) -> None:
    source = tmp_path / "clicks"
    write_clicks(source, 3)
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "other").mkdir()
    before = source.read_bytes()
    for given in (source, f"file://{source}"):
        done = convert(kind, given, tmp_path / name, "--overwrite")
        assert done.exit_code == 1
        assert "is one of the source's files; choose another" in done.stderr
        assert source.read_bytes() == before


@pytest.mark.parametrize("before", ["", "file://"])
def test_the_archive_of_a_source_is_not_replaced(tmp_path: Path, before: str) -> None:
    archive = tmp_path / "clicks.zip"
    with ZipFile(archive, "w") as file:
        file.writestr("clicks.csv", "user,item\n1,2\n")
    content = archive.read_bytes()
    source = f"zip://clicks.csv::{before}{archive}"
    done = convert("csv", source, archive, "--overwrite")
    assert done.exit_code == 1
    assert "is one of the source's files; choose another" in done.stderr
    assert archive.read_bytes() == content
    assert convert("csv", source, tmp_path / "clicks.parquet").exit_code == 0


def test_movielens_does_not_replace_a_file_that_it_reads(tmp_path: Path) -> None:
    (tmp_path / "u.user").write_text("1|24|M|writer|85711\n")
    (tmp_path / "u.item").write_text("1|Film|01-Jan-1995||x|" + "|".join(["0"] * 19))
    (tmp_path / "u.data").write_text("1\t1\t3\t3600")
    for name in ("u.user", "u.item", "u.data"):
        before = (tmp_path / name).read_bytes()
        done = convert("movielens", tmp_path, tmp_path / name, "--overwrite")
        assert done.exit_code == 1
        assert "is one of the source's files; choose another" in done.stderr
        assert (tmp_path / name).read_bytes() == before


def test_targets_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a\n1\n")
    for target, problem in (
        (".", ".: is a folder; give the path of a file in it"),
        (tmp_path / "none" / "a.parquet", f"there is no folder {tmp_path}/none"),
    ):
        done = convert("csv", tmp_path / "a.csv", target)
        assert done.exit_code == 1
        assert problem in done.stderr


@pytest.mark.parametrize("num_rows", [500, 50_000])
def test_a_full_disk_is_told_of_the_target(tmp_path: Path, num_rows: int) -> None:
    """When the file is closed, or before."""
    numbers = np.random.default_rng(0).integers(0, 2**60, num_rows)
    (tmp_path / "a.csv").write_text("\n".join(["user", *map(str, numbers)]))
    limited = ["sh", "-c", 'ulimit -f 2; trap "" XFSZ; exec "$@"', "sh"]
    recsdk = [sys.executable, "-c", "from recsdk_core.cli import main; main()"]
    command = [*limited, *recsdk, "data", "convert", "csv", "a.csv", "a.parquet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    said = done.stderr.splitlines()  # before it, an older torchrec warns of what it imports
    assert said[-1] == "Error: a.parquet: writing failed: File too large"
    assert "Traceback" not in done.stderr
    assert done.returncode == 1
    assert [each.name for each in tmp_path.iterdir()] == ["a.csv"]


@pytest.mark.parametrize("kept", [40, 150_000])
def test_csv_that_was_cut_off(tmp_path: Path, kept: int) -> None:
    numbers = np.random.default_rng(0).integers(0, 2**60, 200_000)
    packed = gzip.compress("\n".join(["user", *map(str, numbers)]).encode(), 1)
    (tmp_path / "a.csv.gz").write_bytes(packed[: len(packed) * kept // 200_000])
    done = convert("csv", tmp_path / "a.csv.gz", tmp_path / "a.parquet")
    assert done.exit_code == 1
    assert f"Error: {tmp_path}/a.csv.gz: is damaged or cut off" in done.stderr
    assert not (tmp_path / "a.parquet").exists()
