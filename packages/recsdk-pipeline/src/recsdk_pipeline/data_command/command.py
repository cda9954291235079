"""The command line of `recsdk data`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource
from rich.cells import cell_len
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from recsdk_core.cli import Failure, checked_by, checking_arguments, report_options
from recsdk_core.errors import RecsdkError
from recsdk_core.files import file_to_write, local_path
from recsdk_core.files.urls import require_protocols
from recsdk_core.files.whole_file import refuse_taken, written_anew
from recsdk_pipeline._internal.screen import progress, screen

if TYPE_CHECKING:
    from recsdk_pipeline.data_command.description import Ages, Column, Description, Percentiles

_NEEDED = 'recsdk data needs pyarrow and fsspec; run pip install "recsdk-pipeline[data]"'
_TEXTS = ("column", "type")
"""Columns of the table whose text may go on in the next line anywhere."""
_LEAST_TEXT = 8
_OF_CSV = {"delimiter": "--delimiter", "types": "--type"}


@click.group()
def data() -> None:
    """Convert and describe files of training data."""


@data.command()
@click.argument("kind", type=click.Choice(["criteo", "movielens", "csv"]))
@click.argument(
    "sources", metavar="SOURCE...", nargs=-1, required=True, callback=checked_by(require_protocols)
)
@click.argument("target", callback=checked_by(local_path))
@click.option(
    "--rows-a-group",
    type=click.IntRange(min=1),
    default=100_000,
    show_default=True,
    help="Rows of a row group, what is dealt to ranks and workers; ten groups a worker or more.",
)
@click.option(
    "--max-bad-lines",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Malformed lines to skip before giving up; not of csv.",
)
@click.option("--delimiter", default=",", show_default=True, help="Of csv.")
@click.option(
    "--type",
    "types",
    metavar="COLUMN=TYPE",
    multiple=True,
    help="Of a column of csv, as user=uint64; any number of times.",
)
@click.option("--overwrite", is_flag=True, help="Replace a file at TARGET.")
@click.pass_context
def convert(
    context: click.Context, /, kind: str, sources: Sequence[str], target: str, **options: Any
) -> None:
    """Write text files to one Parquet file.

    The files SOURCE... go to TARGET, one after the other.

    Each SOURCE is a path, pattern or fsspec URL; for movielens it is one, the folder. criteo and
    movielens become the columns that `CriteoData` and `MovieLensData` make of them: label, dense
    numbers, and ids (int64, null or a shorter list where there is none). csv keeps its header's
    names, and the types that pyarrow finds in its first megabyte, uint64 included; whole numbers
    that no 64 bits hold together are refused. TARGET is complete or as it was, and none of the
    files that are read.

    The exit status is 0 if all is well, 1 if something is wrong with a file, 2 for a command line
    that is wrong.
    """
    _refuse_others(context, kind)
    if kind == "movielens" and len(sources) > 1:
        raise click.UsageError(f"movielens is one folder, got {', '.join(sources)}; pass one")
    try:
        from recsdk_pipeline.data_command.conversion import ADVICE, conversion
        from recsdk_pipeline.data_command.csv_files import types_of
    except ImportError as error:
        raise click.ClickException(_NEEDED) from error
    with checking_arguments():
        _check_delimiter(options["delimiter"])
        types = types_of(options["types"])
    bar = progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    )
    try:
        refuse_taken(file_to_write(target), options["overwrite"], ADVICE)
        job = conversion(
            kind,
            sources,
            delimiter=options["delimiter"],
            types=types,
            max_bad_lines=options["max_bad_lines"],
        )
        with bar:
            task = bar.add_task("converting", total=job.total_bytes)
            job.write(
                target,
                options["rows_a_group"],
                options["overwrite"],
                lambda done: bar.update(task, completed=done),
            )
    except (RecsdkError, OSError, ValueError, TypeError) as error:
        raise Failure(error) from error
    lines = f", {job.bad.count} malformed lines skipped" if job.bad.count else ""
    click.echo(f"{target}: {job.num_rows:,} rows, {os.path.getsize(target):,} bytes{lines}")


def _check_delimiter(text: str) -> None:
    if len(text) != 1 or not text.isascii() or text in '\r\n"':
        tab = "; for a tab pass $'\\t'" if text == "\\t" else ""
        raise ValueError(
            "--delimiter must be one character of ASCII, not a quote or the end of a line, got "
            f"{text!r}{tab}"
        )


def _refuse_others(context: click.Context, kind: str) -> None:
    """Refuse an option that is not one of this kind of source."""
    others = {"max_bad_lines": "--max-bad-lines"} if kind == "csv" else _OF_CSV
    for name, option in others.items():
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            raise click.UsageError(f"{option} is no option of {kind}")


@data.command()
@click.argument("source", callback=checked_by(require_protocols))
@report_options
@click.option("--time", metavar="COLUMN", help="When each row was: integers or timestamps.")
def describe(source: str, target: str | None, png: str | None, time: str | None) -> None:
    """Say what Parquet files hold: rows, and of each column its ids.

    SOURCE is a file, folder or pattern, local or by fsspec URL; it is read once, in bounded memory.
    Columns of integers, text, or lists of them count as ids: how many different ones there are
    (exact up to 65,536, then within a standard error of 0.5 %), the exponent of Zipf's law, and the
    lengths of bags. With --time also how long before the latest row an id came first (its age)
    and last (idle): for half, 90 and 99 % of the different ids at most that.

    The exit status is 0 if all is well, 1 if something is wrong with a file, 2 for a command line
    that is wrong.
    """
    try:
        from recsdk_pipeline.data_command.description import describe_files
    except ImportError as error:
        raise click.ClickException(_NEEDED) from error
    try:
        if png is not None:
            from recsdk_pipeline.data_command.drawing import draw
    except ImportError as error:
        text = '--png needs matplotlib; run pip install "recsdk-pipeline[plot]"'
        raise click.ClickException(text) from error
    bar = progress(TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    try:
        written = None if target in (None, "-") else file_to_write(target)
        drawn = None if png is None else file_to_write(png)
        with bar:
            task = bar.add_task("reading", total=None)
            found = describe_files(
                source, lambda rows, total: bar.update(task, completed=rows, total=total), time
            )
        if written is not None:
            with written_anew(written) as file:
                file.write_text(json.dumps(found.as_json(), indent=2) + "\n")
        if drawn is not None:
            with written_anew(drawn) as file:
                draw(found, file)
    except (RecsdkError, OSError, ValueError, TypeError, ImportError) as error:
        raise Failure(error) from error
    if target == "-":
        click.echo(json.dumps(found.as_json(), indent=2))
    else:
        groups = f"{found.row_groups:,} row group{'s' * (found.row_groups != 1)}"
        click.echo(f"{source}: {found.rows:,} rows, {groups}")
        _print(found)


def _print(found: Description) -> None:
    """A table; a list on a screen that is too narrow for the table's numbers."""
    names = ["column", "type", "nulls", "ids", "different", "Zipf", "bags: mean, 50, 90, 99 %"]
    if any(column.ids and column.ids.ages for column in found.columns):
        names += ["age: 50, 90, 99 %", "idle: 50, 90, 99 %"]
    rows = [_cells(column) for column in found.columns]
    shown = screen()
    cells = list(zip_longest(names, *rows, fillvalue=""))
    if (widths := _widths(cells, shown.width - 3 * len(names) - 1)) is not None:
        shown.print(_table(names, rows, widths))
        return
    for row in rows:
        for name, cell in zip(names, row, strict=False):
            is_column = name == "column"  # which may have an empty name
            if cell or is_column:
                indent = "" if is_column else "  "
                shown.print(escape(f"{indent}{name}: {cell}"), overflow="fold")


