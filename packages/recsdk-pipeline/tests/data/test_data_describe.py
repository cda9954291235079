"""`recsdk data describe`: what it says of files against what is known of them."""

from __future__ import annotations

import json
import os
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from recsdk_core.cli import main
from recsdk_pipeline.data_command.description import describe_files
from recsdk_pipeline.data_command.id_sketch import IdSketch, fit_zipf
from sampling import crossed

WITHIN = 4  # standard errors

batches = st.lists(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 9), max_size=40))


def describe(*arguments: Any) -> Any:
    return CliRunner(env={"COLUMNS": "200"}).invoke(
        main, ["data", "describe", *map(str, arguments)]
    )


def column_of(path: Path, name: str) -> dict[str, Any]:
    done = describe(path, "--json", "-")
    assert done.exit_code == 0, done.output
    found = {each["name"]: each for each in json.loads(done.stdout)["columns"]}
    column: dict[str, Any] = found[name]
    return column


def zipf_ids(exponent: float, num_ids: int, num_draws: int) -> Any:
    generator = np.random.default_rng(3)
    shares = np.arange(1, num_ids + 1) ** -exponent
    up_to = np.cumsum(shares / shares.sum())
    ranks = np.minimum(np.searchsorted(up_to, generator.random(num_draws)), num_ids - 1)
    return generator.integers(-(2**63), 2**63 - 1, num_ids)[ranks]


@given(batches, st.integers(1, 200))
@settings(deadline=None)
def test_a_sample_has_exact_counts(batches: list[list[int]], most: int) -> None:
    sketch = IdSketch(most)
    for batch in batches:
        sketch.add(np.array(batch, np.int64))
    ids, counts = np.unique(np.array([i for b in batches for i in b], np.int64), return_counts=True)
    sampled = sketch.counts()
    assert len(sampled) <= most
    assert sketch.num_distinct == len(sampled) * sketch.ids_a_sample
    assert not set(sampled.tolist()) - set(counts.tolist())
    if len(ids) <= most:
        assert sketch.standard_error == 0
        assert sampled.tolist() == sorted(counts.tolist(), reverse=True)
    else:
        assert sketch.standard_error > 0


@given(batches, st.integers(1, 200))
@settings(deadline=None)
def test_a_sample_has_exact_times(batches: list[list[int]], most: int) -> None:
    sketch, ends = IdSketch(most), dict[int, tuple[int, int]]()
    for number, batch in enumerate(batches):
        sketch.add(np.array(batch, np.int64), np.full(len(batch), 5 - number % 10))
        for each in batch:
            first, last = ends.get(each, (9, -9))
            ends[each] = min(first, 5 - number % 10), max(last, 5 - number % 10)
    found = sketch.times()
    assert (found is None) == (not ends)
    if found is not None:
        pairs = list(zip(*(each.tolist() for each in found), strict=True))
        assert len(pairs) == len(sketch.counts())
        assert not set(pairs) - set(ends.values())
        if sketch.standard_error == 0:
            assert sorted(pairs) == sorted(ends.values())


@pytest.mark.parametrize("num_ids", [65_536, 65_537, 300_000, 1_000_000])
def test_many_ids_are_told_within_the_stated_error(num_ids: int) -> None:
    sketch = IdSketch()
    for start in range(0, num_ids, 100_000):  # the worst for a weak hash: ids that are counters
        part = np.arange(start, min(start + 100_000, num_ids))
        sketch.add(part)
        sketch.add(part[::2])
    error = sketch.num_distinct / num_ids - 1
    assert abs(error) <= WITHIN * sketch.standard_error
    assert (sketch.standard_error == 0) == (num_ids == 65_536)
    assert set(sketch.counts().tolist()) == {1, 2}


def test_errors_are_of_the_stated_size() -> None:
    errors = []
    for seed in range(200):
        sketch = IdSketch(256)
        sketch.add(np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, 10_000))
        errors.append(sketch.num_distinct / 10_000 - 1)
    spread = float(np.std(errors))
    assert 0.6 * sketch.standard_error < spread < 1.3 * sketch.standard_error
    assert abs(np.mean(errors)) < WITHIN * sketch.standard_error / np.sqrt(200)


