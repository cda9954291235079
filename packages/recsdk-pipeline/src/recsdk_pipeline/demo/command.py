"""The command line of `recsdk demo`: starts the ranks, which do the work."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import click

from recsdk_core.cli import checked_by
from recsdk_core.files import local_path
from recsdk_core.files.urls import require_protocols
from recsdk_pipeline.demo.settings import Settings


class _LocalPath(click.Path):
    """A path on this machine."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        try:
            local_path(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return super().convert(value, param, ctx)


_AT_LEAST_ONE = click.IntRange(min=1)


@click.command()
@click.option("--world-size", type=_AT_LEAST_ONE, default=2, show_default=True, help="Ranks.")
@click.option("--epochs", type=_AT_LEAST_ONE, help="Passes over the data.")
@click.option(
    "--examples",
    type=click.IntRange(min=10),
    help="Examples of the stream to train on in an epoch; of files, the examples to read, a tenth "
    "of which is held out.",
)
@click.option("--batch-size", type=_AT_LEAST_ONE, help="Examples a step, over all ranks.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--output",
    type=_LocalPath(file_okay=False),
    default="build/demo",
    show_default=True,
    help="Folder for summary.json.",
)
@click.option(
    "--movielens",
    type=_LocalPath(exists=True, file_okay=False),
    help="Train on a MovieLens 100K folder.",
)
@click.option(
    "--criteo",
    type=_LocalPath(exists=True, dir_okay=False),
    help="Train on a file in Criteo's format, as it is or packed by gzip.",
)
@click.option(
    "--parquet",
    metavar="PATH_OR_URL",
    callback=checked_by(require_protocols),
    help="Train on Parquet files: a file, folder or pattern, local or by fsspec URL.",
)
@click.option("--label", metavar="COLUMN", help="Of --parquet, 0 or 1. Default: label.")
@click.option(
    "--ids", metavar="COLUMNS", help="Of --parquet, with commas. Default: integers, text and lists."
)
@click.option(
    "--dense", metavar="COLUMNS", help="Of --parquet, with commas. Default: floating numbers."
)
@click.option(
    "--max-bad-lines",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Malformed lines to skip before giving up; of --parquet rows, on each rank.",
)
def demo(**options: Any) -> None:
    """Train a DLRM on raw 64-bit ids over several ranks.

    By default on a synthetic click stream, drawn from --seed. Needs no data and, with two cores,
    less than two minutes.

    The exit status is 0 if all is well, 1 if a rank failed, 2 for a command line that is wrong.
    """
    _check_sources(options)
    settings = Settings(**options, started_at=time.time())
    ranks = f"{settings.world_size} rank{'s' * (settings.world_size > 1)}"
    click.echo(f"recsdk demo: starting {ranks}")
    raise SystemExit(_run_ranks(settings))


def _check_sources(options: dict[str, Any]) -> None:
    named = [f"--{each}" for each in ("movielens", "criteo", "parquet") if options[each]]
    if len(named) > 1:
        raise click.UsageError(f"{' and '.join(named)} are {len(named)} sources of data; pass one")
    for each in ("label", "ids", "dense"):
        if options[each] is not None and not options["parquet"]:
            raise click.UsageError(f"--{each} names columns of --parquet; pass that too")


def _run_ranks(settings: Settings) -> int:
    """Run the ranks under torchrun, to their end; return the exit status."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # said below
    ranks = ["--standalone", "--nproc-per-node", str(settings.world_size)]
    try:
        run.main([*ranks, "--module", "recsdk_pipeline.demo", settings.to_json()])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        click.echo(f"recsdk demo: rank {rank} ended with status {failure.exitcode}", err=True)
        return 1
    except SignalException as signal:
        click.echo(f"recsdk demo: stopped by {signal.sigval.name}", err=True)
        return 128 + signal.sigval.value
    return 0
