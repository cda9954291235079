"""`recsdk simulate`: what tables of some sizes would do with a stream of ids."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from fractions import Fraction
from typing import Any

import click

from recsdk_core._internal.extras import require
from recsdk_core.checkpoint.command import progress_bar
from recsdk_core.cli import Failure, checked_by, checking_arguments, report_options
from recsdk_core.errors import RecsdkError
from recsdk_core.files import file_to_write, local_path
from recsdk_core.files.whole_file import written_anew
from recsdk_core.simulation.rules import RULES_HELP, parsed_rules
from recsdk_core.simulation.running import Simulated, checked_sample
from recsdk_core.simulation.running import simulate as simulate_tables
from recsdk_core.simulation.traces import Trace, open_trace

__all__ = ["simulate"]

FORMAT = "recsdk.simulate/1"
_MOST_COUNTED = 20_000_000
"""In a trace of at most so many ids the different ones are counted, not estimated."""


@click.command()
@click.argument("trace", callback=checked_by(local_path))
@click.option(
    "--column", metavar="NAME", help='The array or column of ids. Default: "ids", or the only one.'
)
@click.option("--time", metavar="NAME", help="The array or column of times, for lru:time.")
@click.option("--score", metavar="NAME", help="That of scores, for score.")
@click.option("--clicks", metavar="NAME", help="That of clicks, for show_click.")
@click.option(
    "--rows",
    default="5%,10%,25%,50%",
    show_default=True,
    help="Sizes: rows, or percent of the different ids.",
)
@click.option("--rules", default="none,lru,lfu", show_default=True, help=RULES_HELP)
@click.option(
    "--step", type=click.IntRange(min=1), default=8192, show_default=True, help="Ids of a step."
)
@click.option(
    "--sample", help="Part of the keys that take part: 1, 1/2, 1/4 and so on. Default: by length."
)
@click.option(
    "--dim", type=click.IntRange(min=1), default=64, show_default=True, help="Width of a row."
)
@click.option(
    "--state",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="Numbers of optimizer state a row: rowwise Adagrad 1, Adagrad the width, Adam twice that.",
)
@report_options
def simulate(
    trace: str,
    column: str | None,
    time: str | None,
    score: str | None,
    clicks: str | None,
    rows: str,
    rules: str,
    step: int,
    sample: str | None,
    dim: int,
    state: int,
    target: str | None,
    png: str | None,
) -> None:
    """Say how tables of some sizes would do with a stream of ids.

    TRACE is a .npz or Parquet file of ids: integers, or in Parquet text.

    TRACE may also be what `recsdk data describe --json` wrote of files that are not here (.json):
    then as many ids are drawn as the column has, by its Zipf exponent.

    Ids are taken in order, --step of them at a time. The output says for each size and rule which
    part of the ids had a row (hits), found no room (refused) or was not let in (kept out); how many
    left for others (evicted) or because they were not seen for long (expired); and which part of
    the rows given went to ids that had had one before (returned), or a short time before (churn).
    Of a long trace a part of the ids stands for all; the output says so. Nothing is trained, so
    there is no low_norm.

    The exit status is 0 if all is well, 1 if something is wrong with a file, 2 for a command line
    that is wrong.
    """
    with checking_arguments():
        parsed, admission = parsed_rules(rules)
        asked_sizes = _asked_sizes(rows)
        part = None if sample is None else _part(sample)
    try:
        if png is not None:
            require("matplotlib", extra="plot", user="--png")
            from recsdk_core.simulation.drawing import draw
        written = None if target in (None, "-") else file_to_write(target)
        drawn = None if png is None else file_to_write(png)
        ids = open_trace(trace, column, time, score=score, clicks=clicks)
        if next(ids.blocks(1), None) is None:
            raise ValueError(f"{trace}: has no ids; pass a trace that has some")
        sizes = _sizes(asked_sizes, ids)
        if part is not None:
            with checking_arguments():
                checked_sample("--sample", part, sizes)
        with progress_bar(ids.most_ids, "simulating") as progress:
            found = simulate_tables(
                ids,
                sizes,
                parsed,
                admission=admission,
                step_ids=step,
                sample=part,
                progress=progress,
            )
        if written is not None:
            with written_anew(written) as file:
                file.write_text(json.dumps(_as_json(trace, ids, found), indent=2) + "\n")
        if drawn is not None:
            with written_anew(drawn) as file:
                draw(found, file)
    except (ImportError, RecsdkError, ValueError, TypeError, OSError) as error:
        raise Failure(error) from error
    if target == "-":
        click.echo(json.dumps(_as_json(trace, ids, found), indent=2))
    else:
        _print(ids, found, 4 * (dim + state))


def _part(text: str) -> float:
    try:
        has_exponent = "e" in text.lower()  # Fraction would build a number of 10 to that power
        part = Fraction(float(text) if has_exponent else text)
    except (ValueError, ArithmeticError):
        part = Fraction(0)
    if part.numerator != 1 or part.denominator & (part.denominator - 1):
        raise ValueError(f"--sample must be 1, 1/2, 1/4 and so on, got {text!r}")
    return float(part)


def _asked_sizes(text: str) -> list[tuple[float, bool]]:
    """Numbers, each with whether it is a percentage."""
    asked = []
    for part in (part.strip() for part in text.split(",")):
        try:
            number = float(part.removesuffix("%"))
        except ValueError:
            number = math.nan
        if not 0 < number < 2**48:
            raise ValueError(
                "--rows must be numbers above 0 and below 2**48, of rows or with % of the "
                f"different ids, with commas between them, got {part!r}"
            )
        asked.append((number, part.endswith("%")))
    return asked


def _sizes(asked: Sequence[tuple[float, bool]], trace: Trace) -> list[int]:
    distinct = 0
    if any(is_part for _, is_part in asked):
        distinct = trace.num_distinct(1.0 if trace.most_ids <= _MOST_COUNTED else 1 / 64)
    sizes = [number / 100 * distinct if is_part else number for number, is_part in asked]
    for size in sizes:
        if size >= 2**48:
            raise ValueError(f"--rows must be below 2**48 rows, got {size:.0f}")
    return [max(round(size), 1) for size in sizes]


def _as_json(source: str, trace: Trace, found: Sequence[Simulated]) -> dict[str, Any]:
    runs = [asdict(each) for each in found]
    return {"format": FORMAT, "source": source, "remark": trace.remark, "runs": runs}


def _print(trace: Trace, found: Sequence[Simulated], row_bytes: int) -> None:
    sample = found[0].sample
    how = (
        "" if sample == 1 else f"; {Fraction(sample)} of the keys stand for all, figures are about"
    )
    click.echo(f"{found[0].num_ids:,} ids{how}")
    if trace.remark is not None:
        click.echo(trace.remark)
    cells = [_cells(each, row_bytes) for each in found]
    titles = [title for title in cells[0] if any(each[title] for each in cells)]
    lines = [titles, *([each[title] or "-" for title in titles] for each in cells)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        click.echo("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _cells(run: Simulated, row_bytes: int) -> dict[str, str | None]:
    """By title; what no run has is not shown."""
    return {
        "rows": f"{run.max_rows:,}",
        "rule": run.rule,
        "hits": f"{run.hit_rate:.2%}",
        "refused": f"{run.refused_rate:.2%}",
        "kept out": f"{run.not_admitted_rate:.2%}",
        "inserted": f"{run.inserted:,}",
        "evicted": f"{run.evicted:,}",
        "expired": f"{run.expired:,}" if run.expired else None,
        "returned": f"{run.returned_rate:.2%}",
        "churn": None if run.churn_rate is None else f"{run.churn_rate:.2%}",
        "memory": f"{(run.max_rows * row_bytes + run.index_bytes) / 1e6:,.1f} MB",
    }
