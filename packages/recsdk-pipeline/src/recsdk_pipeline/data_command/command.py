"""The command line of `recsdk data`."""

from __future__ import annotations

import os
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn


@click.group()
def data() -> None:
    """Convert files of training data."""


@data.command()
@click.argument("kind", type=click.Choice(["criteo", "movielens", "csv"]))
@click.argument("source")
@click.argument("target")
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
    help="Malformed lines to skip before giving up; csv has none.",
)
@click.option("--delimiter", default=",", show_default=True, help="Of csv.")
def convert(kind: str, source: str, target: str, **options: Any) -> None:
    """Write the text files SOURCE to one Parquet file TARGET.

    SOURCE is a path, pattern or fsspec URL; of movielens the folder. criteo and movielens become
    the columns that `CriteoData` and `MovieLensData` make of them: label, dense numbers, and ids
    (int64, null or a shorter list where there is none). csv keeps its header's names, and the types
    that pyarrow finds in its first megabyte. TARGET is complete or not there.
    """
    try:
        from recsdk_pipeline.data_command.conversion import conversion
    except ImportError as error:
        text = 'recsdk data needs pyarrow and fsspec; run pip install "recsdk-pipeline[data]"'
        raise click.ClickException(text) from error
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    try:
        job = conversion(kind, source, options["delimiter"], options["max_bad_lines"])
        with bar:
            task = bar.add_task("converting", total=job.total_bytes)
            job.write(
                target,
                options["rows_a_group"],
                lambda done: bar.update(task, completed=done),
            )
    except (OSError, ValueError, TypeError) as error:
        raise click.ClickException(str(error)) from error
    lines = f", {job.bad.count} malformed lines skipped" if job.bad.count else ""
    click.echo(f"{target}: {job.num_rows:,} rows, {os.path.getsize(target):,} bytes{lines}")
