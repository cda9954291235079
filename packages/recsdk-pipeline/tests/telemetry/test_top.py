"""`recsdk top` on recorded reports."""

from __future__ import annotations

import json
import math
import socket
import sys
import threading
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
from click.testing import CliRunner
from rich.console import Console

from ports import reserved_ports
from recsdk_core.cli import main
from recsdk_pipeline.telemetry import JsonLines, Prometheus, Report
from recsdk_pipeline.top_command.command import Watch, _follow
from recsdk_pipeline.top_command.sources import FileSource, source_of
from recsdk_pipeline.top_command.view import view


def report_of(step: int, rank: int | None = None) -> Report:
    """A report every 2 seconds and 100 steps."""
    scale = 1 + (rank or 0)
    now = 1.7e9 + step / 50
    return Report(
        time=now,
        step=step,
        rank=rank,
        num_ranks=2,
        values={
            "recsdk_report_timestamp_seconds": {(): now},
            "recsdk_steps_total": {(): step},
            "recsdk_examples_total": {(): 40 * step * scale},
            "recsdk_loss": {(): 0.625},
            "recsdk_table_rows": {("user",): 10 * step * scale, ("[item]",): 7},
            "recsdk_table_growth_rows_per_second": {("user",): 500 * scale, ("[item]",): 0},
            "recsdk_table_leaving_rows_per_second": {("user",): 20 * scale},
            "recsdk_table_bytes": {("user", "row"): 3000 * step, ("user", "index"): 500 * step},
            "recsdk_table_keys_total": {
                ("user", "found"): 60 * step * scale,
                ("user", "inserted"): 15 * step * scale,
                ("user", "refused"): 25 * step * scale,
            },
            "recsdk_step_seconds_total": {
                ("forward",): 0.012 * step,
                ("waiting",): 0.004 * step * scale,
            },
            "recsdk_host_seconds_total": {("mapping",): 0.003 * step},
            "recsdk_rank_skew": {("ids",): 1.25, ("rows",): 1.5},
            "recsdk_save_age_seconds": {(): 90.0},
        },
    )


def recorded(path: Path, steps: list[int], rank: int | None = None) -> Path:
    sink = JsonLines(path)
    sink.open(rank)
    for step in steps:
        sink.write(report_of(step, rank))
    sink.close()
    return sink.path


def shown(*arguments: Any, status: int = 0) -> str:
    done = CliRunner(env={"COLUMNS": None}).invoke(main, ["top", *map(str, arguments), "--once"])
    assert done.exit_code == status, done.output
    return done.output


def rows_of(text: str, name: str) -> list[list[str]]:
    """The cells of the rows of a table of the output that begin with a word."""
    cells = [[each.strip() for each in line.split("\u2502")[1:-1]] for line in text.splitlines()]
    return [row for row in cells if row and row[0] == name]


def test_the_last_two_reports_of_a_file(tmp_path: Path) -> None:
    text = shown(recorded(tmp_path / "run.jsonl", [100, 200, 300]))
    headline = text.splitlines()[0]
    assert headline.startswith("step 300  50 steps/s  2,000 examples/s  5,000 ids/s  loss 0.6250")
    [user] = rows_of(text, "user")
    assert user == ["user", "3,000", "500", "1.05 MB", "5,000", "750", "20", "25.0%", "0"]
    [item] = rows_of(text, "[item]")
    assert item[:4] == ["[item]", "7", "0", "0 B"]
    parts = [(row[1], row[2], row[3]) for row in rows_of(text, "training")]
    assert parts == [("forward", "12.000", "75.0%"), ("waiting", "4.000", "25.0%")]
    assert rows_of(text, "beside it") == [["beside it", "mapping", "3.000", "", ""]]
    assert "ids 1.25, rows 1.50   last save 90 s ago" in text


