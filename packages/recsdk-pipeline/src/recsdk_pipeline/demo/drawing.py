"""What a training did, as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from recsdk_pipeline._internal.picture_text import picture_text
from recsdk_pipeline.demo.report import PICTURES, State
from recsdk_pipeline.telemetry.metrics import Labels, Report

__all__ = ["draw_loss_and_auc", "draw_tables", "draw_time", "write_pictures"]

_STYLES = ("-", "--", ":", "-.")
_MOST_A_COLUMN = 16


def write_pictures(folder: Path, states: Sequence[State], reports: Sequence[Report]) -> list[Path]:
    """Write three PNGs into `folder`, each of which is complete or not there; raises OSError."""
    figures = draw_loss_and_auc(states, reports), draw_tables(reports), draw_time(reports)
    for name, figure in zip(PICTURES, figures, strict=True):
        part = folder / f"{name}.part"
        figure.savefig(part, format="png", dpi=120)
        part.replace(folder / name)
    return [folder / name for name in PICTURES]


def draw_loss_and_auc(states: Sequence[State], reports: Sequence[Report]) -> Figure:
    """Loss and AUC by step; the AUC in training is that of examples not yet trained on."""
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    loss, auc = figure.subplots(1, 2)
    loss.plot([s.steps for s in states], [s.loss for s in states], marker=".")
    loss.set(title="Loss", xlabel="step", ylabel="mean log loss since the point before")
    told = [(r.step, r.values["recsdk_auc"][()]) for r in reports if "recsdk_auc" in r.values]
    auc.plot(*_columns(told), label="in training, before each step")
    held_out = [(s.steps, s.auc) for s in states if s.auc is not None]
    auc.plot(*_columns(held_out), marker=".", label="on some held-out examples")
    auc.set(title="AUC", xlabel="step", ylabel="AUC")
    auc.legend(fontsize="small")
    return figure


def draw_tables(reports: Sequence[Report]) -> Figure:
    """Rows of each table, and what their memory goes to, over all ranks."""
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    rows, memory = figure.subplots(1, 2)
    steps = [report.step for report in reports]
    for index, ((table,), counts) in enumerate(_curves(reports, "recsdk_table_rows").items()):
        # Ten colours, then other strokes.
        rows.plot(steps, counts, _STYLES[index // 10 % len(_STYLES)], label=picture_text(table))
    rows.set(title="Rows of tables", xlabel="step", ylabel="rows")
    by_part: dict[str, NDArray[np.float64]] = {}
    for (_, part), sizes in _curves(reports, "recsdk_table_bytes").items():
        by_part[part] = by_part.get(part, 0) + sizes / 1e6
    used = {part: sizes for part, sizes in by_part.items() if sizes.any()}
    if used:
        memory.stackplot(steps, *used.values(), labels=list(used))
    memory.set(title="Memory of tables by part", xlabel="step", ylabel="MB")
    for axes in (rows, memory):
        _add_legend(axes)
    return figure


def _add_legend(axes: Axes) -> None:
    """Beside the picture, where it hides nothing."""
    num = len(axes.get_legend_handles_labels()[1])
    if num:
        columns = 1 + (num - 1) // _MOST_A_COLUMN
        axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1), ncols=columns)


def draw_time(reports: Sequence[Report]) -> Figure:
    """Milliseconds a step by part: of the training's thread, and of the host jobs beside it."""
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    training, beside = figure.subplots(1, 2, sharey=True)
    places = zip(
        (training, beside),
        ("recsdk_step_seconds_total", "recsdk_host_seconds_total"),
        ("A step of the training", "Host jobs of a step, beside it"),
        strict=True,
    )
    steps = np.array([report.step for report in reports], dtype=np.float64)
    for axes, metric, title in places:
        curves = {
            part: 1000 * np.diff(seconds) / np.diff(steps)
            for (part,), seconds in _curves(reports, metric).items()
        }
        if len(steps) > 1 and curves:
            # Each stretch is as high as the point at its end.
            heights = [np.concatenate([each[:1], each]) for each in curves.values()]
            axes.stackplot(steps, *heights, labels=list(curves), step="pre")
            _add_legend(axes)
        axes.set(title=title, xlabel="step", ylabel="ms, mean over ranks")
    return figure


def _curves(reports: Sequence[Report], name: str) -> dict[Labels, NDArray[np.float64]]:
    """A number's values by report, 0 where it is not told."""
    labels = dict.fromkeys(key for report in reports for key in report.values.get(name, {}))
    return {
        key: np.array([report.values.get(name, {}).get(key, 0.0) for report in reports])
        for key in labels
    }


def _columns(pairs: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in pairs], [y for _, y in pairs]
