"""A description as a picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from recsdk_pipeline.data_command.description import Description

_MOST_POINTS = 400
_STYLES = ("-", "--", "-.", ":")


def draw(description: Description, path: Path) -> None:
    """Write a PNG: how often the ids of each column come by their rank, and their numbers."""
    curves = {name: curve for name, curve in description.curves.items() if len(curve[0])}
    figure = Figure(figsize=(14, max(5, 0.24 * len(curves) + 2)), layout="constrained")
    by_rank, numbers = figure.subplots(1, 2)
    for index, (name, (counts, ids_a_sample)) in enumerate(curves.items()):
        most = min(len(counts), _MOST_POINTS)
        places = np.unique(np.geomspace(1, len(counts), most).astype(np.int64)) - 1
        ranks = (places + 1) * ids_a_sample
        # Ten colours, then other strokes.
        style = _STYLES[index // 10 % len(_STYLES)]
        marker = "." if len(counts) == 1 else None
        by_rank.plot(ranks, counts[places], style, marker=marker, label=name)
    by_rank.set(xscale="log", yscale="log", xlabel="rank of the id", ylabel="times it comes")
    by_rank.set_title("How often ids come")
    if curves:
        by_rank.legend(fontsize="small", ncols=1 + len(curves) // 14)
    ids = [(each.name, each.ids.num_distinct) for each in description.columns if each.ids]
    bars = numbers.barh([name for name, _ in ids], [number for _, number in ids])
    numbers.bar_label(bars, [f"{number:,}" for _, number in ids], padding=3, fontsize="small")
    numbers.set_title(f"Different ids in {description.rows:,} rows")
    numbers.invert_yaxis()
    numbers.margins(x=0.15)
    figure.savefig(path, format="png", dpi=120)
