"""A description as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recsdk_pipeline._internal.picture_text import picture_text
from recsdk_pipeline.data_command.description import Ages, BagLengths, Description

_MOST_POINTS = 400
_UNITS = (("days", 86_400), ("hours", 3_600), ("minutes", 60), ("seconds", 1))
_STYLES = ("-", "--", "-.", ":")


def draw(description: Description, path: Path) -> None:
    """Write a PNG: how often the ids of each column come by their rank, and their numbers.

    Of columns of lists also how long these are, and with times how old ids are.
    """
    curves = {name: curve for name, curve in description.curves.items() if len(curve[0])}
    columns = [(picture_text(each.name), each.ids) for each in description.columns if each.ids]
    bags = [(name, ids.bag_lengths) for name, ids in columns if ids.bag_lengths]
    ages = [(name, ids.ages) for name, ids in columns if ids.ages]
    panels = 2 + bool(bags) + bool(ages)
    figure = Figure(figsize=(7 * panels, max(5, 0.24 * len(curves) + 2)), layout="constrained")
    by_rank, numbers, *more = figure.subplots(1, panels)
    for index, (name, (counts, ids_a_sample)) in enumerate(curves.items()):
        most = min(len(counts), _MOST_POINTS)
        places = np.unique(np.geomspace(1, len(counts), most).astype(np.int64)) - 1
        ranks = (places + 1) * ids_a_sample
        # Ten colours, then other strokes.
        style = _STYLES[index // 10 % len(_STYLES)]
        marker = "." if len(counts) == 1 else None
        by_rank.plot(ranks, counts[places], style, marker=marker, label=picture_text(name))
    by_rank.set(xscale="log", yscale="log", xlabel="rank of the id", ylabel="times it comes")
    by_rank.set_title("How often ids come")
    if curves:
        by_rank.legend(fontsize="small", ncols=1 + len(curves) // 14)
    distinct = [ids.num_distinct for _, ids in columns]
    bars = numbers.barh([name for name, _ in columns], distinct)
    numbers.bar_label(bars, [f"{number:,}" for number in distinct], padding=3, fontsize="small")
    numbers.set_title(f"Different ids in {description.rows:,} rows")
    numbers.invert_yaxis()
    numbers.margins(x=0.15)
    if bags:
        _draw_bags(more[0], bags)
    if ages:
        _draw_ages(more[-1], ages)
    figure.savefig(path, format="png", dpi=120)


def _draw_bags(panel: Axes, bags: Sequence[tuple[str, BagLengths]]) -> None:
    """A row of dots a column: half, 90 and 99 % of its lists have at most so many ids."""
    for place, (_, each) in enumerate(bags):
        panel.plot([each.p50, each.p90, each.p99], [place] * 3, "o-", color="C0", markersize=4)
        panel.plot([each.mean], [place], "|", color="C1", markersize=14)
        panel.annotate(
            f"longest {each.max:,}",
            (each.p99, place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize="small",
        )
    panel.set_yticks(range(len(bags)), [name for name, _ in bags])
    panel.set_ylim(len(bags) - 0.5, -0.5)
    panel.margins(x=0.3)
    panel.set_xlim(left=0)
    panel.set_xlabel("ids")
    panel.set_title("Ids of a bag: 50, 90, 99 %; the mean is a bar")


def _draw_ages(panel: Axes, ages: Sequence[tuple[str, Ages]]) -> None:
    """Two rows of dots a column: for half, 90 and 99 % of its ids at most so long."""
    oldest = max(each.age.p99 for _, each in ages)
    units = [unit for unit in _UNITS if ages[0][1].unit == "s" and oldest >= 2 * unit[1]]
    unit, size = units[0] if units else ("in the column's unit", 1)
    for what, shift, color in (("age", -0.15, "C0"), ("idle", 0.15, "C1")):
        for place, (_, each) in enumerate(ages):
            found = getattr(each, what)
            times = [time / size for time in (found.p50, found.p90, found.p99)]
            label = what if place == 0 else None
            panel.plot(times, [place + shift] * 3, "o-", color=color, markersize=4, label=label)
    panel.set_yticks(range(len(ages)), [name for name, _ in ages])
    panel.invert_yaxis()
    panel.set_xlim(left=0)
    panel.set_xlabel(unit)
    panel.set_title("Since ids came first (age) and last (idle): 50, 90, 99 %")
    panel.legend(fontsize="small")
