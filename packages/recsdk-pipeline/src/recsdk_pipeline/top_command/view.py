"""What `recsdk top` shows of two reports: rates, tables, ranks, and where the time goes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from recsdk_pipeline.telemetry.merging import merged
from recsdk_pipeline.telemetry.metrics import Labels, Values
from recsdk_pipeline.top_command.sources import Sample

__all__ = ["Span", "view"]

_BAR = 24
_NUMBER = re.compile("([0-9]+)")
_SIZES = ("B", "kB", "MB", "GB", "TB", "PB")
_THREADS = {
    "recsdk_step_seconds_total": "training",
    "recsdk_host_seconds_total": "beside it",
}


@dataclass(frozen=True, kw_only=True)
class Span:
    """The last report of one source, and the one before it."""

    before: Sample | None
    now: Sample

    def seconds(self) -> float:
        """Between the two; 0 without the one before."""
        return 0.0 if self.before is None else max(0.0, self.now.time - self.before.time)


class _Numbers:
    """Numbers of all ranks, and how fast counters grow."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.now = merged([span.now.values for span in spans], ())
        befores = [span.before for span in spans if span.before is not None]
        is_whole = len(befores) == len(spans)
        self._before = merged([each.values for each in befores], ()) if is_whole else None
        self._seconds = sum(span.seconds() for span in spans) / len(spans)

    def one(self, name: str, labels: Labels = ()) -> float | None:
        """A number as it stands."""
        return self.now.get(name, {}).get(labels)

    def growth(self, name: str) -> dict[Labels, float]:
        """How much counters have grown between the reports; nothing without the one before."""
        if self._before is None:
            return {}
        before = self._before.get(name, {})
        return {k: number - before.get(k, 0.0) for k, number in self.now.get(name, {}).items()}

    def rate(self, name: str, **wanted: str) -> float | None:
        """The growth a second of all counters of a name together, None if it is not known.

        `wanted`: by place of the label (`l0`, `l1`), what it must be.
        """
        found = self.growth(name)
        if not found or self._seconds == 0:
            return None
        places = {int(key[1:]): value for key, value in wanted.items()}
        chosen = [n for k, n in found.items() if all(k[i] == v for i, v in places.items())]
        return sum(chosen) / self._seconds


def view(spans: Sequence[Span], problems: Mapping[str, str]) -> RenderableType:
    """What the terminal shows. `problems`: by source, why it could not be read."""
    parts: list[RenderableType] = []
    if spans:
        numbers = _Numbers(spans)
        # The tables last: a terminal that is too low for all of it cuts the end off.
        parts = [_headline(numbers), _times(numbers), _ranks(numbers, spans), _tables(numbers)]
    parts += [Text(f"{name}: {text}", style="red") for name, text in problems.items()]
    return Group(*parts)


def _headline(numbers: _Numbers) -> Text:
    rates = {
        "steps": numbers.rate("recsdk_steps_total"),
        "examples": numbers.rate("recsdk_examples_total"),
        "ids": numbers.rate("recsdk_table_keys_total"),
        "bytes sent": numbers.rate("recsdk_sent_bytes_total"),
    }
    figures = {name: numbers.one(f"recsdk_{name}") for name in ("loss", "auc", "calibration")}
    said = [f"step {numbers.one('recsdk_steps_total') or 0:,.0f}"]
    said += [f"{_short(rate)} {name}/s" for name, rate in rates.items() if rate is not None]
    said += [f"{name} {figure:.4f}" for name, figure in figures.items() if figure is not None]
    return Text("  ".join(said), style="bold")


