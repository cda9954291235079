"""`recsdk plan`: memory and sharding of the tables that described data would fill."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import click

from recsdk_core.cli import Failure, checked_by, checking_arguments
from recsdk_core.files import local_path
from recsdk_core.simulation import read_description

__all__ = ["plan"]

_GIB = 2**30
_TIMEOUT = timedelta(minutes=1)
_REQUIREMENT = re.compile(r"requirement for model parallel: .*ddr = ([0-9.]+) GB")
_OPTIMIZERS = ("sgd", "rowwise_adagrad", "adagrad", "adam")


@click.command()
@click.argument("description", callback=checked_by(local_path))
@click.option(
    "--world-size", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks."
)
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    default=4096,
    show_default=True,
    help="Samples of a rank's batch.",
)
@click.option(
    "--dim",
    "dims",
    multiple=True,
    default=("64",),
    show_default=True,
    metavar="[COLUMN=]DIM",
    help="Row width of all tables, or of one column's; may be given again.",
)
@click.option(
    "--optimizer", type=click.Choice(_OPTIMIZERS), default="rowwise_adagrad", show_default=True
)
@click.option(
    "--growth",
    type=click.FloatRange(min=1),
    default=1.0,
    show_default=True,
    help="Rows for each that the files have.",
)
@click.option(
    "--column", "columns", multiple=True, help="A column to plan; all columns of ids by default."
)
@click.option(
    "--host-memory",
    type=click.FloatRange(min=0, min_open=True),
    default=128.0,
    show_default=True,
    help="GiB of a rank.",
)
def plan(
    description: str,
    world_size: int,
    batch_size: int,
    dims: Sequence[str],
    optimizer: str,
    growth: float,
    columns: Sequence[str],
    host_memory: float,
) -> None:
    """Plan tables for the columns of ids of files, and their memory.

    Each column of ids in DESCRIPTION, which `recsdk data describe` wrote, gets a table.

    DESCRIPTION is a file of its --json. A table's rows are the different ids of its column, and
    its traffic their number in a row. Prints the memory of each table and rank on the cpu, and how
    the planner would cut the tables. Nothing is allocated.

    The exit status is 0 if all is well, 1 if something is wrong with the file or no plan fits, 2
    for a command line that is wrong.
    """
    with checking_arguments():
        of_all, asked = _dims(dims)
    try:
        found = _read(description)
        with checking_arguments():
            _check_columns(description, found, columns, asked)
        described = {name: found[name] for name in columns or found}
        of_column = {name: asked.get(name, of_all) for name in described}
        tables = [(name, of_column[name], *counts) for name, counts in described.items()]
        with _quiet(), _one_process() as host_env:
            text = _planned(
                tables, world_size, batch_size, optimizer, growth, host_memory, host_env
            )
    except (OSError, ValueError) as error:
        raise Failure(error) from error
    click.echo(text)


def _read(path: str) -> dict[str, tuple[int, float]]:
    """(different ids, ids a row) of each column that has ids."""
    described = read_description(path)
    rows = max(described["rows"], 1)
    found = {
        each["name"]: (each["ids"]["num_distinct"], each["ids"]["num_ids"] / rows)
        for each in described["columns"]
        if each["ids"]
    }
    if not found:
        raise ValueError(f"{path}: no column has ids")
    return found


def _dims(given: Sequence[str]) -> tuple[int, dict[str, int]]:
    """That of all tables, and those of columns."""
    of_all, of_column = 64, dict[str, int]()
    for text in given:
        name, _, number = text.rpartition("=")
        if not number.isdecimal() or int(number) < 1:
            raise ValueError(f"--dim must be DIM or COLUMN=DIM, such as user=128, got {text!r}")
        if name:
            of_column[name] = int(number)
        else:
            of_all = int(number)
    return of_all, of_column


def _check_columns(
    path: str, found: Collection[str], columns: Sequence[str], dims: Mapping[str, int]
) -> None:
    for name in columns:
        if name not in found:
            raise ValueError(
                f"--column must be one of those with ids in {path}, {', '.join(found)}, "
                f"got {name!r}"
            )
    for name, dim in dims.items():
        if name not in (columns or found):
            raise ValueError(
                f"--dim must be of a column among {', '.join(columns or found)}, got '{name}={dim}'"
            )


@contextmanager
def _quiet() -> Iterator[None]:
    """torchrec's planner warns of its own defaults."""
    log = logging.getLogger("torchrec")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        log.setLevel(before)


@contextmanager
def _one_process() -> Iterator[Any]:
    """A group for the sharders, which plan alone and exchange nothing."""
    import torch.distributed as dist
    from torchrec.distributed.types import ShardingEnv

    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=_TIMEOUT)
    try:
        group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        yield ShardingEnv(world_size=1, rank=0, pg=group)
    finally:
        dist.destroy_process_group()


def _planned(
    tables: Sequence[tuple[str, int, int, float]],
    world_size: int,
    batch_size: int,
    optimizer: str,
    growth: float,
    host_memory: float,
    host_env: Any,
) -> str:
    import torch
    from torchrec.distributed.planner import Topology
    from torchrec.distributed.planner.types import PlannerError
    from torchrec.optim import RowWiseAdagrad
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    import recsdk_sharding as rs

    kinds = (torch.optim.SGD, RowWiseAdagrad, torch.optim.Adagrad, torch.optim.Adam)
    configs = [
        rs.HashEmbeddingBagConfig(
            name=name, embedding_dim=dim, num_embeddings=max(distinct, 1), feature_names=[name]
        )
        for name, dim, distinct, _ in tables
    ]
    ebc = rs.HashEmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    model = torch.nn.ModuleDict({"tables": ebc})
    kind = dict(zip(_OPTIMIZERS, kinds, strict=True))[optimizer]
    apply_optimizer_in_backward(kind, model.parameters(), {"lr": 0.1})
    planner = rs.HashEmbeddingShardingPlanner(
        topology=Topology(
            world_size=world_size, compute_device="cpu", ddr_cap=round(host_memory * _GIB)
        ),
        batch_size=batch_size,
        constraints={
            name: rs.HashParameterConstraints(
                expected_rows=distinct, growth=growth, pooling_factors=[ids_a_row]
            )
            for name, _, distinct, ids_a_row in tables
        },
    )
    try:
        planner.plan(model, [rs.HashEmbeddingBagCollectionSharder(host_env=host_env)])
    except PlannerError as error:
        ranks = f"{world_size} rank{'s' * (world_size > 1)}"
        raise ValueError(
            f"no plan fits {ranks} of {host_memory:g} GiB; give more --world-size, more "
            f"--host-memory or a smaller --dim{_needed(error)}"
        ) from error
    return str(planner)


def _needed(error: Exception) -> str:
    """What the tables take, as torchrec says it; nothing where it does not."""
    told = _REQUIREMENT.search(str(error))
    return f"; the tables take {float(told[1]):g} GiB in all" if told else ""
