"""`recsdk demo`, as it is installed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from pipeline_support.launch import environment, run_launcher, run_ranks

from recsdk_pipeline.data import Share
from recsdk_pipeline.data.criteo import CATEGORIES
from recsdk_pipeline.data_command.command import convert
from recsdk_pipeline.demo.command import demo
from recsdk_pipeline.demo.parquet_clicks import NotAClick, parquet_clicks
from recsdk_pipeline.demo.report import Screen, Summary, prepare_folder
from recsdk_pipeline.demo.settings import Settings

RECSDK = str(Path(sys.executable).parent / "recsdk")
SECONDS_TO_END = 500


def run_demo(*options: str) -> subprocess.CompletedProcess[str]:
    """The command, whose ranks torchrun starts; none of them imports torchrec again."""
    return run_launcher("demo", *options)


def run_demo_warm(*options: str) -> subprocess.CompletedProcess[str]:
    """What the command's ranks do, on ranks that have imported torchrec already."""
    given = demo.make_context("demo", list(options)).params
    settings = Settings(**given, started_at=time.time())
    return run_ranks(settings.world_size, "-m", "recsdk_pipeline.demo", settings.to_json())


def test_demo_learns_from_ids_and_writes_a_summary(tmp_path: Path) -> None:
    output = tmp_path / "new" / "folder"
    done = run_demo("--examples", "40000", "--batch-size", "1024", "--output", str(output))
    assert done.returncode == 0, done.stdout
    summary = json.loads((output / "summary.json").read_text())
    assert summary["world_size"] == 2
    assert summary["steps"] == 40
    assert summary["examples_per_second"] > 0
    assert 0 < summary["stall_share"] < 1
    assert summary["seconds"] > 0
    assert set(summary["rows"]) == {"user", "item", "site", "tags", "words"}
    assert min(summary["rows"].values()) > 500
    assert summary["auc_without_ids"] < summary["auc"] < summary["auc_generator"]
    for shown in ("AUC on held-out examples", "rows of user", "part of that gap closed"):
        assert shown in done.stdout
    pictures = sorted(path.name for path in output.iterdir() if path.suffix == ".png")
    assert pictures == ["loss_and_auc.png", "tables.png", "time.png"]
    for name in pictures:
        assert (output / name).read_bytes().startswith(b"\x89PNG")
        assert f"{name}\n" in done.stdout
    assert len(list(output.iterdir())) == 4


def test_demo_reads_movielens_and_skips_bad_lines(tmp_path: Path) -> None:
    (tmp_path / "u.user").write_text("1|24|M|writer|85711\n2|53|F|other|94043\n")
    flags = "|".join(["0"] * 18 + ["1"])
    items = "".join(f"{i}|Film {i}|01-Jan-1995||http://x|{flags}\n" for i in range(1, 6))
    (tmp_path / "u.item").write_text(items)
    ratings = [f"{1 + i % 2}\t{1 + i % 5}\t{1 + i % 5}\t{880000000 + i}" for i in range(100)]
    ratings[7] = "1\t1\tgood\t880000000"
    (tmp_path / "u.data").write_text("\n".join(ratings) + "\n")
    options = ("--movielens", str(tmp_path), "--epochs", "2", "--output", str(tmp_path / "out"))
    alike = tmp_path / "alike"
    alike.mkdir()
    for name in ("u.user", "u.item"):
        (alike / name).write_text((tmp_path / name).read_text())
    (alike / "u.data").write_text("".join(f"1\t1\t5\t{i}\n" for i in range(20)))
    all_fives = ("--movielens", str(alike), "--output", str(alike), "--world-size", "1")
    refused = run_demo_warm(*options, "--world-size", "1")
    undefined = run_demo_warm(*all_fives, "--epochs", "1")
    done = run_demo_warm(*options, "--max-bad-lines", "1")
    assert refused.returncode == 1
    assert "u.data, line 8, column rating: 'good' is not a number" in refused.stdout
    assert "Traceback" not in refused.stdout
    assert undefined.returncode == 0, undefined.stdout
    assert json.loads((alike / "summary.json").read_text())["auc"] is None
    assert done.returncode == 0, done.stdout
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["bad_lines"] == 1
    assert "u.data, line 8, column rating" in summary["first_bad_line"]
    assert summary["rows"]["user"] == 2
    assert summary["auc_generator"] is None