def test_several_ranks_are_one_and_each(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    text = shown(*(recorded(path, [100, 200], rank) for rank in (1, 0)))
    [user] = rows_of(text, "user")
    assert user[1:3] == ["6,000", "1,500"]
    assert rows_of(text, "0") == [["0", "200", "2,007", "5,000", "4.000"]]
    assert rows_of(text, "1") == [["1", "200", "4,007", "10.0 k", "8.000"]]
    assert "4,000 examples/s" not in text
    assert "6,000 examples/s" in text


def test_one_report_has_no_rates(tmp_path: Path) -> None:
    text = shown(recorded(tmp_path / "run.jsonl", [100]))
    assert text.splitlines()[0] == "step 100  loss 0.6250"
    assert rows_of(text, "user") == [["user", "1,000", "500", "350 kB", "", "", "20", "", "0"]]
    assert "where the time goes, since the start" in text
    parts = [row[1:4] for row in rows_of(text, "training")]
    assert parts == [["forward", "", "75.0%"], ["waiting", "", "25.0%"]]
    assert rows_of(text, "beside it") == []


def test_a_low_terminal_cuts_tables_off_and_nothing_else(tmp_path: Path) -> None:
    rows = {(f"C{n}",): float(n) for n in range(1, 41)}
    sink = JsonLines(tmp_path / "run.jsonl")
    sink.open(None)
    for step in (100, 200):
        report = report_of(step)
        sink.write(replace(report, values={**report.values, "recsdk_table_rows": rows}))
    sink.close()
    lines = shown(sink.path).splitlines()
    names = [line.split()[1] for line in lines if line.startswith("\u2502 C")]
    assert names == [f"C{n}" for n in range(1, 41)]
    first = next(n for n, line in enumerate(lines) if line.startswith("tables"))
    assert first < 15
    assert any("skew over ranks" in line for line in lines[:first])
    assert any("forward" in line for line in lines[:first])


def test_a_port_is_read_until_it_has_two_reports() -> None:
    pytest.importorskip("prometheus_client")
    sink = Prometheus(port=0)
    sink.open(1)
    watch = Watch([source_of(str(sink.port))])
    assert watch.read() == []
    assert watch.problems == {str(sink.port): "no report yet"}
    looks = []
    for step in (100, 100, 300):  # the second look finds the same report
        sink.write(report_of(step, 1))
        [span] = watch.read()
        looks.append((span.now.values["recsdk_steps_total"][()], span.seconds()))
    assert looks == [(100, 0.0), (100, 0.0), (300, 4.0)]
    assert span.now.rank == "1"
    assert span.now.values == report_of(300, 1).values
    sink.close()
    assert watch.read() == [span]
    assert "refused" in watch.problems[str(sink.port)]


def test_a_growing_file_is_followed_by_whole_lines(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run.jsonl", [100])
    source = FileSource(str(path))
    assert [sample.values["recsdk_steps_total"][()] for sample in source.read()] == [100]
    line = json.dumps({"time": 1.7e9 + 9, "rank": None, "recsdk_steps_total": 450}) + "\n"
    with path.open("a") as file:
        file.write(line[:20])
        file.flush()
        assert source.read() == []
        file.write(line[20:])
    assert [sample.values["recsdk_steps_total"][()] for sample in source.read()] == [450]
    path.unlink()
    recorded(path, [7])
    assert [sample.values["recsdk_steps_total"][()] for sample in source.read()] == [7]


def test_another_run_begins_anew(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run.jsonl", [200, 300, 100])
    [span] = Watch([FileSource(str(path))]).read()
    assert (span.before, span.now.values["recsdk_steps_total"][()]) == (None, 100)


def test_a_run_that_appends_to_the_file_of_another_has_rates_of_its_own(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run.jsonl", [200, 300])
    again = dict(json.loads(path.read_text().splitlines()[0]), time=1.8e9)
    with path.open("a") as file:
        file.write(json.dumps(again) + "\n")
    assert shown(path).splitlines()[0] == "step 200  loss 0.6250"


def test_a_loss_that_diverged_is_shown(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "run.jsonl")
    sink.open(None)
    sink.write(replace(report_of(100), values={"recsdk_loss": {(): math.inf}}))
    sink.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    assert json.loads(sink.path.read_text(), parse_constant=refuse)["recsdk_loss"] is None
    assert "loss nan" in shown(sink.path)


def test_metrics_of_later_versions_are_left_out(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run.jsonl", [100])
    line = dict(json.loads(path.read_text()), recsdk_later=3, recsdk_later_total={"a": {"b": 1}})
    path.write_text(json.dumps(line) + "\n")
    assert shown(path).splitlines()[0] == "step 100  loss 0.6250"


@pytest.mark.parametrize("rows", [3, {"user": {"cause": 3}}, {"user": "many"}])
def test_numbers_by_other_labels_are_no_telemetry(tmp_path: Path, rows: Any) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps({"time": 1, "rank": None, "recsdk_table_rows": rows}) + "\n")
    assert "no line of telemetry" in shown(path, status=1).replace("\n", " ")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"SSH-2.0\r\n", "BadStatusLine"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 9\r\n\r\nrec", "IncompleteRead"),
        (b'HTTP/1.0 200 OK\r\n\r\nrecsdk_table_rows{of="a"} 3\n', "has the labels ['of']"),
        (b'HTTP/1.0 200 OK\r\n\r\nrecsdk_report_timestamp_seconds{rank="a"} 3\n', "'a'"),
    ],
)
def test_a_port_that_answers_something_else_is_said(answer: bytes, said: str) -> None:
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        server = threading.Thread(target=serve)
        server.start()
        port = str(listener.getsockname()[1])
        watch = Watch([source_of(port)])
        assert watch.read() == []
        server.join()
    assert said in watch.problems[port]


def test_a_port_where_nobody_listens_is_said() -> None:
    pytest.importorskip("prometheus_client")
    with reserved_ports() as [port]:
        text = shown(port, status=1)
        assert f"{port}: no answer: Connection refused; is it where" in text.replace("\n", " ")
    for wrong in ("65536", "localhost:99999"):
        assert f"a port must be 0 to 65535, got '{wrong}'" in shown(wrong, status=2)


def test_a_port_that_takes_too_long_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prometheus_client")

    def wait(*_: Any, **__: Any) -> Any:
        raise URLError(TimeoutError("timed out"))

    monkeypatch.setattr(urllib.request, "urlopen", wait)
    assert "9400: no answer: timed out; is it" in shown("9400", status=1).replace("\n", " ")


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("epoch 3\n")
    text = shown(tmp_path / "log", tmp_path / "gone", status=1)
    assert "no line of telemetry: 'epoch 3'" in text.replace("\n", "")
    assert "No such file or directory" in text.replace("\n", " ")


@pytest.mark.parametrize("line", ['{"time": 1, "rank": 1e999}', "[" * 100_000])
def test_numbers_and_nesting_beyond_all_limits_are_no_telemetry(tmp_path: Path, line: str) -> None:
    (tmp_path / "log").write_text(f"{line}\n")
    assert "no line of telemetry" in shown(tmp_path / "log", status=1).replace("\n", " ")


def test_a_line_that_a_killed_run_has_cut_off_hides_no_other(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run.jsonl", [100])
    path.write_text(path.read_text() * 2 + path.read_text()[:40])
    recorded(path, [300])
    assert len(path.read_text().splitlines()) == 4
    assert shown(path).splitlines()[0].startswith("step 300 ")


def test_it_is_shown_until_ctrl_c(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recorded(tmp_path / "run.jsonl", [100])
    steps = iter([200, 300])

    def wait() -> None:
        if (step := next(steps, None)) is None:
            raise KeyboardInterrupt
        recorded(path, [step])

    monkeypatch.setenv("COLUMNS", "120")
    _follow(Watch([FileSource(str(path))]), wait)
    assert "step 300  50 steps/s" in capsys.readouterr().out


def test_what_cannot_be_read_is_said_at_once_where_no_terminal_shows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    told = []

    def wait() -> None:
        told.append(capsys.readouterr().err)
        if len(told) == 3:
            raise KeyboardInterrupt
        if len(told) == 2:
            path.touch()

    _follow(Watch([FileSource(str(path))]), wait)
    assert told == [f"{path}: No such file or directory\n", "", f"{path}: no report yet\n"]


def test_a_port_needs_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client.parser", None)
    text = shown("9400", status=1)
    assert 'pip install "recsdk-pipeline[prometheus]"' in text


def test_nothing_to_show() -> None:
    console = Console(record=True, width=80)
    console.print(view([], {"9400": "no report yet"}))
    assert console.export_text().strip() == "9400: no report yet"