@pytest.mark.parametrize(
    ("exponent", "num_ids"), crossed((0.7, 0.9, 1.05, 1.3), (5_000, 500_000), size=4)
)
def test_zipf_exponent_is_found(exponent: float, num_ids: int) -> None:
    sketch = IdSketch()
    sketch.add(zipf_ids(exponent, num_ids, 2_000_000))
    fit = fit_zipf(sketch.counts())
    assert fit is not None
    assert fit.exponent == pytest.approx(exponent, abs=0.08)


def test_memory_is_bounded() -> None:
    sketch, generator = IdSketch(), np.random.default_rng(0)
    tracemalloc.start()
    try:
        for _ in range(40):
            ids = generator.integers(-(2**63), 2**63 - 1, 100_000)
            sketch.add(ids)
        del ids
        held, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 5 << 20
    assert most < 32 << 20


def test_ids_that_come_alike_are_far_from_zipf() -> None:
    fit = fit_zipf(np.random.default_rng(0).poisson(100, 10_000))
    assert fit is not None
    assert fit.exponent < 0.1


@pytest.mark.parametrize("counts", [[], [9] * 99, [5] * 1000])
def test_too_few_ids_have_no_exponent(counts: list[int]) -> None:
    assert fit_zipf(np.array(counts, np.int64)) is None


def test_columns(tmp_path: Path) -> None:
    path = tmp_path / "clicks.parquet"
    columns = {
        "user": pa.array([1, 2, None, 2**64 - 1, 1, 1], pa.uint64()),
        "city": pa.array(["Bonn", "Oslo", None, "Bonn", "", "Rom"]).dictionary_encode(),
        "seen": pa.array([[1, 2, 3], [], None, [2], [4, None], [3]], pa.list_(pa.int64())),
        "age": [1.5, None, None, 4.0, 5.0, 6.0],
    }
    pq.write_table(pa.table(columns), path, row_group_size=2)
    found = describe_files(str(path), lambda rows, total: None)
    assert (found.rows, found.row_groups) == (6, 3)
    user, city, seen, age = found.columns
    assert [each.nulls for each in found.columns] == [1, 1, 1, 2]
    assert user.ids is not None
    assert (user.ids.num_ids, user.ids.num_distinct, user.ids.standard_error) == (5, 3, 0)
    assert user.ids.bag_lengths is None
    assert city.ids is not None
    assert (city.ids.num_ids, city.ids.num_distinct) == (5, 4)
    assert age.ids is None
    assert seen.malformed == 1
    assert seen.ids is not None
    assert (seen.ids.num_ids, seen.ids.num_distinct) == (5, 3)
    assert seen.ids.bag_lengths is not None
    assert seen.ids.bag_lengths.mean == 1.0
    assert (seen.ids.bag_lengths.p50, seen.ids.bag_lengths.max) == (1, 3)


def test_percentiles_of_bag_lengths(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).permutation(np.r_[np.arange(1, 100), 70_000])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    bags = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(np.zeros(offsets[-1], "i8")))
    pq.write_table(pa.table({"seen": bags}), tmp_path / "bags.parquet", row_group_size=30)
    found = column_of(tmp_path, "seen")["ids"]["bag_lengths"]
    assert found == {"mean": lengths.mean(), "p50": 50, "p90": 90, "p99": 99, "max": 70_000}