@pytest.fixture(scope="module")
def parquet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3,000 clicks in Criteo's format, converted; C1 says whether it was one."""
    folder = tmp_path_factory.mktemp("parquet")
    generator = np.random.default_rng(0)
    lines = []
    for _ in range(3000):
        click = int(generator.integers(0, 2))
        numbers = ["" if n < 20 else str(n) for n in generator.integers(0, 100, 13)]
        ids = ["" if n < 50 else f"{n:08x}" for n in generator.integers(0, 1 << 9, 25)]
        tells = f"{2 * generator.integers(0, 10) + click:08x}"
        lines.append("\t".join([str(click), *numbers, tells, *ids]))
    (folder / "clicks.tsv").write_text("\n".join(lines))
    arguments = ["criteo", str(folder / "clicks.tsv"), str(folder / "clicks.parquet")]
    done = CliRunner().invoke(convert, [*arguments, "--rows-a-group", "130"])
    assert done.exit_code == 0, done.output
    return folder / "clicks.parquet"


def test_demo_streams_converted_parquet(tmp_path: Path, parquet: Path) -> None:
    options = ("--batch-size", "128", "--epochs", "3", "--output", str(tmp_path))
    done = run_demo_warm("--parquet", parquet.as_uri(), *options)
    assert done.returncode == 0, done.stdout
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert set(summary["rows"]) == set(CATEGORIES)
    assert summary["rows"]["C1"] == 20
    # Of 23 row groups and a small one, three are held out; the fuller of two ranks has 1310 rows.
    assert summary["steps"] == 3 * -(-1310 // 64)
    assert summary["auc"] > 0.9
    assert 0 <= summary["stall_share"] < 1
    assert summary["bad_lines"] == 0
    assert "waiting for data" in done.stdout


def test_demo_skips_bad_rows_of_parquet_once_each(tmp_path: Path, parquet: Path) -> None:
    table = pq.read_table(parquet, columns=["label", "C1", "C2"])
    labels = table.column("label").to_pylist()
    labels[7::500] = [None] * 6
    table = table.set_column(0, "clicked", pa.array(labels))
    source = tmp_path / "bad.parquet"
    pq.write_table(table, source, row_group_size=100)
    options = ("--parquet", str(source), "--label", "clicked", "--ids", "C1,C2")
    epochs = ("--epochs", "2", "--output", str(tmp_path))
    done = run_demo_warm(*options, *epochs, "--max-bad-lines", "6")
    assert done.returncode == 0, done.stdout
    assert json.loads((tmp_path / "summary.json").read_text())["bad_lines"] == 6
    refused = run_demo_warm(*options, *epochs)
    unnamed = run_demo_warm("--parquet", str(source), "--output", str(tmp_path))
    assert refused.returncode == 1
    assert "column clicked: the number is missing" in refused.stdout
    assert "Traceback" not in refused.stdout
    assert unnamed.returncode == 1
    assert "there is no column 'label'; name the label with --label" in unnamed.stdout


def test_parquet_is_cut_into_the_same_number_of_batches_on_each_rank(parquet: Path) -> None:
    clicks = parquet_clicks(Settings(parquet=str(parquet), examples=1000))
    assert (clicks.num_train, clicks.num_held_out) == (7 * 130, 130)
    share = Share(rank=0, world_size=1)
    sizes = [len(b) for b in clicks.train(epoch=0, batch_size=100, share=share)]
    assert sizes == [100] * 9 + [10]
    assert clicks.num_steps(0, 100) == 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ids": "C1,C99"}, "there is no column 'C99'"),
        ({"dense": "C1", "ids": ""}, "no column holds ids"),
        ({"label": "I14"}, "there is no column 'I14'"),
    ],
)
def test_columns_that_are_not_there(parquet: Path, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parquet_clicks(Settings(parquet=str(parquet), **options))


def test_one_row_group_holds_nothing_out(tmp_path: Path) -> None:
    pq.write_table(pa.table({"label": [0.0, 1.0], "user": [1, 2]}), tmp_path / "one.parquet")
    with pytest.raises(ValueError, match="1 row groups are too few"):
        parquet_clicks(Settings(parquet=str(tmp_path / "one.parquet")))


def test_labels_of_no_click_are_refused(tmp_path: Path) -> None:
    table = pa.table({"label": [3, 3], "user": [1, 2]})
    pq.write_table(table, tmp_path / "stars.parquet", row_group_size=1)
    clicks = parquet_clicks(Settings(parquet=str(tmp_path / "stars.parquet")))
    with pytest.raises(NotAClick, match="a label is 3; labels are 0 or 1"):
        list(clicks.train(epoch=0, batch_size=1, share=Share()))


@pytest.mark.parametrize("whom", ["launcher", "all"])
def test_ctrl_c_ends_all_ranks(tmp_path: Path, whom: str) -> None:
    process = subprocess.Popen(
        [RECSDK, "demo", "--examples", "600000", "--output", str(tmp_path)],
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    ranks = _wait_for_ranks(process.pid)
    if whom == "launcher":  # while the ranks start, perhaps before they have any say
        process.send_signal(signal.SIGINT)
    else:  # as a terminal does, in the midst of training
        printed = iter(process.stdout.readline, "")
        assert any(line.startswith("step ") for line in printed), process.wait()
        os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=SECONDS_TO_END)
    assert process.returncode == 130, output
    assert "stopped by SIGINT" in output
    assert whom == "launcher" or "Traceback" not in output
    for pid in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not list(tmp_path.iterdir())


def _command_of(pid: int) -> str:
    """Its command line; nothing if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _wait_for_ranks(launcher: int) -> list[int]:
    """The ranks' process ids, once there are two."""
    deadline = time.monotonic() + SECONDS_TO_END
    children = Path(f"/proc/{launcher}/task/{launcher}/children")
    while time.monotonic() < deadline:
        found = [int(pid) for pid in children.read_text().split()]
        ranks = [p for p in found if "pipeline.demo" in _command_of(p)]
        if len(ranks) == 2:
            return ranks
        time.sleep(0.2)
    raise AssertionError("no ranks were started")


def test_two_sources_of_data_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "clicks"
    file.write_text("")
    result = CliRunner().invoke(demo, ["--movielens", str(tmp_path), "--criteo", str(file)])
    assert result.exit_code == 2
    assert re.search("pass one", result.output)


def test_urls_of_no_protocol_are_refused_before_ranks_start() -> None:
    result = CliRunner().invoke(demo, ["--parquet", "nothing://bucket/clicks"])
    assert result.exit_code == 2
    assert "the protocol 'nothing' is not known to fsspec" in result.output
    assert "starting" not in result.output


def test_columns_without_parquet_are_refused() -> None:
    result = CliRunner().invoke(demo, ["--ids", "user"])
    assert result.exit_code == 2
    assert "--ids names columns of --parquet" in result.output


def test_output_that_cannot_be_written_is_found_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    output = tmp_path / "file" / "folder"
    done = run_demo_warm("--world-size", "2", "--output", str(output))
    assert done.returncode == 1
    assert "Not a directory" in done.stdout
    assert "step " not in done.stdout
    assert "Traceback" not in done.stdout


def summary_of(**fields: Any) -> Summary:
    figures: dict[str, Any] = {
        "auc": 0.75,
        "auc_generator": None,
        "auc_without_ids": None,
        "examples_per_second": 1.0,
        "stall_share": 0.0,
        "rows": {"user": 2},
        "world_size": 2,
        "steps": 3,
        "bad_lines": 0,
        "first_bad_line": None,
        "seconds": 1.0,
    }
    return Summary(**{**figures, **fields})


def shown(summary: Summary, capsys: pytest.CaptureFixture[str]) -> str:
    Screen(num_steps=3, is_shown=True).show_summary(summary)
    return " ".join(re.sub(r"[^ -~]", " ", capsys.readouterr().out).split())


def test_undefined_auc_is_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = summary_of(auc=None)
    assert "undefined: held-out labels are all equal" in shown(summary, capsys)
    assert json.loads(summary.write(tmp_path).read_text())["auc"] is None


def test_first_bad_line_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    text = "u.data, line 8, column rating: '[x]' is not a number"
    assert text in shown(summary_of(bad_lines=1, first_bad_line=text), capsys)


def test_old_summary_goes_before_training(tmp_path: Path) -> None:
    summary_of().write(tmp_path)
    prepare_folder(tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "time.png").touch()
    prepare_folder(tmp_path)
    summary_of().write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_help_names_every_option() -> None:
    result = CliRunner().invoke(demo, ["--help"])
    for option in ("--world-size", "--epochs", "--examples", "--movielens", "--max-bad-lines"):
        assert option in result.output
