"""A page of charts from the raw figures in docs/perf/raw: how many times better than each peer."""

from __future__ import annotations

import io
import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")
import matplotlib.pyplot as plt

__all__ = ["measured_pages"]

PERF = Path(__file__).resolve().parents[2] / "docs" / "perf"
TEXT = {"light": "#333333", "dark": "#d5d8e0"}
LIMIT = "_limit"  # what the memory allows, for the tables of the pages
MACHINES = {"epyc": "AMD EPYC", "xeon": "Intel Xeon"}
OF_THE_PLANNER = "planned_step"  # it foretells, and does not race
HEAD = """# Charts

Each point is one workload: how many times better recsdk's figure is than the peer's, from one
interleaved run. To the right of the line recsdk is better. The scale is logarithmic. A row is one
operation; its name is the one in the raw file.

Compare points within a chart only: each chart is of one machine and one day. The page of each
measurement has the command, the versions and the spread.
"""


def measured_pages() -> dict[str, str | bytes]:
    """The page and its pictures, by path in the site."""
    made: dict[str, str | bytes] = {}
    parts = [HEAD]
    for raw in sorted((PERF / "raw").rglob("*.json")):
        ratios = ratios_of(json.loads(raw.read_text()))
        if ratios:
            parts.append(f"## {title_of(raw.stem)}\n\n{links_to_pages(raw.name)}\n")
            for mode, text in TEXT.items():
                name = f"charts/{raw.stem}_{mode}.svg"
                made[f"perf/{name}"] = chart(ratios, text)
                parts.append(f"![{raw.stem}: ratios by operation]({name}#only-{mode})")
    made["perf/drawn.md"] = "\n".join(parts) + "\n"
    return made


def title_of(stem: str) -> str:
    """`engine_epyc_202611` as `Engine, AMD EPYC`."""
    what, *rest = stem.split("_")
    words = [word for word in rest if not word.isdigit()]
    return ", ".join([what.capitalize(), *(MACHINES.get(word, word) for word in words)])


def links_to_pages(raw: str) -> str:
    """The pages that say how a raw file was measured."""
    pages = [page for page in sorted(PERF.glob("*.md")) if raw in page.read_text()]
    titles = [page.read_text().partition("\n")[0].lstrip("# ") for page in pages]
    links = [f"[{title}]({page.name})" for title, page in zip(titles, pages, strict=True)]
    return "How it was measured: " + ", ".join(links) + "."


def ratios_of(records: list[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """The ratios of all workloads, by operation and peer."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        for peer, ratio in record.get("ratio", {}).items():  # figures of models have none
            is_race = not record["op"].startswith(OF_THE_PLANNER) and not peer.endswith(LIMIT)
            if is_race and ratio > 0:
                found[f"{record['op']} ({record['unit']})"][peer].append(ratio)
    return {op: dict(peers) for op, peers in found.items()}


def chart(ratios: Mapping[str, Mapping[str, list[float]]], text: str) -> bytes:
    """One row an operation, one color a peer."""
    peers = sorted({peer for each in ratios.values() for peer in each})
    with mpl.rc_context({"svg.hashsalt": "recsdk", "font.size": 9, "text.color": text}):
        figure, axes = plt.subplots(figsize=(7.2, 1.3 + 0.24 * len(ratios) + 0.2 * len(peers)))
        palette = mpl.colormaps["tab10" if len(peers) <= 10 else "tab20"]
        for place, peer in enumerate(peers):
            points = [(r, y) for y, op in enumerate(ratios) for r in ratios[op].get(peer, ())]
            shift = (place - (len(peers) - 1) / 2) * 0.5 / max(len(peers), 1)
            x, y = [ratio for ratio, _ in points], [row + shift for _, row in points]
            axes.scatter(x, y, s=18, color=palette(place), label=peer, linewidths=0)
        finish(axes, list(ratios), text)
        file = io.BytesIO()
        figure.savefig(
            file, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None}
        )
        plt.close(figure)
    return file.getvalue()


def finish(axes: Any, names: list[str], text: str) -> None:
    axes.set_xscale("log")
    axes.axvline(1, color=text, linewidth=1)
    low, high = axes.get_xlim()
    low, high = min(low, 0.5), max(high, 2)
    axes.set_xlim(low, high)
    ticks = [
        t for t in (0.01, 0.03, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 100, 300, 1000) if low <= t <= high
    ]
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(color=text, alpha=0.15)
    axes.tick_params(colors=text)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=2, frameon=False)