def test_ages_of_ids(tmp_path: Path) -> None:
    path, hour = tmp_path / "clicks.parquet", 3_600
    columns = {
        "at": pa.array([hour * 10**6 * each for each in (0, 10, 20, 40)], pa.timestamp("us")),
        "user": [7, 8, 7, 9],
        "seen": pa.array([[1, 2], [], [1, None], [2]], pa.list_(pa.int64())),
        "step": [0, 1, 2, 4],
    }
    pq.write_table(pa.table(columns), path, row_group_size=2)
    found = describe_files(str(path), lambda rows, total: None, "at").as_json()
    assert found["time"] == "at"
    user, seen, _ = found["columns"]
    assert user["ids"]["ages"] == {
        "unit": "s",
        "age": {"p50": 30 * hour, "p90": 40 * hour, "p99": 40 * hour},
        "idle": {"p50": 20 * hour, "p90": 30 * hour, "p99": 30 * hour},
    }
    # The malformed row counts for nothing but the latest time.
    assert seen["ids"]["ages"]["idle"] == {"p50": 0, "p90": 40 * hour, "p99": 40 * hour}
    by_step = describe_files(str(path), lambda rows, total: None, "step").as_json()
    assert by_step["columns"][1]["ids"]["ages"]["age"]["p50"] == 3
    assert by_step["columns"][1]["ids"]["ages"]["unit"] == "1"
    done = describe(path, "--time", "at", "--png", tmp_path / "ages.png")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "ages.png").read_bytes().startswith(b"\x89PNG")
    assert "age: 50, 90, 99 %" in done.stdout
    assert "1.2 d, 1.7 d, 1.7 d" in done.stdout  # in one line, where no terminal is too narrow


def test_times_may_be_as_far_apart_as_numbers_are(tmp_path: Path) -> None:
    columns = {"at": [-(2**63), 2**63 - 1], "user": [7, 7]}
    pq.write_table(pa.table(columns), tmp_path / "far.parquet")
    [user] = describe_files(str(tmp_path / "far.parquet"), lambda *_: None, "at").columns
    assert user.ids is not None
    assert user.ids.ages is not None
    assert (user.ids.ages.age.p50, user.ids.ages.idle.p50) == (2.0**64, 0.0)


