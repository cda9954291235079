"""`recsdk freeze`: makes of a checkpoint what servers read."""

from __future__ import annotations

import json
from typing import Any

import click

from recsdk_core.checkpoint.columns import tables_of_keys
from recsdk_core.checkpoint.command import (
    check_place,
    progress_bar,
    refuse_other_tables,
)
from recsdk_core.checkpoint.merging import bytes_to_read
from recsdk_core.checkpoint.owners import Owner
from recsdk_core.checkpoint.reading import chain_of
from recsdk_core.cli import Failure, checked_by
from recsdk_core.errors import RecsdkError
from recsdk_core.files import local_path
from recsdk_core.predicates import Predicate
from recsdk_core.serving.freezing import freeze as freeze_tables
from recsdk_core.serving.manifest import DTYPES
from recsdk_core.virtual_shards import NUM_VIRTUAL_SHARDS

__all__ = ["freeze"]


@click.command()
@click.argument("source", metavar="CHECKPOINT", callback=checked_by(check_place))
@click.argument("target", metavar="TARGET", callback=checked_by(local_path))
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="float32",
    show_default=True,
    help="How rows are stored.",
)
@click.option(
    "--num-shards",
    type=click.IntRange(1, NUM_VIRTUAL_SHARDS),
    default=1,
    show_default=True,
    help="Files for each table.",
)
@click.option(
    "--max-rows",
    type=click.IntRange(0),
    help="Refuse to freeze if a table has more rows. None is left out to make it fit.",
)
@click.option(
    "--where",
    metavar="PREDICATE",
    callback=checked_by(Predicate),
    help="Leave out rows of which it is not true, as 'idle <= 1000 or count > 3'.",
)
@click.option(
    "--table",
    "tables",
    multiple=True,
    help="Of which --where is; several times for several. By default all are.",
)
@click.option("--overwrite", is_flag=True, help="Replace a frozen checkpoint at TARGET.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def freeze(
    source: str,
    target: str,
    dtype: Any,
    num_shards: int,
    max_rows: int | None,
    where: str | None,
    tables: tuple[str, ...],
    overwrite: bool,
    as_json: bool,
) -> None:
    """Freeze a checkpoint to files that servers map.

    CHECKPOINT, or the chain that ends with it, goes to the local folder TARGET.

    The exit status is 0 if all is well, 1 if something is wrong with a file, 2 for a command line
    that is wrong.
    """
    if tables and where is None:
        raise click.UsageError("--table says which tables --where is for; give --where, too")
    try:
        refuse_other_tables(source, tables)
        chain = chain_of(source)
        names = [entry.name for entry in tables_of_keys(chain[-1].manifest.tables)]
        with progress_bar(bytes_to_read(chain, names, [Owner()]), "freezing") as progress:
            manifest = freeze_tables(
                source,
                target,
                dtype=dtype,
                num_shards=num_shards,
                max_rows=max_rows,
                where=dict.fromkeys(tables, where) if where and tables else where,
                overwrite=overwrite,
                progress=progress,
            )
    except (RecsdkError, ValueError, OSError, ImportError) as error:
        raise Failure(error) from error
    if as_json:
        written = {
            entry.name: {"num_rows": entry.num_rows, "num_bytes": entry.num_bytes}
            for entry in manifest.tables
        }
        value = {"location": target, "token": manifest.token, "tables": written}
        click.echo(json.dumps(value, indent=2))
        return
    for entry in manifest.tables:
        click.echo(
            f"{entry.name}: {entry.num_rows} rows of width {entry.dim}, {entry.dtype}, "
            f"{entry.num_bytes} bytes in {len(entry.files)} file{'s' * (len(entry.files) > 1)}"
        )
