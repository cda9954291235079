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

import pytest
from click.testing import CliRunner
from pipeline_support.launch import environment, run_ranks

from recsdk_pipeline.demo.command import demo
from recsdk_pipeline.demo.report import Screen, Summary, prepare_folder
from recsdk_pipeline.demo.settings import Settings

RECSDK = str(Path(sys.executable).parent / "recsdk")
SECONDS_TO_END = 500


def run_demo(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [RECSDK, "demo", *options],
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=SECONDS_TO_END,
        check=False,
    )


def run_demo_warm(*options: str) -> subprocess.CompletedProcess[str]:
    """What the command's ranks do, on ranks that have imported torchrec already."""
    given = demo.make_context("demo", list(options)).params
    settings = Settings(**given, started_at=time.time())
    return run_ranks(settings.world_size, "-m", "recsdk_pipeline.demo", settings.to_json())


def test_demo_learns_from_ids_and_writes_a_summary(tmp_path: Path) -> None:
    output = tmp_path / "new" / "folder"
    done = run_demo("--examples", "60000", "--batch-size", "1024", "--output", str(output))
    assert done.returncode == 0, done.stdout
    summary = json.loads((output / "summary.json").read_text())
    assert summary["world_size"] == 2
    assert summary["steps"] == 59
    assert summary["examples_per_second"] > 0
    assert 0 < summary["stall_share"] < 1
    assert summary["seconds"] > 0
    assert set(summary["rows"]) == {"user", "item", "site", "tags", "words"}
    assert min(summary["rows"].values()) > 500
    assert summary["auc_without_ids"] < summary["auc"] < summary["auc_generator"]
    for shown in ("AUC on held-out examples", "rows of user", "part of that gap closed"):
        assert shown in done.stdout


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


@pytest.mark.parametrize("whom", ["launcher", "all"])
def test_ctrl_c_ends_all_ranks(tmp_path: Path, whom: str) -> None:
    process = subprocess.Popen(
        [RECSDK, "demo", "--examples", "3000000", "--output", str(tmp_path)],
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
        while not process.stdout.readline().startswith("step "):
            pass
        os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=SECONDS_TO_END)
    assert process.returncode == 130, output
    assert "stopped by SIGINT" in output
    assert whom == "launcher" or "Traceback" not in output
    for pid in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not list(tmp_path.iterdir())


def _wait_for_ranks(launcher: int) -> list[int]:
    """The ranks' process ids, once there are two."""
    deadline = time.monotonic() + SECONDS_TO_END
    children = Path(f"/proc/{launcher}/task/{launcher}/children")
    while time.monotonic() < deadline:
        found = [int(pid) for pid in children.read_text().split()]
        ranks = [p for p in found if "pipeline.demo" in Path(f"/proc/{p}/cmdline").read_text()]
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
    summary_of().write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_help_names_every_option() -> None:
    result = CliRunner().invoke(demo, ["--help"])
    for option in ("--world-size", "--epochs", "--examples", "--movielens", "--max-bad-lines"):
        assert option in result.output