def _widths(columns: Sequence[Sequence[str]], available: int) -> list[int] | None:
    """Of a table's columns, titles first, so that no number is cut in two; None: there are none."""
    least = [_least_width(cells) for cells in columns]
    if sum(least) > available:
        return None
    widths = [max(map(cell_len, cells)) for cells in columns]
    while sum(widths) > available:
        _, widest = max((width, n) for n, width in enumerate(widths) if width > least[n])
        widths[widest] -= 1
    return widths


def _least_width(cells: Sequence[str]) -> int:
    longest = max(cell_len(word) for cell in cells for word in cell.split() or [""])
    return min(longest, _LEAST_TEXT) if cells[0] in _TEXTS else longest


def _table(names: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int]) -> Table:
    table = Table()
    for name, width in zip(names, widths, strict=True):
        justify: Literal["left", "right"] = "left" if name in _TEXTS else "right"
        table.add_column(name, justify=justify, overflow="fold", width=width)
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def _cells(column: Column) -> list[str]:
    cells = [column.name, column.type, f"{column.nulls:,}"]
    ids = column.ids
    if ids is None:
        return cells
    about = "" if ids.standard_error == 0 else "~"
    cells += [f"{ids.num_ids:,}", f"{about}{ids.num_distinct:,}"]
    cells.append("" if ids.zipf is None else f"{ids.zipf.exponent:.2f}")
    bags = ids.bag_lengths
    cells.append(f"{bags.mean:.2f}, {bags.p50}, {bags.p90}, {bags.p99}" if bags else "")
    return cells + (
        [_spread(ids.ages, ids.ages.age), _spread(ids.ages, ids.ages.idle)] if ids.ages else []
    )


def _spread(ages: Ages, times: Percentiles) -> str:
    each = (times.p50, times.p90, times.p99)
    if ages.unit != "s":
        return ", ".join(f"{time:,.0f}" for time in each)
    return ", ".join(_duration(time) for time in each)


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