@pytest.mark.parametrize(
    ("column", "problem"),
    [("at", "no column 'at'"), ("user", "must hold integers"), ("when", "without a time")],
)
def test_what_is_no_time(column: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "clicks.parquet"
    pq.write_table(pa.table({"user": ["a", "b"], "when": [3, None]}), path)
    done = describe(path, "--time", column)
    assert done.exit_code == 1
    assert problem in done.output


def test_json_and_table(tmp_path: Path) -> None:
    path, target = tmp_path / "clicks.parquet", tmp_path / "found.json"
    pq.write_table(pa.table({"user": [7, 7, 8], "[x]": ["a", "b", None]}), path)
    done = describe(path, "--json", target)
    assert done.exit_code == 0, done.output
    found = json.loads(target.read_text())
    assert (found["format"], found["rows"]) == ("recsdk.data.describe/1", 3)
    assert found["columns"][0] == {
        "name": "user",
        "type": "int64",
        "nulls": 0,
        "malformed": 0,
        "ids": {
            "num_ids": 3,
            "num_distinct": 2,
            "standard_error": 0.0,
            "zipf": None,
            "bag_lengths": None,
            "ages": None,
        },
    }
    for shown in ("3 rows", "user", "int64", "[x]"):
        assert shown in done.stdout


@pytest.mark.parametrize("num_groups", [0, 1])
def test_files_without_rows(tmp_path: Path, num_groups: int) -> None:
    path = tmp_path / "none.parquet"
    empty = pa.table({"user": pa.array([], pa.int64()), "seen": pa.array([], pa.list_(pa.int64()))})
    with pq.ParquetWriter(path, empty.schema) as writer:
        for _ in range(num_groups):
            writer.write_table(empty)
    assert column_of(path, "user")["ids"]["num_distinct"] == 0
    assert column_of(path, "seen")["ids"]["bag_lengths"] is None
    assert describe(path, "--png", tmp_path / "none.png").exit_code == 0


@pytest.mark.parametrize("times", [[], ["--time", "time"]])
def test_no_screen_cuts_a_number_in_two(tmp_path: Path, times: list[str]) -> None:
    path, num_rows = tmp_path / "clicks.parquet", 3000
    columns = {
        "the_id_of_the_user": zipf_ids(0.9, 1000, num_rows),
        "\u72ac\u7a74": [[n, -n] for n in range(num_rows)],
        "time": range(num_rows),
    }
    pq.write_table(pa.table(columns), path)
    wide = describe(path, *times)
    numbers = {word for word in wide.stdout.split() if any(map(str.isdigit, word))}
    assert "3,000" in numbers
    seen = set()
    for width in range(18, 140):
        runner = CliRunner(env={"COLUMNS": str(width)})
        done = runner.invoke(main, ["data", "describe", str(path), *times])
        assert done.exit_code == 0, done.output
        lines = done.stdout.splitlines()[1:]
        assert max(map(cell_len, lines)) <= width
        words = set(done.stdout.split())
        assert {each for each in numbers if "int64" not in each} <= words, width
        seen.add(lines[0][0])
    assert len(seen) == 2  # a list, then a table


def test_a_list_begins_each_column_anew_whatever_its_name(tmp_path: Path) -> None:
    path = tmp_path / "clicks.parquet"
    pq.write_table(pa.table({"user": [1, 2], "": [3, 4]}), path)
    done = CliRunner(env={"COLUMNS": "40"}).invoke(main, ["data", "describe", str(path)])
    begun = [line.strip() for line in done.stdout.splitlines()[1:] if not line.startswith(" ")]
    assert begun == ["column: user", "column:"]


def test_what_cannot_be_described(tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text("no Parquet")
    (tmp_path / "empty.parquet").write_text("")
    (tmp_path / "loop.parquet").symlink_to("loop.parquet")
    for name, problem in {
        "absent.parquet": "there is no such file",
        "loop.parquet": "Too many levels of symbolic links",
        "text.parquet": "cannot be read as Parquet",
        "empty.parquet": "cannot be read as Parquet",
    }.items():
        for source in (tmp_path / name, f"file://{tmp_path / name}"):
            done = describe(source)
            assert done.exit_code == 1
            assert f" {tmp_path / name}: {problem}" in done.stderr
            assert "file://" not in done.stderr


def test_names_that_are_patterns_or_no_utf8(tmp_path: Path) -> None:
    pq.write_table(pa.table({"user": [1, 2]}), tmp_path / "a1.parquet")
    (tmp_path / "a[1].parquet").mkdir()
    for name in ("b", "c[d]*?"):
        pq.write_table(pa.table({"user": [1]}), tmp_path / "a[1].parquet" / f"{name}.parquet")
    inner = tmp_path / "a[1].parquet" / "c[d]*?.parquet"
    for source, num_rows in ((inner, 1), (inner.parent, 2), (tmp_path / "a[2-1]*", None)):
        done = describe(source)
        assert done.exit_code == (num_rows is None), done.output
        assert f": {num_rows} rows, " in done.stdout or num_rows is None
    done = describe(f"file://{inner}")
    assert done.exit_code == 0, done.output
    done = describe("")
    assert done.exit_code == 1
    assert "source must be paths, patterns or URLs, got ''" in done.stderr
    done = describe(os.fsdecode(b"a\xff.parquet"))
    assert done.exit_code == 1
    assert r"must have characters of UTF-8 only, got 'a\udcff.parquet'; rename" in done.stderr


def test_a_picture(tmp_path: Path) -> None:
    path, target = tmp_path / "clicks.parquet", tmp_path / "clicks.png"
    columns = {f"c{n}": zipf_ids(0.5 + n / 20, 1000, 5000) for n in range(12)}
    pq.write_table(pa.table({**columns, "one": [1] * 5000, "x": [0.5] * 5000}), path)
    done = describe(path, "--png", target)
    assert done.exit_code == 0, done.output
    assert target.read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_columns_of_any_name(tmp_path: Path) -> None:
    path, target = tmp_path / "clicks.parquet", tmp_path / "clicks.png"
    names = ["_hidden", "$a_{b}$", r"$bad\frac$", "a$b", "[red]\u043a\u043b\u044e\u0447"]
    pq.write_table(pa.table({name: range(100) for name in names}), path)
    done = describe(path, "--png", target, "--time", "a$b")
    assert done.exit_code == 0, done.output
    assert target.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("time", [None, "day"])
def test_a_picture_has_bags_and_ages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, time: str | None
) -> None:
    from recsdk_pipeline.data_command import drawing

    path = tmp_path / "clicks.parquet"
    columns = {"user": range(60), "seen": [[n] * (n % 4) for n in range(60)], "day": range(60)}
    pq.write_table(pa.table(columns), path)
    found: list[Any] = []
    monkeypatch.setattr(drawing.Figure, "savefig", lambda self, *_, **__: found.append(self))
    drawing.draw(describe_files(str(path), lambda *_: None, time), tmp_path / "clicks.png")
    panels = found[0].axes
    titles = [panel.get_title() for panel in panels]
    assert len(titles) == (3 if time is None else 4)
    assert titles[2] == "Ids of a bag: 50, 90, 99 %; the mean is a bar"
    dots, mean = (list(line.get_xdata()) for line in panels[2].get_lines())
    assert (dots, mean) == ([1, 3, 3], [1.5])
    assert [text.get_text() for text in panels[2].texts] == ["longest 3"]


def test_a_picture_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "recsdk_pipeline.data_command.drawing", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = describe(tmp_path / "clicks.parquet", "--png", tmp_path / "clicks.png")
    assert done.exit_code == 1
    assert 'pip install "recsdk-pipeline[plot]"' in done.stderr


def test_what_is_written_is_simulated_and_planned(tmp_path: Path) -> None:
    path, written = tmp_path / "clicks.parquet", tmp_path / "clicks.json"
    pq.write_table(pa.table({"user": zipf_ids(1.0, 3000, 60_000)}), path)
    assert describe(path, "--json", written).exit_code == 0
    rates = []
    for trace in (path, written):
        arguments = ["simulate", str(trace), "--rows", "300,1000", "--step", "256", "--json", "-"]
        done = CliRunner().invoke(main, arguments)
        assert done.exit_code == 0, done.output
        rates.append([run["hit_rate"] for run in json.loads(done.stdout)["runs"]])
    assert rates[1] == pytest.approx(rates[0], abs=0.03)
    done = CliRunner().invoke(main, ["plan", str(written)])
    assert done.exit_code == 0, done.output
    distinct = len(np.unique(zipf_ids(1.0, 3000, 60_000)))
    assert f"{distinct:,}" in done.output


def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "clicks.parquet"
    numbers = pa.array([1, 2])
    pq.write_table(pa.Table.from_arrays([numbers, numbers], names=["user", "user"]), path)
    for command, problem in (
        (["data", "describe"], "has 2 columns 'user'; write it with a name for each"),
        (["simulate", "--column", "user"], "duplicate field names"),
    ):
        done = CliRunner().invoke(main, [*command, str(path)])
        assert done.exit_code == 1
        assert f"{path}: " in done.output
        assert problem in done.output


@pytest.mark.parametrize("option", ["--json", "--png"])
@pytest.mark.parametrize("command", [["data", "describe"], ["simulate"]])
def test_what_cannot_be_written_is_told_before_the_work(
    option: str, command: list[str], tmp_path: Path
) -> None:
    for target, problem, status in (
        (tmp_path / "none" / "out", f"there is no folder {tmp_path / 'none'}; make it first", 1),
        (tmp_path, "is a folder", 1),
        ("s3://bucket/out", "is a URL", 2),
    ):
        arguments = [*command, str(tmp_path / "no source.parquet"), option, str(target)]
        done = CliRunner().invoke(main, arguments)
        assert done.exit_code == status
        assert problem in done.output
        assert "no source" not in done.output


def test_a_folder_that_cannot_be_read_is_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests may run as a user who may read all."""
    for name in ("closed", "_closed"):
        (tmp_path / name).mkdir()
    pq.write_table(pa.table({"user": [1]}), tmp_path / "a.parquet")
    scandir = os.scandir

    def scan(path: Any) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan)
    done = describe(tmp_path)
    assert (done.exit_code, f"{tmp_path}/closed" in done.stderr) == (1, True), done.output
    (tmp_path / "closed").rmdir()
    assert describe(tmp_path).exit_code == 0
