"""The demo's pictures show what was told."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes

from recsdk_pipeline.demo import training
from recsdk_pipeline.demo.drawing import draw_loss_and_auc, draw_tables, draw_time, write_pictures
from recsdk_pipeline.demo.report import State
from recsdk_pipeline.telemetry import Report


def state_of(steps: int, auc: float | None) -> State:
    return State(steps=steps, loss=1 / steps, auc=auc, examples_per_second=1.0, rows={})


def report_of(step: int) -> Report:
    words = {("words",): 3 * step} if step > 10 else {}
    return Report(
        time=0.0,
        step=step,
        rank=None,
        num_ranks=2,
        values={
            "recsdk_auc": {(): 0.5 + step / 100},
            "recsdk_table_rows": {("user",): 2 * step, **words},
            "recsdk_table_bytes": {("user", "row"): 4e6 * step, ("words", "row"): 1e6},
            "recsdk_step_seconds_total": {("forward",): 0.002 * step, ("backward",): 0.05},
            "recsdk_host_seconds_total": {("mapping",): 0.001 * step},
        },
    )


STATES = [state_of(10, None), state_of(20, 0.7), state_of(40, 0.8)]
REPORTS = [report_of(10), report_of(20), report_of(40)]


def curves_of(axes: Axes) -> list[tuple[list[float], list[float]]]:
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()]


def labels_of(axes: Axes) -> list[str]:
    return [str(text) for text in axes.get_legend_handles_labels()[1]]


def top_of(axes: Axes, place: int, x: float) -> float:
    """How high a stretch of a stack reaches."""
    [path] = axes.collections[place].get_paths()
    return float(max(y for at, y in path.vertices if at == x))


def test_loss_and_auc() -> None:
    loss, auc = draw_loss_and_auc(STATES, REPORTS).axes
    assert curves_of(loss) == [([10, 20, 40], [0.1, 0.05, 0.025])]
    assert curves_of(auc) == [([10, 20, 40], [0.6, 0.7, 0.9]), ([20, 40], [0.7, 0.8])]


def test_tables() -> None:
    rows, memory = draw_tables(REPORTS).axes
    assert curves_of(rows) == [([10, 20, 40], [20, 40, 80]), ([10, 20, 40], [0, 60, 120])]
    assert labels_of(rows) == ["user", "words"]
    assert labels_of(memory) == ["row"]
    assert top_of(memory, 0, 40) == 161


def test_time_is_that_of_a_step_since_the_point_before() -> None:
    training, beside = draw_time(REPORTS).axes
    assert labels_of(training) == ["forward", "backward"]
    assert np.isclose([top_of(training, 0, x) for x in (20, 40)], 2.0).all()
    assert np.isclose([top_of(training, 1, x) for x in (20, 40)], 2.0).all()
    assert labels_of(beside) == ["mapping"]
    assert np.isclose(top_of(beside, 0, 40), 1.0)


def test_time_of_two_points_fills_what_lies_between() -> None:
    training, _ = draw_time(REPORTS[:2]).axes
    [path] = training.collections[0].get_paths()
    assert {(10, 2), (20, 2)} <= {(x, round(y, 6)) for x, y in path.vertices}


def test_tables_of_any_name_are_named(tmp_path: Path) -> None:
    names = ["_hidden", "$a_{b}$", r"$bad\frac$", "a$b"]
    rows = {(name,): 1.0 for name in names}
    reports = [replace(report, values={"recsdk_table_rows": rows}) for report in REPORTS]
    write_pictures(tmp_path, [], reports)
    assert labels_of(draw_tables(reports).axes[0]) == [
        " _hidden",
        r"\$a_{b}\$",
        r"\$bad\frac\$",
        r"a\$b",
    ]


@pytest.mark.parametrize("num_tables", [1, 26, 40])
def test_all_tables_are_named_within_the_picture(num_tables: int) -> None:
    rows = {(f"C{n}",): float(n) for n in range(num_tables)}
    reports = [replace(report, values={"recsdk_table_rows": rows}) for report in REPORTS]
    figure = draw_tables(reports)
    figure.savefig(BytesIO(), format="png")
    legend = figure.axes[0].get_legend()
    assert legend is not None
    assert len(legend.get_texts()) == num_tables
    styles = {(line.get_color(), line.get_linestyle()) for line in figure.axes[0].get_lines()}
    assert len(styles) == num_tables
    frame, found = figure.bbox, legend.get_window_extent()
    assert frame.x0 <= found.x0 < found.x1 <= frame.x1
    assert frame.y0 <= found.y0 < found.y1 <= frame.y1


def test_legends_hide_nothing() -> None:
    for figure in (draw_tables(REPORTS), draw_time(REPORTS)):
        figure.savefig(BytesIO(), format="png")
        for axes in figure.axes:
            legend = axes.get_legend()
            assert legend is not None
            assert legend.get_window_extent().x0 >= axes.bbox.x1


@pytest.mark.parametrize(
    ("steps", "others", "mean"),
    [
        ([(0.5, 4)], (0.0, 0.0), 0.5),  # the other rank had none left
        ([(0.5, 3), (0.1, 1), (0.0, 0)], (0.0, 0.0), 0.4),
        ([(0.5, 2)], (3.0, 6.0), 0.5),
        ([(math.nan, 0), (0.25, 8)], (2.0, 8.0), 0.25),
    ],
)
def test_loss_is_that_of_examples_on_any_ranks(
    monkeypatch: pytest.MonkeyPatch,
    steps: list[tuple[float, int]],
    others: tuple[float, float],
    mean: float,
) -> None:
    monkeypatch.setattr(training.dist, "all_reduce", lambda sums: sums.add_(torch.tensor(others)))
    losses = training.Losses()
    for loss, num_examples in steps:
        losses.add(torch.tensor(loss), num_examples)
    assert [losses.mean(), losses.mean()] == pytest.approx([mean, mean])


@pytest.mark.parametrize("num_points", [0, 1, 3])
def test_pictures_of_trainings_of_any_length(tmp_path: Path, num_points: int) -> None:
    paths = write_pictures(tmp_path, STATES[:num_points], REPORTS[:num_points])
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_without_matplotlib_nothing_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from recsdk_pipeline.demo.report import Screen
    from recsdk_pipeline.demo.worker import _draw

    monkeypatch.setitem(sys.modules, "recsdk_pipeline.demo.drawing", None)
    _draw(tmp_path, None, Screen(num_steps=1, is_shown=True))
    assert (
        'they need matplotlib; run pip install "recsdk-pipeline[plot]"' in capsys.readouterr().out
    )
    assert not list(tmp_path.iterdir())
