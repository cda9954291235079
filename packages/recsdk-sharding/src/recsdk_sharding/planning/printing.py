"""Plans as tables of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrec.distributed.planner.types import (
    ParameterConstraints,
    ShardingOption,
    Stats,
    Topology,
)
from torchrec.distributed.types import ShardingPlan

from recsdk_sharding._adapt.npu import compute_device_of
from recsdk_sharding.planning.checking import check_instance
from recsdk_sharding.planning.constraints import planned_rows
from recsdk_sharding.planning.planned_tables import row_shards_of, table_of_option

__all__ = ["PlanTable", "format_plan"]

_KIB = 1024
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_plan(plan: ShardingPlan) -> str:
    """A plan, whoever made it, as a table: a line for each table of the model.

    `columns` has the widths of its column ranges, `ranks` the ranks that have shards of it. Raises
    TypeError for what is no plan.
    """
    check_instance("plan", plan, ShardingPlan, "a torchrec ShardingPlan")
    lines = [("module", "table", "type", "kernel", "columns", "ranks")]
    for path, module in plan.plan.items():
        for name, sharding in module.items():
            spec = sharding.sharding_spec
            cuts = [] if spec is None else [(s.shard_offsets, s.shard_sizes) for s in spec.shards]
            columns = _widths(cuts) if cuts else "all"
            kernel, ranks = sharding.compute_kernel, _ranks(sharding.ranks or [])
            lines.append((path, name, sharding.sharding_type, kernel, columns, ranks))
    return _aligned(lines)


class PlanTable(Stats):  # type: ignore[misc]
    """Keeps the last plan of a planner, with its estimates; `str()` gives it as tables of text.

    The first has a line for each table: `rows`, `device` and `host` (memory) and `ms` (of a step)
    are those of the rank that has most of the table. The second has a line for each rank: its
    estimated use, and what it has. Without devices there are no columns for them.
    """

    def __init__(self) -> None:
        self._text = "no plan yet"

    def log(
        self,
        sharding_plan: ShardingPlan,
        topology: Topology,
        batch_size: int,
        storage_reservation: Any,
        num_proposals: int,
        num_plans: int,
        run_time: float,
        best_plan: list[ShardingOption],
        constraints: Mapping[str, ParameterConstraints] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Called by the planner."""
        if not sharding_plan.plan:
            self._text = "no plan found"
            return
        title = (
            f"{topology.world_size} rank{'s' * (topology.world_size > 1)}, "
            f"{compute_device_of(topology)}, batches of {batch_size} "
            f"on each; plans compared: {num_plans}"
        )
        tables = _table_lines(best_plan, topology, constraints or {})
        ranks = _rank_lines(best_plan, topology)
        if not any(device.storage.hbm for device in topology.devices):
            tables = [line[:6] + line[7:] for line in tables]
            ranks = [line[:1] + line[3:] for line in ranks]
        self._text = "\n".join([title, "", _aligned(tables), "", _aligned(ranks)])

    def __str__(self) -> str:
        """The last plan; "no plan yet" before the first."""
        return self._text


def _table_lines(
    options: Sequence[ShardingOption], topology: Topology, constraints: Mapping[str, Any]
) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = [
        ("module", "table", "type", "columns", "ranks", "rows", "device", "host", "ms")
    ]
    for option in options:
        on_rank = [_add_up(shards) for shards in _by_rank([option]).values()]
        lines.append(
            (
                option.path,
                option.name,
                option.sharding_type,
                _widths([(shard.offset, shard.size) for shard in option.shards]),
                _ranks([shard.rank for shard in option.shards]),
                f"{_rows(option, topology, constraints):,}",
                _bytes(max(device for device, _, _ in on_rank)),
                _bytes(max(host for _, host, _ in on_rank)),
                f"{max(time for _, _, time in on_rank):.3g}",
            )
        )
    return lines


def _rank_lines(options: Sequence[ShardingOption], topology: Topology) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = [("rank", "device", "of", "host", "of", "ms")]
    shards = _by_rank(options)
    for device in topology.devices:
        used, host, time = _add_up(shards.get(device.rank, []))
        has = device.storage
        lines.append(
            (
                str(device.rank),
                *(_bytes(count) for count in (used, has.hbm, host, has.ddr)),
                f"{time:.3g}",
            )
        )
    return lines


def _rows(option: ShardingOption, topology: Topology, constraints: Mapping[str, Any]) -> int:
    """Rows of the table that a rank with a shard of it has."""
    table = table_of_option(option)
    if table is None:
        return max(int(shard.size[0]) for shard in option.shards)
    return -(-planned_rows(table, constraints.get(option.name)) // row_shards_of(option, topology))


def _by_rank(options: Sequence[ShardingOption]) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for option in options:
        for shard in option.shards:
            found.setdefault(shard.rank, []).append(shard)
    return found


def _add_up(shards: Sequence[Any]) -> tuple[int, int, float]:
    """Memory on the device and on the host, and time."""
    return (
        sum(shard.storage.hbm for shard in shards),
        sum(shard.storage.ddr for shard in shards),
        sum(shard.perf.total for shard in shards),
    )


def _widths(cuts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> str:
    """The widths of column ranges, from offsets and sizes of shards: "8", "4+4", "3x32"."""
    widths = list({offset[1]: size[1] for offset, size in cuts}.values())
    if len(widths) > 2 and len(set(widths)) == 1:
        return f"{len(widths)}x{widths[0]}"
    return "+".join(map(str, widths))


def _ranks(ranks: Sequence[int | None]) -> str:
    """Ranks in ascending order; runs as "0-3"."""
    runs: list[list[int]] = []
    for rank in sorted({rank for rank in ranks if rank is not None}):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _bytes(count: int) -> str:
    amount, unit = float(count), 0
    while amount >= _KIB and unit < len(_UNITS) - 1:
        amount, unit = amount / _KIB, unit + 1
    return f"{amount:.4g} {_UNITS[unit]}"


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    """Columns side by side; columns of numbers are aligned to the right."""
    columns = list(zip(*lines, strict=True))
    widths = [max(map(len, column)) for column in columns]
    is_number = [all(cell[:1].isdigit() for cell in column[1:]) for column in columns]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, is_number, strict=True)
        ).rstrip()
        for line in lines
    )