def _tables(numbers: _Numbers) -> Table:
    table = Table(title="tables", title_justify="left")
    columns = (
        "table",
        "rows",
        "rows/s",
        "memory",
        "ids/s",
        "new/s",
        "left/s",
        "refused",
        "not finite",
    )
    for name in columns:
        table.add_column(name, justify="left" if name == "table" else "right")
    keys = "recsdk_table_keys_total"
    for name in sorted((t for (t,) in numbers.now.get("recsdk_table_rows", {})), key=_as_counted):
        ids = numbers.rate(keys, l0=name)
        refused = numbers.rate(keys, l0=name, l1="refused")
        memory = [n for (t, _), n in numbers.now.get("recsdk_table_bytes", {}).items() if t == name]
        table.add_row(
            escape(name),
            f"{numbers.one('recsdk_table_rows', (name,)) or 0:,.0f}",
            _short(numbers.one("recsdk_table_growth_rows_per_second", (name,))),
            _size(sum(memory)),
            _short(ids),
            _short(numbers.rate(keys, l0=name, l1="inserted")),
            _short(numbers.one("recsdk_table_leaving_rows_per_second", (name,))),
            "" if not ids or refused is None else f"{refused / ids:.1%}",
            f"{numbers.one('recsdk_table_nonfinite_total', (name,)) or 0:,.0f}",
        )
    return table


def _times(numbers: _Numbers) -> Table:
    """Each part of a step; of the training's thread also its share.

    While no step is known to lie between two reports, the shares are those since the start.
    """
    steps = numbers.growth("recsdk_steps_total").get((), 0.0)
    since = "" if steps else ", since the start"
    table = Table(title=f"where the time goes{since}", title_justify="left")
    for name in ("thread", "part", "ms a step", "share"):
        table.add_column(name, justify="left" if name in ("thread", "part") else "right")
    table.add_column("")
    for metric, thread in _THREADS.items():
        times = numbers.growth(metric) if steps else numbers.now.get(metric, {})
        spent = {part: seconds for (part,), seconds in times.items()}
        total = sum(spent.values())
        is_of_step = metric == "recsdk_step_seconds_total"
        for part, seconds in sorted(spent.items(), key=lambda each: -each[1]):
            if not total or not (steps or is_of_step):
                continue
            share = seconds / total
            # Not since the start: a training that was resumed has counted steps of another process.
            row = [thread, part, f"{1000 * seconds / steps:.3f}" if steps else ""]
            shown = [f"{share:.1%}", "#" * round(_BAR * share)] if is_of_step else ["", ""]
            table.add_row(*row, *shown)
    return table


def _ranks(numbers: _Numbers, spans: Sequence[Span]) -> RenderableType:
    skew = {of: n for (of,), n in numbers.now.get("recsdk_rank_skew", {}).items()}
    said = ", ".join(f"{of} {number:.2f}" for of, number in sorted(skew.items()))
    line = Text(f"skew over ranks, largest over mean: {said}")
    age = numbers.one("recsdk_save_age_seconds")
    if age is not None:
        line.append(f"   last save {age:,.0f} s ago")
    if len(spans) == 1:
        return line
    table = Table(title="ranks", title_justify="left")
    for name in ("rank", "step", "rows", "ids/s", "waiting, ms a step"):
        table.add_column(name, justify="right")
    for span in sorted(spans, key=lambda each: int(each.now.rank or 0)):
        own = _Numbers([span])
        waited = own.growth("recsdk_step_seconds_total").get(("waiting",), 0.0)
        steps = own.growth("recsdk_steps_total").get((), 0.0)
        table.add_row(
            span.now.rank or "",
            f"{own.one('recsdk_steps_total') or 0:,.0f}",
            f"{_sum(own.now, 'recsdk_table_rows'):,.0f}",
            _short(own.rate("recsdk_table_keys_total")),
            f"{1000 * waited / steps:.3f}" if steps else "",
        )
    return Group(table, line)


def _as_counted(name: str) -> list[tuple[int, str]]:
    """Orders C2 before C10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _NUMBER.split(name)]


def _sum(values: Values, name: str) -> float:
    return sum(values.get(name, {}).values())


def _short(number: float | None) -> str:
    """With three figures; nothing for what is not known."""
    if number is None:
        return ""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(number) >= size:
            return f"{number / (1e3 if unit == 'k' else size):,.1f} {unit}"
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def _size(number: float) -> str:
    for unit in _SIZES[:-1]:
        if abs(number) < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:,.0f} {_SIZES[-1]}"
