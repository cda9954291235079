"""Simulated tables as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from recsdk_core.simulation.running import Simulated


def draw(found: Sequence[Simulated], path: Path) -> None:
    """Write a PNG: hits, and rows that went to ids that had had one, by size; a line a rule."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    hits, returned = figure.subplots(1, 2)
    for rule in dict.fromkeys(each.rule for each in found):
        runs = sorted((each for each in found if each.rule == rule), key=lambda each: each.max_rows)
        sizes = [each.max_rows for each in runs]
        hits.plot(sizes, [100 * each.hit_rate for each in runs], "o-", label=rule)
        returned.plot(sizes, [100 * each.returned_rate for each in runs], "o-", label=rule)
    hits.set(title="Ids that have a row", xlabel="rows", ylabel="% of all ids", xscale="log")
    returned.set(title="Ids that return", xlabel="rows", ylabel="% of all rows given", xscale="log")
    hits.legend()
    figure.savefig(path, format="png", dpi=120)
